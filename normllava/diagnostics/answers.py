"""Asks a model for greedy answers to many questions, or for the likeliest of a list of answers.

To find the likeliest answer, the model reads a question once, and then scores answers by their log-probability.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from PIL import Image
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, ProcessorMixin

from normllava.parts import DiagnosticsError


# A question as chat messages.
Prompt = list[dict[str, Any]]

# Number of prompts that `answer_prompts` gives the model in one batch.
BATCH_SIZE = 50
# Options of `generate` for plain greedy decoding. They are needed because a checkpoint's own generation config may ask
# for sampling or set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# Number of answers that `likeliest` scores in one batch for each prompt. After each batch the search may end early.
CHUNK_SIZE = 8


def make_prompt(question: str, image: Image.Image | None = None) -> Prompt:
    """A question as chat messages, with a picture if one is given."""
    if image is None:
        return [{"role": "user", "content": question}]
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def encode_prompts(processor: Any, prompts: list[Prompt]) -> Any:
    """The model's inputs for a batch of prompts, padded to the same length. Each prompt ends where the answer begins.

    Args:
        processor: The model's processor, or a tokenizer if no prompt has a picture.
        prompts: The questions.
    """
    # A tokenizer's `apply_chat_template` takes `padding` directly. A processor's takes it inside `processor_kwargs`.
    options: dict[str, Any] = {"padding": True}
    if isinstance(processor, ProcessorMixin):
        options = {"processor_kwargs": {"padding": True}}

    return processor.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **options,
    )


@torch.no_grad()
def answer_prompts(
    model: PreTrainedModel, processor: Any, prompts: list[Prompt], title: str, max_new_tokens: int = 6
) -> list[str]:
    """The model's greedy answer to each prompt.

    Args:
        model: The model.
        processor: The model's processor, or a tokenizer if no prompt has a picture. It has to pad on the left.
        prompts: The questions.
        title: Text of the progress bar.
        max_new_tokens: Number of tokens at which an answer is cut off. The default leaves room for a few words.
    """
    answers: list[str] = []
    for start in tqdm(range(0, len(prompts), BATCH_SIZE), desc=title):
        batch = prompts[start : start + BATCH_SIZE]
        inputs = encode_prompts(processor, batch).to(model.device)
        prompts_and_answers = model.generate(**inputs, **GREEDY, max_new_tokens=max_new_tokens)

        padded_length = inputs["input_ids"].shape[1]
        answer_tokens = prompts_and_answers[:, padded_length:]
        answers += processor.batch_decode(answer_tokens, skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def answer_ids(processor: Any, prompt: Prompt, answer: str) -> list[int]:
    """Token ids of an answer as the chat template writes it after the prompt, with the token that ends the turn.

    Some templates change the answer's text, or end a turn without a special token. For these templates, the ids are
    those of the answer itself and of the tokenizer's end token.
    """
    tokenizer = getattr(processor, "tokenizer", processor)  # `processor` may itself be a tokenizer
    ids = _ids_after_prompt(processor, prompt, answer)
    end_index = _find_special_token(tokenizer, ids)
    if end_index is not None:
        written_answer = tokenizer.decode(ids[:end_index]).strip()
        if written_answer == answer:
            return ids[: end_index + 1]
    return tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids


def _ids_after_prompt(processor: Any, prompt: Prompt, answer: str) -> list[int]:
    """Token ids that the chat template writes after the prompt if the assistant gives this answer.

    The list is empty if the template can't write the conversation, or if it writes the prompt differently when an
    answer follows.
    """
    answer_message = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    try:
        prompt_text = processor.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        conversation_text = processor.apply_chat_template([*prompt, answer_message], tokenize=False)
    except (TypeError, ValueError, TemplateError):  # no template, or a template that can't write content in a list
        return []

    tokenizer = getattr(processor, "tokenizer", processor)
    prompt_ids = tokenizer(prompt_text, add_special_tokens=False).input_ids
    conversation_ids = tokenizer(conversation_text, add_special_tokens=False).input_ids

    ids_at_beginning = conversation_ids[: len(prompt_ids)]
    if ids_at_beginning != prompt_ids:
        return []
    return conversation_ids[len(prompt_ids) :]


def _find_special_token(tokenizer: Any, ids: Sequence[int]) -> int | None:
    """Index of the first id that is a special token's; `None` if there is none."""
    added_tokens = tokenizer.added_tokens_decoder  # special tokens are among these
    for index, token_id in enumerate(ids):
        added_token = added_tokens.get(token_id)
        if added_token is not None and added_token.special:
            return index
    return None


