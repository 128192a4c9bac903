"""What a model says: greedy answers to many questions, and exactly which of a list of answers it finds likeliest."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from PIL import Image
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, ProcessorMixin

from diagnostics.parts import DiagnosticsError


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


def answer_ids(processor: Any, prompt: Prompt, answer: str) -> list[int]:
    """Token ids of an answer as the chat template writes it after the prompt, up to the token that ends the turn; of
    the answer and the tokenizer's own end where the template writes no such token."""
    tokenizer = getattr(processor, "tokenizer", processor)
    turn = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    try:
        texts = (
            processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False),
            processor.apply_chat_template([*prompt, turn], tokenize=False),
        )
    except (TypeError, ValueError, TemplateError):  # there is none, or it takes no lists
        texts = ("", "")
    before, whole = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    ends = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    written = whole[len(before) :] if whole[: len(before)] == before else []
    length = next((place + 1 for place, token in enumerate(written) if token in ends), 0)
    if length and tokenizer.decode(written[: length - 1]).strip() == answer:
        return written[:length]
    return tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids


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


class ReadPrompt(NamedTuple):
    """A prompt's keys and values, and log-probabilities of the token after it, `(vocab_size,)`."""

    cache: DynamicCache
    first: torch.Tensor


@torch.no_grad()
def read(model: PreTrainedModel, inputs: Any) -> ReadPrompt:
    """Read a prompt of one row, as [`encode`] returns it."""
    cache = DynamicCache(config=model.config.get_text_config())
    logits = model(**inputs, past_key_values=cache, logits_to_keep=1).logits
    return ReadPrompt(cache, logits[0, -1].float().log_softmax(dim=-1))


@torch.no_grad()
def distributions(model: PreTrainedModel, prompt: ReadPrompt, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Log-probabilities by token of each answer, `(len(answer), vocab_size)`; `DiagnosticsError` if there are none."""
    tokens = [torch.tensor(answer, device=model.device) for answer in [*answers, [0, 0]]]  # a pass needs one to follow
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)[:-1]  # [num_answers, longest]
    shared = copy.deepcopy(prompt.cache)
    try:
        shared.batch_repeat_interleave(len(answers))
    except AttributeError as error:  # of a layer's state that is no keys and values
        raise DiagnosticsError("Its decoder keeps more than keys and values, so answers can't be scored.") from error
    # No mask: padding comes last, and decoders with positions in three axes take none beside a cache.
    logits = model(input_ids=padded[:, :-1], past_key_values=shared).logits
    following = logits.float().log_softmax(dim=-1)
    return [
        torch.cat([prompt.first[None], of[: len(answer) - 1]]) for answer, of in zip(answers, following, strict=True)
    ]


def likeliest(model: PreTrainedModel, prompt: ReadPrompt, answers: Sequence[Sequence[int]]) -> int:
    """Index of the answer with the highest log-probability after a prompt, its end token included. Exact.

    An answer can't be likelier than its first token. So answers are scored in the order of their first tokens, a few
    at a time on the prompt's keys and values, until the best one so far beats all that are left. Each is given as at
    least two token ids, its end token included.
    """
    starts = prompt.first[[tokens[0] for tokens in answers]]  # [num_answers]
    best, best_score = -1, -torch.inf
    for chunk in starts.argsort(descending=True, stable=True).split(CHUNK):
        if starts[chunk[0]] < best_score:
            break
        given = [answers[index] for index in chunk.tolist()]
        for index, tokens, of in zip(chunk.tolist(), given, distributions(model, prompt, given), strict=True):
            score = of[range(len(tokens)), tokens].sum().item()
            if score > best_score:
                best, best_score = index, score
    return best
