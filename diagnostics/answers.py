"""Asks a model for greedy answers to many questions, or for the likeliest of a list of answers to one question."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from PIL import Image
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, ProcessorMixin

from diagnostics.parts import DiagnosticsError


# A question as chat messages.
Prompt = list[dict[str, Any]]
BATCH_SIZE = 50
# Options of `generate` for plain greedy decoding. A checkpoint's generation config may sample or set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# Number of answers that `likeliest` scores in one pass.
CHUNK_SIZE = 8


def make_prompt(question: str, image: Image.Image | None = None) -> Prompt:
    """A question as chat messages, with a picture if one is given."""
    if image is None:
        return [{"role": "user", "content": question}]
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def encode_prompts(processor: Any, prompts: list[Prompt]) -> Any:
    """A padded batch of prompts, each up to where the answer begins."""
    # A tokenizer takes `padding` as an argument of its own, a processor takes it inside `processor_kwargs`.
    padding: dict[str, Any] = {"padding": True}
    if isinstance(processor, ProcessorMixin):
        padding = {"processor_kwargs": {"padding": True}}

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
    """Greedy answers to prompts, in their order.

    Args:
        model: The model.
        processor: The model's processor, or a tokenizer if no prompt has a picture.
        prompts: The questions.
        title: Text of the progress bar.
        max_new_tokens: Length at which an answer is cut off.
    """
    answers: list[str] = []
    for start in tqdm(range(0, len(prompts), BATCH_SIZE), desc=title):
        inputs = encode_prompts(processor, prompts[start : start + BATCH_SIZE]).to(model.device)
        generated = model.generate(**inputs, **GREEDY, max_new_tokens=max_new_tokens)
        prompt_length = inputs["input_ids"].shape[1]
        answers += processor.batch_decode(generated[:, prompt_length:], skip_special_tokens=True)
    return [text.strip() for text in answers]


def answer_ids(processor: Any, prompt: Prompt, answer: str) -> list[int]:
    """Token ids of an answer as the chat template writes it after the prompt, with the token that ends the turn.

    If the template writes the answer in another form or ends the turn without a special token, these are the ids of
    the plain answer and the tokenizer's end token.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    answer_turn = _ids_after_prompt(processor, prompt, answer)
    end = _find_first_special(tokenizer, answer_turn)
    if end is not None and tokenizer.decode(answer_turn[:end]).strip() == answer:
        return answer_turn[: end + 1]
    return tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids


def _ids_after_prompt(processor: Any, prompt: Prompt, answer: str) -> list[int]:
    """Token ids that the chat template writes after the prompt if the assistant gives this answer.

    The list is empty if the template can't write the conversation, or if it writes the prompt differently when an
    answer follows.
    """
    turn = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    try:
        prompt_text = processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        answered_text = processor.apply_chat_template([*prompt, turn], tokenize=False)
    except (TypeError, ValueError, TemplateError):  # There is no template, or it takes no lists of parts.
        return []

    tokenizer = getattr(processor, "tokenizer", processor)
    prompt_ids = tokenizer(prompt_text, add_special_tokens=False).input_ids
    answered_ids = tokenizer(answered_text, add_special_tokens=False).input_ids
    if answered_ids[: len(prompt_ids)] != prompt_ids:
        return []
    return answered_ids[len(prompt_ids) :]


def _find_first_special(tokenizer: Any, ids: Sequence[int]) -> int | None:
    """Index of the first id that is a special token; `None` if there is none."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    for index, token_id in enumerate(ids):
        if token_id in special:
            return index
    return None


class ReadPrompt(NamedTuple):
    """What a model keeps of a prompt that it has read, to score answers after it.

    Attributes:
        cache: Keys and values of the prompt.
        first_log_probabilities: The vocabulary's log-probabilities for the first token after the prompt,
            `(vocab_size,)`.
    """

    cache: DynamicCache
    first_log_probabilities: torch.Tensor


@torch.no_grad()
def read_prompt(model: PreTrainedModel, inputs: Any) -> ReadPrompt:
    """Run a model on one prompt.

    Args:
        model: The model.
        inputs: The prompt as [`encode_prompts`] returns it, with a batch size of 1.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    logits = model(**inputs, past_key_values=cache, logits_to_keep=1).logits
    return ReadPrompt(cache, logits[0, -1].float().log_softmax(dim=-1))


@torch.no_grad()
def distributions(model: PreTrainedModel, prompt: ReadPrompt, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """For each answer, the vocabulary's log-probabilities at the position of each of the answer's tokens.

    Args:
        model: The model.
        prompt: The prompt that the answers follow.
        answers: Token ids of each answer.

    Returns:
        A tensor `(len(answer), vocab_size)` for each answer.

    Raises:
        DiagnosticsError: if the decoder keeps more of a prompt than keys and values.
    """
    cache = copy.deepcopy(prompt.cache)
    try:
        cache.batch_repeat_interleave(len(answers))
    except AttributeError as error:  # A layer without attention has no keys and values to repeat.
        raise DiagnosticsError("Its decoder keeps more than keys and values, so answers can't be scored.") from error

    # The model reads all tokens of an answer except the last, because what follows the last token doesn't matter. It
    # has to read at least one token, so answers are padded to at least two tokens.
    longest = max(2, *map(len, answers))
    padded = torch.zeros(len(answers), longest, dtype=torch.long, device=model.device)
    for row, answer in zip(padded, answers, strict=True):
        row[: len(answer)] = torch.tensor(answer)

    # No attention mask is given. No answer token would need it, because the padding comes last, and decoders with
    # positions in three axes (Qwen2-VL) take no mask together with a cache.
    logits = model(input_ids=padded[:, :-1], past_key_values=cache).logits
    log_probabilities = logits.float().log_softmax(dim=-1)  # [num_answers, longest - 1, vocab_size]

    distributions_by_answer = []
    for answer, after_each_token in zip(answers, log_probabilities, strict=True):
        after_first = after_each_token[: len(answer) - 1]
        distributions_by_answer.append(torch.cat([prompt.first_log_probabilities[None], after_first]))
    return distributions_by_answer


def likeliest(model: PreTrainedModel, prompt: ReadPrompt, answers: Sequence[Sequence[int]]) -> int:
    """Index of the answer with the highest log-probability after a prompt.

    The result is exact, but not every answer has to be scored, because an answer can't be likelier than its first
    token. Answers are scored a few at a time, by falling probability of their first tokens. The search ends when the
    best answer so far is likelier than the first token of each remaining answer.

    Args:
        model: The model.
        prompt: The prompt that the answers follow.
        answers: Token ids of each answer, with its end token.
    """
    first_tokens = [tokens[0] for tokens in answers]
    first_scores = prompt.first_log_probabilities[first_tokens]  # [num_answers]
    by_first_score = first_scores.argsort(descending=True, stable=True)

    best = -1
    best_score = -torch.inf
    for chunk in by_first_score.split(CHUNK_SIZE):
        if first_scores[chunk[0]] < best_score:
            break

        indices = chunk.tolist()
        chunk_distributions = distributions(model, prompt, [answers[index] for index in indices])
        for index, log_probabilities in zip(indices, chunk_distributions, strict=True):
            tokens = answers[index]
            score = log_probabilities[range(len(tokens)), tokens].sum().item()
            if score > best_score:
                best = index
                best_score = score
    return best