class PromptState(NamedTuple):
    """What a model computed from prompts, so that answers can be scored without reading the prompts again.

    Attributes:
        cache: Keys and values of the prompts' tokens.
        first_log_probabilities: For each prompt, the log-probability of each token of the vocabulary to be the first
            of the answer, `(num_prompts, vocab_size)`.
    """

    cache: DynamicCache
    first_log_probabilities: torch.Tensor


@torch.no_grad()
def read_prompt(model: PreTrainedModel, inputs: Any) -> PromptState:
    """What a model computes from a prompt, or from several prompts of the same length.

    Args:
        model: The model.
        inputs: The prompts as [`encode_prompts`] returns them.

    Raises:
        DiagnosticsError: if there are several prompts, and they have different lengths or the decoder's positions have
            three axes; or if the model overflows.
    """
    if len(inputs["input_ids"]) > 1:
        _require_readable_together(model, inputs)
    cache = DynamicCache(config=model.config.get_text_config())  # the model fills it
    logits = model(**inputs, **{cache_argument(model): cache}, logits_to_keep=1).logits
    first_log_probabilities = logits[:, -1].float().log_softmax(dim=-1)
    if first_log_probabilities.isnan().any():  # no answer would be likelier than the first of the list
        raise DiagnosticsError(
            f"The model overflows in {model.dtype}, so answers can't be scored: load it with --dtype bfloat16 or "
            "float32."
        )
    return PromptState(cache, first_log_probabilities)


def _require_readable_together(model: PreTrainedModel, inputs: Any) -> None:
    """Refuse several prompts that can't be read together.

    No attention mask is given when answers are scored, so prompts may not be padded. A decoder whose positions have
    three axes (Qwen2-VL) keeps an offset for each prompt, and would take it for another's when prompts are left out.
    """
    if not inputs["attention_mask"].all():
        raise DiagnosticsError("Prompts of different lengths can't be read together: give them one by one.")
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        raise DiagnosticsError("The decoder's positions have three axes, so give prompts one by one.")


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the argument by which a model takes a cache.

    Older versions of transformers call the argument `past_key_values`, and newer versions `cache`. From 5.40 on,
    transformers no longer accepts the old name.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@torch.no_grad()
