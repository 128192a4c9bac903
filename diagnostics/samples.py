"""A question as model inputs."""

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
from diagnostics.tokens import Inputs, Tokens, classify_sample, single_picture, token_ids


@dataclass(frozen=True)
class Sample:
    """A question, prepared up to where the answer begins.

    Attributes:
        question: As it was read.
        inputs: The model's inputs of one sample, unpadded, as the processor returns them: `input_ids` of `(1, S)`.
        tokens: Type of each position, `(S,)`, as far as the inputs tell.
    """

    question: Question
    inputs: Inputs
    tokens: Tokens

    def for_model(self, model: PreTrainedModel) -> Inputs:
        """The inputs on the model's device and in its dtype."""
        return dict(BatchFeature(dict(self.inputs)).to(model.device, dtype=model.dtype))

    @property
    def picture(self) -> Image.Image:
        """The first picture as the vision encoder gets it, cropped and scaled; colours stretched to the full range.

        If the processor cuts pictures into patches or tiles, the original picture.
        """
        pixels = single_picture(self.inputs)
        if pixels is None:
            return self.question.images[0]
        pixels = pixels.float()
        low, high = pixels.amin(), pixels.amax()
        levels = (255 * (pixels - low) / (high - low).clamp(min=1e-6)).to(torch.uint8)
        return Image.fromarray(levels.permute(1, 2, 0).numpy())


def prepare_samples(model: PreTrainedModel, processor: Any, questions: Sequence[Question]) -> list[Sample]:
    """The questions as model inputs.

    Args:
        model, processor: As [`~diagnostics.loading.load_model`] returns them.
        questions: The questions.

    Raises:
        DiagnosticsError: if a question has no visual or no text tokens; the message names it.
    """
    ids = token_ids(model, processor)
    samples = []
    for question in questions:
        with naming_source(question):
            inputs = _process(processor, question.prompt)
            samples.append(Sample(question, inputs, classify_sample(inputs, ids)))
    return samples


@contextmanager
def naming_source(question: Question) -> Iterator[None]:
    """Prefix the message of a `DiagnosticsError` with the question's source."""
    try:
        yield
    except DiagnosticsError as error:
        raise type(error)(f"{question.source}: {error}") from error


def _process(processor: Any, messages: list[Message]) -> Inputs:
    """The processor's output for chat messages; without a template, for their texts and pictures, one per line."""
    try:
        if getattr(processor, "chat_template", None):
            return processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
            )
        mark = getattr(processor, "image_token", "<image>")
        parts = [part for message in messages for part in message["content"]]
        text = "\n".join(part["text"] if part["type"] == "text" else mark for part in parts)
        images = [part["image"] for part in parts if part["type"] == "image"]
        return processor(images=images, text=text, return_tensors="pt")
    except (TemplateError, ValueError) as error:  # roles that a template does not know, a picture that is too small
        raise DiagnosticsError(f"The processor can't prepare it: {error}") from error
