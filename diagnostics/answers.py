"""What a model says: greedy answers to many questions, and exactly which of a list of answers it finds likeliest."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, ProcessorMixin


# A conversation of one turn, as chat templates take it.
Prompt = list[dict[str, Any]]
BATCH_SIZE = 50
# Overrides the checkpoint's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# Answers that `likeliest` scores together.
CHUNK = 8


def ask(question: str, image: Image.Image | None = None) -> Prompt:
    """One question as a conversation, about a picture if there is one."""
    if image is None:
        return [{"role": "user", "content": question}]
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]


def encode(processor: Any, prompts: list[Prompt]) -> Any:
    """A padded batch of prompts, each up to where the answer begins."""
    options = {"padding": True}
    return processor.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **({"processor_kwargs": options} if isinstance(processor, ProcessorMixin) else options),
    )


@torch.no_grad()
def answer(
    model: PreTrainedModel, processor: Any, prompts: list[Prompt], title: str, max_new_tokens: int = 6
) -> list[str]:
    """Greedy answers. `processor` may be a tokenizer, for text alone; `title` is what the progress bar says."""
    answers: list[str] = []
    for start in tqdm(range(0, len(prompts), BATCH_SIZE), desc=title):
        inputs = encode(processor, prompts[start : start + BATCH_SIZE]).to(model.device)
        generated = model.generate(**inputs, **GREEDY, max_new_tokens=max_new_tokens)
        answers += processor.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in answers]


@torch.no_grad()
def likeliest(model: PreTrainedModel, inputs: Any, answers: Sequence[Sequence[int]]) -> int:
    """Index of the answer with the highest log-probability after a prompt, its end token included. Exact.

    An answer can't be likelier than its first token. So answers are scored in the order of their first tokens, a few
    at a time on the prompt's keys and values, until the best one so far beats all that are left.

    Args:
        model: A model that generates.
        inputs: A prompt of one row, as `encode` returns it.
        answers: Token ids of each answer, with its end token; at least two tokens each.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    first = model(**inputs, past_key_values=cache, logits_to_keep=1).logits[0, -1].float().log_softmax(dim=-1)
    starts = first[[tokens[0] for tokens in answers]]  # [num_answers]
    best, best_score = -1, -torch.inf
    for chunk in starts.argsort(descending=True, stable=True).split(CHUNK):
        if starts[chunk[0]] < best_score:
            break
        tokens = [torch.tensor(answers[index], device=model.device) for index in chunk.tolist()]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)  # [chunk, longest answer]
        shared = copy.deepcopy(cache)
        shared.batch_repeat_interleave(len(chunk))
        mask = padded.new_ones(len(chunk), inputs["input_ids"].shape[1] + padded.shape[1] - 1)
        logits = model(input_ids=padded[:, :-1], attention_mask=mask, past_key_values=shared).logits
        following = logits.float().log_softmax(dim=-1).gather(-1, padded[:, 1:, None])[..., 0]
        for index, length, scores in zip(chunk.tolist(), map(len, tokens), following, strict=True):
            score = (starts[index] + scores[: length - 1].sum()).item()
            if score > best_score:
                best, best_score = index, score
    return best