def distributions(model: PreTrainedModel, state: PromptState, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """For each answer, the log-probabilities of the whole vocabulary at the position of each of the answer's tokens.

    Args:
        model: The model.
        state: What [`read_prompt`] returns for the one prompt that the answers follow.
        answers: Token ids of each answer.

    Returns:
        A tensor `(len(answer), vocab_size)` for each answer. Row i holds the model's log-probabilities for token i of
        the answer, given the prompt and the tokens before i.

    Raises:
        DiagnosticsError: if the decoder keeps more of a prompt than keys and values.
    """
    same_prompt = [0] * len(answers)
    log_probabilities = _read_answers(model, state, same_prompt, _pad(answers))

    distributions_by_answer = []
    for answer, log_probabilities_of_answer in zip(answers, log_probabilities, strict=True):
        # After reading token i, the model predicts token i + 1. What it predicts from the last token on is left out.
        later_rows = log_probabilities_of_answer[: len(answer) - 1]
        distributions_by_answer.append(torch.cat([state.first_log_probabilities, later_rows]))
    return distributions_by_answer


def _pad(answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Token ids of answers, padded at the end to the same length, `(num_answers, padded_length)` on the CPU.

    The model reads all tokens of an answer except the last, because what follows the last token doesn't matter. It has
    to read at least one token, so answers are padded to at least two tokens.
    """
    longest = max(len(answer) for answer in answers)
    padded_answers = torch.zeros(len(answers), max(2, longest), dtype=torch.long)
    for index, answer in enumerate(answers):
        padded_answers[index, : len(answer)] = torch.tensor(answer)
    return padded_answers


def _read_answers(
    model: PreTrainedModel, state: PromptState, prompt_indices: Sequence[int], padded_answers: torch.Tensor
) -> torch.Tensor:
    """The vocabulary's log-probabilities after each token of the answers but the last.

    Args:
        model: The model.
        state: What [`read_prompt`] returns for the prompts.
        prompt_indices: For each answer, the index of the prompt that it follows.
        padded_answers: The answers as `_pad` returns them.

    Returns:
        A tensor `(num_answers, padded_length - 1, vocab_size)`.
    """
    cache = copy.deepcopy(state.cache)  # the model adds to it
    try:
        if len(state.first_log_probabilities) == 1:
            cache.batch_repeat_interleave(len(prompt_indices))
        else:
            # The indices stay on the CPU, because layers may be on several devices.
            cache.batch_select_indices(torch.tensor(prompt_indices))
    except AttributeError as error:  # the cache of a layer without attention can't be repeated
        raise DiagnosticsError(
            "Its decoder keeps more than keys and values, so answers can't be scored: leave --sweep out."
        ) from error

    # No attention mask is given, because decoders with positions in three axes (Qwen2-VL) take no mask together with a
    # cache. A mask isn't needed: padding comes after the answer, and tokens attend only to earlier tokens.
    input_ids = padded_answers[:, :-1].to(model.device)
    logits = model(input_ids=input_ids, **{cache_argument(model): cache}).logits
    return logits.float().log_softmax(dim=-1)


@torch.no_grad()
def likeliest(model: PreTrainedModel, state: PromptState, answers: Sequence[Sequence[int]]) -> list[int]:
    """For each prompt, the index of the answer with the highest log-probability, the sum over its tokens.

    An answer can't be likelier than its first token, whose log-probability is known from the prompt. So answers are
    scored in the order of their first tokens' log-probabilities, the highest first. The search ends for a prompt when
    its best answer so far is likelier than the first token of every answer that is left.

    Args:
        model: The model.
        state: What [`read_prompt`] returns for the prompts.
        answers: Token ids of each answer, with its end token. Every prompt has the same answers.
    """
    first_tokens = [answer[0] for answer in answers]
    first_scores = state.first_log_probabilities[:, first_tokens].cpu()  # [num_prompts, num_answers]
    order = first_scores.argsort(dim=-1, descending=True, stable=True)  # indices of answers

    num_prompts = len(first_scores)
    best_indices = [0] * num_prompts
    best_scores = [-math.inf] * num_prompts
    for start in range(0, len(answers), CHUNK_SIZE):
        pairs = []  # of a prompt and an answer to score
        for prompt in range(num_prompts):
            chunk = order[prompt, start : start + CHUNK_SIZE].tolist()
            # `order` descends, so no answer from here on can score more than the first of the chunk.
            if first_scores[prompt, chunk[0]] >= best_scores[prompt]:
                pairs += [(prompt, index) for index in chunk]
        if not pairs:
            break

        scores = _score_answers(model, state, [prompt for prompt, _ in pairs], [answers[index] for _, index in pairs])
        for (prompt, index), score in zip(pairs, scores, strict=True):
            if score > best_scores[prompt]:
                best_indices[prompt] = index
                best_scores[prompt] = score
    return best_indices


def _score_answers(
    model: PreTrainedModel, state: PromptState, prompt_indices: Sequence[int], answers: Sequence[Sequence[int]]
) -> list[float]:
    """Log-probabilities of answers, each of which follows the prompt with its index in `prompt_indices`."""
    padded_answers = _pad(answers)
    lengths = torch.tensor([len(answer) for answer in answers])
    is_padding = torch.arange(padded_answers.shape[1]) >= lengths[:, None]

    log_probabilities = _read_answers(model, state, prompt_indices, padded_answers)
    device = log_probabilities.device
    tokens = padded_answers.to(device)
    first_scores = state.first_log_probabilities[torch.tensor(prompt_indices, device=device), tokens[:, 0]]
    later_scores = log_probabilities.gather(2, tokens[:, 1:, None]).squeeze(2)  # [num_answers, padded_length - 1]
    later_scores = later_scores.masked_fill(is_padding[:, 1:].to(device), 0)

    # All scores come from the device in one copy, which waits for the passes before it.
    return (first_scores + later_scores.sum(dim=1)).tolist()
