"""A question as model inputs: prepared once, and passed from measure to measure."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from PIL import Image
from transformers import BatchFeature, PreTrainedModel

from diagnostics.loading import Message, Question
from diagnostics.parts import DiagnosticsError
from diagnostics.tokens import (
    Inputs,
    TokenIds,
    Tokens,
    classify_sample,
    find_tokenizer,
    single_picture,
    token_ids,
)


# How a template marks what the assistant says; transformers looks for the same.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """A processor's output for chat messages.

    Attributes:
        inputs: The model's inputs of one sample, unpadded, as the processor returns them: `input_ids` of `(1, S)`.
        tokens: Type of each position, `(S,)`, as far as the inputs tell.
    """

    inputs: Inputs
    tokens: Tokens

    def for_model(self, model: PreTrainedModel) -> Inputs:
        """The inputs on the model's device and in its dtype."""
        return dict(BatchFeature(dict(self.inputs)).to(model.device, dtype=model.dtype))


@dataclass(frozen=True)
class Answered(Encoded):
    """A conversation with its answers; `targets` marks the tokens of the training loss, `(S,)`."""

    targets: torch.Tensor


@dataclass(frozen=True)
class Sample:
    """A question, prepared.

    Attributes:
        question: As it was read.
        prompt: Up to where the answer begins.
        answered: With the answers; `None` if there are none, or they were not requested.
    """

    question: Question
    prompt: Encoded
    answered: Answered | None

    @property
    def picture(self) -> Image.Image:
        """The first picture as the vision encoder gets it, cropped and scaled; colours stretched to the full range.

        If the processor cuts pictures into patches or tiles, the original picture.
        """
        pixels = single_picture(self.prompt.inputs)
        if pixels is None:
            return self.question.images[0]
        pixels = pixels.float()
        low, high = pixels.amin(), pixels.amax()
        levels = (255 * (pixels - low) / (high - low).clamp(min=1e-6)).to(torch.uint8)
        return Image.fromarray(levels.permute(1, 2, 0).numpy())


def prepare_samples(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], num_answered: int = 0
) -> list[Sample]:
    """Encode every question's prompt, and for the first ones the conversation with its answers too.

    Args:
        model, processor: As [`~diagnostics.loading.load_model`] returns them.
        questions: The questions.
        num_answered: How many are prepared with their answers.

    Raises:
        DiagnosticsError: if a question has no visual or no text tokens; the message names it.
    """
    ids = token_ids(model, processor)
    samples = []
    for number, question in enumerate(questions):
        with naming_source(question):
            prompt = _encode(processor, ids, question.prompt, add_generation_prompt=True)
            has_answer = len(question.conversation) > len(question.prompt)
            answered = _answer(processor, ids, question, prompt) if has_answer and number < num_answered else None
        samples.append(Sample(question, prompt, answered))
    return samples


@contextmanager
def naming_source(question: Question) -> Iterator[None]:
    """Prefix the message of a `DiagnosticsError` with the question's source."""
    try:
        yield
    except DiagnosticsError as error:
        raise type(error)(f"{question.source}: {error}") from error


def _process(processor: Any, messages: list[Message], **options: bool) -> Inputs:
    """The processor's output for chat messages; without a template, for their texts and pictures, one per line."""
    try:
        if getattr(processor, "chat_template", None):
            return processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt", **options
            )
        mark = getattr(processor, "image_token", "<image>")
        parts = [part for message in messages for part in message["content"]]
        text = "\n".join(part["text"] if part["type"] == "text" else mark for part in parts)
        images = [part["image"] for part in parts if part["type"] == "image"]
        return processor(images=images, text=text, return_tensors="pt")
    except (TemplateError, ValueError) as error:  # roles that a template does not know, a picture that is too small
        raise DiagnosticsError(f"The processor can't prepare it: {error}") from error


def _encode(processor: Any, ids: TokenIds, messages: list[Message], add_generation_prompt: bool) -> Encoded:
    inputs = _process(processor, messages, add_generation_prompt=add_generation_prompt)
    return Encoded(inputs, classify_sample(inputs, ids))


def _answer(processor: Any, ids: TokenIds, question: Question, prompt: Encoded) -> Answered:
    """The conversation, and the tokens of the training loss: those that the template marks as the assistant's. If the
    template marks none, the conversation up to its first answer, and that answer up to the end of its turn."""
    marked = GENERATION.search(str(getattr(processor, "chat_template", ""))) is not None
    if marked and getattr(find_tokenizer(processor), "is_fast", False):  # slow ones can't return the mask
        inputs = _process(processor, question.conversation, return_assistant_tokens_mask=True)
        targets = torch.as_tensor(inputs.pop("assistant_masks")).bool().reshape(-1)
    else:
        inputs = _process(processor, question.conversation[: len(question.prompt) + 1])
        targets = _find_answer(prompt.inputs["input_ids"][0], inputs["input_ids"][0], ids, processor)
    return Answered(inputs, classify_sample(inputs, ids), targets)


def _find_answer(prompt: torch.Tensor, whole: torch.Tensor, ids: TokenIds, processor: Any) -> torch.Tensor:
    """Mask of the positions after the prompt, `(S,)`, up to and including the first special token, which ends the
    turn; if there is none, up to the last token that is not blank."""
    length = min(len(prompt), len(whole))
    # The answer's first characters may merge with the prompt's last token.
    start = int((prompt[:length] == whole[:length]).cumprod(0).sum())
    while start < len(whole) and int(whole[start]) in ids.special:  # the turn's start, if the prompt lacks it
        start += 1
    special = [n for n in range(start, len(whole)) if int(whole[n]) in ids.special]
    stop = special[0] + 1 if special else len(whole)
    while not special and stop > start and not find_tokenizer(processor).decode(whole[stop - 1 : stop]).strip():
        stop -= 1
    positions = torch.arange(len(whole))
    return (positions >= start) & (positions < stop)
