"""A question as a model takes it: prepared once, and handed on from measure to measure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedModel

from diagnostics.loading import Message, Question
from diagnostics.parts import DiagnosticsError
from diagnostics.tokens import Inputs, TokenIds, Tokens, classify_sample, token_ids


@dataclass(frozen=True)
class Encoded:
    """What a processor makes of chat messages.

    Attributes:
        inputs: The model's inputs of one sample, unpadded, as the processor returns them: `input_ids` of `(1, S)`.
        tokens: Which position is what, `(S,)`, as far as the inputs tell.
    """

    inputs: Inputs
    tokens: Tokens

    def for_model(self, model: PreTrainedModel) -> Inputs:
        """The inputs on the model's device and in its dtype."""
        return dict(BatchFeature(dict(self.inputs)).to(model.device, dtype=model.dtype))


@dataclass(frozen=True)
class Answered(Encoded):
    """A whole conversation, whose first answer begins at the position `start`; where there is none, the position past
    its first visual token."""

    start: int


@dataclass(frozen=True)
class Sample:
    """A question, prepared.

    Attributes:
        question: As it was read.
        prompt: Up to where the answer begins.
        answered: With the answers; `None` where nobody asked for them.
    """

    question: Question
    prompt: Encoded
    answered: Answered | None

    @property
    def picture(self) -> Image.Image:
        """The first picture as the vision encoder gets it, cropped and scaled; colours stretched to their range.

        Where the processor cuts a picture into patches or tiles, the whole picture as it was given.
        """
        pixels = self.prompt.inputs.get("pixel_values")
        if pixels is None or pixels.ndim < 4 or pixels.shape[-3] != 3 or pixels[..., 0, 0, 0].numel() != 1:
            return self.question.images[0]
        pixels = pixels.reshape(pixels.shape[-3:]).float()
        low, high = pixels.amin(), pixels.amax()
        levels = (255 * (pixels - low) / (high - low).clamp(min=1e-6)).to(torch.uint8)
        return Image.fromarray(levels.permute(1, 2, 0).numpy())


def prepare_samples(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], num_answered: int = 0
) -> list[Sample]:
    """Every question with what the processor makes of its prompt, and of the first ones with their answers too.

    Args:
        model, processor: As [`~diagnostics.loading.load_model`] returns them.
        questions: The questions.
        num_answered: How many are prepared with their answers.

    Raises:
        DiagnosticsError: if one has nothing visual or no text; the message names it.
    """
    ids = token_ids(model, processor)
    samples = []
    for number, question in enumerate(questions):
        with naming_source(question):
            prompt = _encode(processor, ids, question.prompt, add_generation_prompt=True)
            answered = _answer(processor, ids, question, prompt) if number < num_answered else None
        samples.append(Sample(question, prompt, answered))
    return samples


@contextmanager
def naming_source(question: Question) -> Iterator[None]:
    """Put a question's source before the message of a `DiagnosticsError`."""
    try:
        yield
    except DiagnosticsError as error:
        raise type(error)(f"{question.source}: {error}") from error


def _encode(processor: Any, ids: TokenIds, messages: list[Message], add_generation_prompt: bool) -> Encoded:
    if getattr(processor, "chat_template", None):
        inputs = processor.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        mark = getattr(processor, "image_token", "<image>")
        parts = [part for message in messages for part in message["content"]]
        text = "\n".join(part["text"] if part["type"] == "text" else mark for part in parts)
        images = [part["image"] for part in parts if part["type"] == "image"]
        inputs = processor(images=images, text=text, return_tensors="pt")
    return Encoded(inputs, classify_sample(inputs, ids))


def _answer(processor: Any, ids: TokenIds, question: Question, prompt: Encoded) -> Answered:
    encoded = _encode(processor, ids, question.conversation, add_generation_prompt=False)
    if len(question.conversation) > len(question.prompt):
        start = len(prompt.tokens.text)
    else:
        start = int(encoded.tokens.visual.nonzero()[0, 0]) + 1
    return Answered(encoded.inputs, encoded.tokens, start)
