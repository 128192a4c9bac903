"""Records what a model's decoder does with each question, up to where the answer begins."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import BatchFeature, PreTrainedModel

from diagnostics.keys import MAX_TOKENS, draw_positions
from diagnostics.loading import Message, Question
from diagnostics.parts import DiagnosticsError
from diagnostics.probe import Probe, Record
from diagnostics.tokens import Inputs, TokenIds, classify_sample, token_ids


@torch.no_grad()
def record_questions(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], layers: Collection[int], title: str
) -> list[Record]:
    """The record of a forward pass over each question, up to where the answer begins.

    The model runs in eval mode, and afterwards each module is in the mode that it had before. The language model head,
    which computes the logits, is not run, because nothing after the decoder is measured.

    Args:
        model: The model.
        processor: The model's processor.
        questions: The questions that the model is asked.
        layers: Layers whose attention, keys and values are recorded.
        title: Text of the progress bar; if it is empty, there is no progress bar.

    Raises:
        DiagnosticsError: if a question can't be measured; the message names the question.
    """
    ids = token_ids(model, processor)
    # All records together keep the keys and values of about `MAX_TOKENS` tokens of each modality.
    num_kept = max(1, MAX_TOKENS // len(questions))

    records = []
    with eval_mode(model):
        for question in tqdm(questions, desc=title, unit="picture", disable=not title):
            try:
                records.append(record_question(model, processor, question, layers, ids, num_kept))
            except DiagnosticsError as error:
                raise DiagnosticsError(f"{question.source}: {error}") from error
    return records


def record_question(
    model: PreTrainedModel,
    processor: Any,
    question: Question,
    layers: Collection[int],
    ids: TokenIds,
    num_kept: int,
) -> Record:
    """The record of one question, with the keys and values of at most `num_kept` tokens of each modality."""
    inputs = prepare_inputs(model, processor, question.prompt)
    tokens = classify_sample(inputs, ids)
    key_positions = draw_positions(tokens, question.fingerprint, num_kept)  # random; the fingerprint is the seed
    with Probe(model, inputs, tokens, layers, key_positions) as probe:
        model.base_model(**inputs)
    return probe.record()


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model in eval mode inside the context. Afterwards each module is in the mode that it had before."""
    # `model.train()` at the end would also change modules that were in eval mode before.
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


def prepare_inputs(model: PreTrainedModel, processor: Any, messages: list[Message]) -> Inputs:
    """The model's inputs for chat messages, on the model's device.

    Raises:
        DiagnosticsError: if the processor refuses the messages, for example because its template does not know a
            role, or because a picture is too small.
    """
    try:
        prepared = _run_processor(processor, messages)
    except (TemplateError, ValueError) as error:
        raise DiagnosticsError(f"The processor can't prepare it: {error}") from error

    # PaliGemma's processor also returns labels, which are for training.
    inputs = {name: value for name, value in prepared.items() if name != "labels"}
    return dict(BatchFeature(inputs).to(model.device, dtype=model.dtype))  # only floats are cast to the dtype


def _run_processor(processor: Any, messages: list[Message]) -> Any:
    """What the processor returns for the messages.

    If the processor has no chat template, each text and each picture of the messages gets a line of its own.
    """
    if getattr(processor, "chat_template", None):
        return processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )

    image_mark = getattr(processor, "image_token", "<image>")  # the text that stands for a picture
    lines = []
    images = []
    for message in messages:
        for part in message["content"]:
            if part["type"] == "text":
                lines.append(part["text"])
            else:  # a picture
                lines.append(image_mark)
                images.append(part["image"])
    return processor(images=images or None, text="\n".join(lines), return_tensors="pt")
