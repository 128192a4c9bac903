"""All measures of one model: a forward pass over each picture with its question."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from diagnostics.keys import MAX_TOKENS, draw_positions, measure_space, project
from diagnostics.loading import Question
from diagnostics.measures import attention_maps, measure_all
from diagnostics.parts import DiagnosticsError, decoder_layers
from diagnostics.probe import Probe, Record
from diagnostics.samples import Sample, naming_source, prepare_samples
from diagnostics.table import Summary


# Pictures over which attention is drawn.
NUM_MAPS = 3


@dataclass(frozen=True)
class ModelReport:
    """What was measured of one model.

    Attributes:
        name: Name in the report.
        model_class, dtype, num_layers, hidden_size: Of the model; a quantized one's dtype says so.
        num_pictures: How many, with a question each.
        num_tokens: By modality.
        excluded: Number of excluded tokens by reason.
        notes: What could not be recorded, and why.
        summary: The numbers.
        weights: [`~conversations.files.fingerprint`] of the weights; `None` if they are not in a local folder.
    """

    name: str
    model_class: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_pictures: int
    num_tokens: dict[str, int]
    excluded: dict[str, int]
    notes: list[str]
    summary: Summary
    weights: str | None = None


@dataclass(frozen=True)
class Pictures:
    """One model's data to draw.

    Attributes:
        seen: The first pictures, each as the vision encoder got it, with its question.
        maps: For each, attention over it by layer; empty where its layout is not known.
        keys: Number of a layer, and t-SNE of its visual and text keys; `None` if keys were not measured.
    """

    seen: list[tuple[Image.Image, str]]
    maps: list[dict[int, torch.Tensor]]
    keys: tuple[int, np.ndarray, np.ndarray] | None


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    layers: Sequence[int] | None = None,
) -> tuple[ModelReport, pd.DataFrame, Pictures]:
    """Every measure of one model: its report, its rows, and what to draw.

    Attention and keys are measured in `layers`, by default in six that are evenly spread. Raises `DiagnosticsError` if
    one does not exist, or a question can't be measured.
    """
    num_layers = len(decoder_layers(model))
    chosen = spread_layers(num_layers) if layers is None else sorted(set(layers))
    check_layers(chosen, num_layers)
    samples = prepare_samples(model, processor, questions)
    with evaluating(model):
        records = record_samples(model, samples, chosen, f"{name}: pictures")
    keys, values = (measure_space(name, records) for name in ("keys", "values"))
    measured = [measure_all(model, records), *(of for of in (keys, values) if of is not None)]
    rows = pd.concat(measured, ignore_index=True)
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    report = ModelReport(
        name=name,
        model_class=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch.") + (", quantized" if is_quantized else ""),
        num_layers=num_layers,
        hidden_size=model.config.get_text_config().hidden_size,
        num_pictures=len(records),
        num_tokens=count_tokens([{"visual": of.tokens.visual, "text": of.tokens.text} for of in records]),
        excluded=count_tokens([record.tokens.excluded for record in records]),
        notes=sorted({note for record in records for note in record.notes}),
        summary=Summary.of(rows),
    )
    placed = None
    if keys is not None:
        with_keys = sorted(set.intersection(*(set(record.keys) for record in records)))
        middle = with_keys[len(with_keys) // 2]
        placed = (middle, *project(records, middle))
    seen = [(sample.picture, sample.question.text) for sample in samples[:NUM_MAPS]]
    return report, rows, Pictures(seen, [attention_maps(record) for record in records[:NUM_MAPS]], placed)


def count_tokens(masks: Sequence[dict[str, torch.Tensor]]) -> dict[str, int]:
    """Number of tokens of all samples by the names of their masks."""
    return {name: sum(int(of[name].sum()) for of in masks) for name in masks[0]}


def spread_layers(count: int, chosen: int = 6) -> list[int]:
    """At most `chosen` layers of `count`, from the first to the last, evenly spread."""
    return sorted({round(number) for number in np.linspace(0, count - 1, min(chosen, count))})


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raises `DiagnosticsError` if a model with `count` layers lacks a chosen one."""
    if not all(0 <= number < count for number in layers):
        raise DiagnosticsError(f"It has layers 0 to {count - 1}, got --layers {' '.join(map(str, layers))}.")


@torch.no_grad()
def record_samples(
    model: PreTrainedModel, samples: Sequence[Sample], layers: Sequence[int], title: str | None = None
) -> list[Record]:
    """A record for each sample, with attention, keys and values of `layers`; with a `title`, progress is shown.

    The head is not run: nothing after the decoder is measured.
    """
    count = max(1, MAX_TOKENS // len(samples))
    records = []
    for sample in tqdm(samples, desc=title, unit="picture", disable=title is None):
        inputs, kept = sample.for_model(model), draw_positions(sample.tokens, sample.question.picture, count)
        with naming_source(sample.question):
            with Probe(model, inputs, sample.tokens, layers, kept, len(sample.question.images)) as probe:
                model.base_model(**inputs)
            records.append(probe.record())
    return records


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in eval mode; restore every module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
