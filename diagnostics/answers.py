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


def make_prompt(question: str, image: Image.Image | None = None) -> Prompt:
    """One question as a conversation, about a picture if there is one."""
    if image is None:
        return [{"role": "user", "content": question}]
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]


def encode_prompts(processor: Any, prompts: list[Prompt]) -> Any:
    """A padded batch of prompts, each up to where the answer begins."""
    # A tokenizer takes its options as they are, a processor in a dictionary.
    padding: dict[str, Any] = {"padding": True}
    if isinstance(processor, ProcessorMixin):
        padding = {"processor_kwargs": padding}

    return processor.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **padding,
    )


@torch.no_grad()
def answer_prompts(
    model: PreTrainedModel, processor: Any, prompts: list[Prompt], title: str, max_new_tokens: int = 6
) -> list[str]:
    """Greedy answers. `processor` may be a tokenizer, for text alone; `title` is what the progress bar says."""
    answers: list[str] = []
    for start in tqdm(range(0, len(prompts), BATCH_SIZE), desc=title):
        inputs = encode_prompts(processor, prompts[start : start + BATCH_SIZE]).to(model.device)
        generated = model.generate(**inputs, **GREEDY, max_new_tokens=max_new_tokens)
        prompt_length = inputs["input_ids"].shape[1]
        answers += processor.batch_decode(generated[:, prompt_length:], skip_special_tokens=True)
    return [text.strip() for text in answers]


def answer_ids(processor: Any, prompt: Prompt, answer: str) -> list[int]:
    """Token ids of an answer as the chat template writes it after the prompt, with the token that ends the turn.

    Where the template writes no such token, those of the answer with the tokenizer's own end.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    written = _written_after(processor, prompt, answer)
    end = _first_special(tokenizer, written)
    if end is not None and tokenizer.decode(written[:end]).strip() == answer:
        return written[: end + 1]
    return tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids


def _written_after(processor: Any, prompt: Prompt, answer: str) -> list[int]:
    """Token ids that the chat template writes after a prompt for an answer; none if it has another form."""
    turn = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    try:
        before = processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        whole = processor.apply_chat_template([*prompt, turn], tokenize=False)
    except (TypeError, ValueError, TemplateError):  # There is no template, or it takes no lists.
        return []

    tokenizer = getattr(processor, "tokenizer", processor)
    before_ids = tokenizer(before, add_special_tokens=False).input_ids
    whole_ids = tokenizer(whole, add_special_tokens=False).input_ids
    if whole_ids[: len(before_ids)] != before_ids:
        return []
    return whole_ids[len(before_ids) :]


def _first_special(tokenizer: Any, ids: Sequence[int]) -> int | None:
    """Index of the first special token among ids."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    for index, token_id in enumerate(ids):
        if token_id in special:
            return index
    return None


class ReadPrompt(NamedTuple):
    """A prompt's keys and values, and log-probabilities of the token after it, `(vocab_size,)`."""

    cache: DynamicCache
    first: torch.Tensor


@torch.no_grad()
def read_prompt(model: PreTrainedModel, inputs: Any) -> ReadPrompt:
    """Read a prompt of one row, as [`encode_prompts`] returns it."""
    cache = DynamicCache(config=model.config.get_text_config())
    logits = model(**inputs, past_key_values=cache, logits_to_keep=1).logits
    return ReadPrompt(cache, logits[0, -1].float().log_softmax(dim=-1))


@torch.no_grad()
def distributions(model: PreTrainedModel, prompt: ReadPrompt, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Log-probabilities of the next token at each token of each answer, `(len(answer), vocab_size)`.

    Raises:
        DiagnosticsError: if the decoder keeps more of a prompt than keys and values.
    """
    cache = copy.deepcopy(prompt.cache)
    try:
        cache.batch_repeat_interleave(len(answers))
    except AttributeError as error:  # Of a layer's state that is no keys and values.
        raise DiagnosticsError("Its decoder keeps more than keys and values, so answers can't be scored.") from error

    # Padded to two tokens at least: the last token isn't read, and a pass needs one.
    longest = max(2, *map(len, answers))
    padded = torch.zeros(len(answers), longest, dtype=torch.long, device=model.device)
    for row, answer in zip(padded, answers, strict=True):
        row[: len(answer)] = torch.tensor(answer)

    # No mask: padding comes last, and decoders with positions in three axes take none beside a cache.
    logits = model(input_ids=padded[:, :-1], past_key_values=cache).logits
    after_each = logits.float().log_softmax(dim=-1)  # [num_answers, longest - 1, vocab_size]

    scores = []
    for answer, after in zip(answers, after_each, strict=True):
        scores.append(torch.cat([prompt.first[None], after[: len(answer) - 1]]))
    return scores


def likeliest(model: PreTrainedModel, prompt: ReadPrompt, answers: Sequence[Sequence[int]]) -> int:
    """Index of the answer with the highest log-probability after a prompt, its end token included. Exact.

    An answer can't be likelier than its first token. So answers are scored in the order of their first tokens, a few
    at a time on the prompt's keys and values, until the best one so far beats all that are left. Each is given as at
    least two token ids, its end token included.
    """
    first_scores = prompt.first[[tokens[0] for tokens in answers]]  # [num_answers]
    best = -1
    best_score = -torch.inf
    for chunk in first_scores.argsort(descending=True, stable=True).split(CHUNK):
        if first_scores[chunk[0]] < best_score:
            break

        scored = distributions(model, prompt, [answers[index] for index in chunk.tolist()])
        for index, log_probabilities in zip(chunk.tolist(), scored, strict=True):
            tokens = answers[index]
            score = log_probabilities[range(len(tokens)), tokens].sum().item()
            if score > best_score:
                best = index
                best_score = score
    return best
