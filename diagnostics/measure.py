"""All measures of one model, from one forward pass for each sample and one backward pass over a few."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from diagnostics.attention import measure_attention
from diagnostics.attraction import measure_attractions
from diagnostics.embeddings import measure_embeddings, vocabulary_norms
from diagnostics.gradients import measure_gradients
from diagnostics.interface import measure_interface
from diagnostics.key_space import MAX_TOKENS, Bases, measure_key_space
from diagnostics.layers import measure_layers
from diagnostics.loading import Question
from diagnostics.parts import DiagnosticsError, decoder_layers
from diagnostics.pictures import NUM_MAPS, Pictures, take_pictures
from diagnostics.probe import Probe, Record, choose_queries
from diagnostics.projector_norm import measure_projector_norm
from diagnostics.results import GradientNorms, ModelReport
from diagnostics.samples import Sample, naming_source, prepare_samples
from diagnostics.tokens import Tokens, find_tokenizer


logger = logging.getLogger(__name__)

GRADIENT_SAMPLES = 4


@dataclass(frozen=True)
class Closeup:
    """What of a model is looked at closely.

    Attributes:
        layers: Layers whose attention is drawn and whose keys are compared; six evenly spread ones by default.
        heads: Heads whose mean attention is drawn; all by default.
        query: Query whose attention is drawn: -1 is where the answer begins, -2 the last word before, and so on.
    """

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    query: int = -1


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    bases: Bases,
    closeup: Closeup,
) -> tuple[ModelReport, Pictures]:
    """Every measure of one model.

    Args:
        model, processor: As [`~diagnostics.loading.load_model`] returns them.
        questions: The same for every model that is to be compared.
        name: What the report calls the model.
        bases: Principal components of the keys, shared by the models that are compared; the first fills them in.
        closeup: What is looked at closely.

    Raises:
        DiagnosticsError: if a layer, a head or a query is not there, or a question can't be measured.
    """
    layers = choose_layers(model, name, closeup)
    offloaded = any(parameter.device.type == "meta" for parameter in model.parameters())
    samples = prepare_samples(model, processor, questions, num_answered=0 if offloaded else GRADIENT_SAMPLES)
    check_query(samples[:NUM_MAPS], closeup.query)
    logger.info("%s: gradients", name)
    # First, since bitsandbytes packs 4-bit weights on CPU in the first pass without gradients, and can't go back.
    gradients = measure_gradients(model, [sample.answered for sample in samples if sample.answered is not None])
    records = record_samples(model, samples, layers, name)
    notes = {note for record in records for note in record.notes}
    if offloaded:
        notes.add("gradients: not recorded, a backward pass would hold all offloaded weights at once")
    elif gradients is None:
        notes.add("gradients: not recorded, no text follows a picture or answers a question")
    logger.info("%s: keys", name)
    report = summarize_records(model, processor, name, records, gradients, notes, bases)
    return report, take_pictures(samples, records, report.key_space, closeup.heads, closeup.query)


def choose_layers(model: PreTrainedModel, name: str, closeup: Closeup) -> list[int]:
    """The layers to look at. Raises `DiagnosticsError` if the model lacks a layer or a head that was asked for."""
    count, num_heads = len(decoder_layers(model)), model.config.get_text_config().num_attention_heads
    layers = spread_layers(count) if closeup.layers is None else sorted(set(closeup.layers))
    if layers[0] < 0 or layers[-1] >= count:
        raise DiagnosticsError(f"{name} has layers 0 to {count - 1}, got --layers {' '.join(map(str, layers))}.")
    heads = closeup.heads or ()
    if not all(0 <= head < num_heads for head in heads):
        raise DiagnosticsError(f"{name} has heads 0 to {num_heads - 1}, got --heads {' '.join(map(str, heads))}.")
    return layers


def spread_layers(count: int, chosen: int = 6) -> list[int]:
    """At most `chosen` layers of `count`, from the first to the last, evenly spread."""
    return sorted({round(number) for number in np.linspace(0, count - 1, min(chosen, count))})


def check_query(samples: Sequence[Sample], query: int) -> None:
    """Raises `DiagnosticsError` if one has no such query."""
    for sample in samples:
        count = len(choose_queries(sample.prompt.tokens))
        if not -count <= query < 0:
            raise DiagnosticsError(f"A sample has queries -1 to -{count}, got --query {query}.")


@torch.no_grad()
def record_samples(
    model: PreTrainedModel, samples: Sequence[Sample], layers: Sequence[int], title: str | None = None
) -> list[Record]:
    """A record for each sample, with attention and keys of `layers`.

    With a `title`, progress is shown. The head is not run: nothing is measured behind the decoder.

    Raises:
        DiagnosticsError: if a sample can't be measured; the message names its question.
    """
    per_sample = max(32, 2 * MAX_TOKENS // len(samples))
    records = []
    for sample in tqdm(samples, desc=title, unit="sample", disable=title is None):
        inputs, tokens = sample.prompt.for_model(model), sample.prompt.tokens
        positions = _key_positions(tokens, per_sample)
        with naming_source(sample.question):
            with Probe(model, inputs, tokens, layers, positions, len(sample.question.images)) as probe:
                model.base_model(**inputs)
            records.append(probe.record())
    return records


def _key_positions(tokens: Tokens, count: int) -> torch.Tensor:
    """Positions of at most `count` visual and `count` text tokens, drawn at random, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for mask in (tokens.visual, tokens.text):
        positions = mask.nonzero()[:, 0]
        chosen.append(positions[torch.randperm(len(positions), generator=generator)[:count]])
    return torch.cat(chosen).sort().values


def summarize_records(
    model: PreTrainedModel,
    processor: Any,
    name: str,
    records: Sequence[Record],
    gradients: dict[str, GradientNorms] | None,
    notes: set[str],
    bases: Bases,
) -> ModelReport:
    """What the records say of the model, beside its gradients and what could not be recorded."""
    vocabulary = vocabulary_norms(model)
    hidden_size = model.config.get_text_config().hidden_size
    return ModelReport(
        name=name,
        class_=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(decoder_layers(model)),
        hidden_size=hidden_size,
        num_samples=len(records),
        num_tokens={
            "visual": sum(int(record.tokens.visual.sum()) for record in records),
            "text": sum(int(record.tokens.text.sum()) for record in records),
        },
        excluded={
            reason: sum(int(record.tokens.excluded[reason].sum()) for record in records)
            for reason in records[0].tokens.excluded
        },
        notes=sorted(notes),
        interface=measure_interface(records, vocabulary, hidden_size),
        layers=measure_layers(records),
        projector_norm=measure_projector_norm(model),
        embeddings=measure_embeddings(vocabulary, find_tokenizer(processor)),
        attention=measure_attention(records),
        attraction=measure_attractions([record.attractions for record in records]),
        key_space=measure_key_space(records, bases),
        gradients=gradients,
    )
