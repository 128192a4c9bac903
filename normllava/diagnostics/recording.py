"""Records what a model's decoder does with each question, up to where the answer begins."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from normllava.diagnostics.keys import MAX_TOKENS, draw_positions
from normllava.diagnostics.loading import Question
from normllava.diagnostics.probe import Probe, Record
from normllava.inputs import eval_mode, prepare_inputs
from normllava.parts import DiagnosticsError
from normllava.tokens import TokenIds, classify_sample, token_ids


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
