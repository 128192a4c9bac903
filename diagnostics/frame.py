"""A report as a table with a row for each number."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pandas as pd

from diagnostics.results import ByLayer, Estimate, LargestGap, Report


COLUMNS = ["model", "measure", "modality", "layer", "mean", "low", "high", "n"]
MODALITIES = ("visual", "text")


def to_frame(report: Report) -> pd.DataFrame:
    """The measures of a report in columns `model`, `measure` (its path in `report.json`), `modality`, `layer`, `mean`,
    `low`, `high` (its 95% interval), and `n` (pictures).

    Measures that are not per layer have no layer, those of both modalities no modality, those without an interval no
    `n`. Token counts and numbers by head and by word are only in `report.json`.
    """
    models = [(model.name, _rows(model, (), range(model.num_layers + 1))) for model in report.models]
    rows = [{"model": name, **row} for name, of_model in models for row in of_model]
    return pd.DataFrame(rows, columns=COLUMNS).astype({"layer": "Int64", "n": "Int64"})


def _rows(value: Any, path: tuple[str, ...], layers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of the value at `path`; `layers` are the layer numbers of values by layer."""
    if isinstance(value, ByLayer):
        count = len(value.overall.by_picture)
        for layer, mean, interval in zip(layers, value.mean, value.interval, strict=False):
            yield _row(path, mean, interval, count, layer)
        yield from _rows(value.overall, (*path, "overall"), layers)
    elif isinstance(value, Estimate):
        yield _row(path, value.mean, value.interval, sum(number == number for number in value.by_picture))
    elif isinstance(value, LargestGap):
        yield from ({**row, "layer": value.layer} for row in _rows(value.gap, path, layers))
    elif is_dataclass(value):
        entries = {of.name: getattr(value, of.name) for of in fields(value)}
        looked_at = entries.pop("layers", layers)
        if is_dataclass(looked_at):  # the measure of that name
            entries, looked_at = entries | {"layers": looked_at}, layers
        for name, entry in entries.items():
            yield from _rows(entry, (*path, name), looked_at)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _rows(entry, (*path, name), layers)
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            if is_dataclass(entry):
                name = getattr(entry, "name", getattr(entry, "question", None)) or str(number)
                yield from _rows(entry, (*path, name), layers)
            elif isinstance(entry, float):
                yield _row(path, entry, layer=layers[number])
    elif isinstance(value, float):
        yield _row(path, value)


def _row(
    path: tuple[str, ...],
    mean: float,
    interval: tuple[float, float] | None = None,
    num_pictures: int | None = None,
    layer: int | None = None,
) -> dict[str, Any]:
    modality = next((name for name in MODALITIES for part in path if part.split("_")[0] == name), None)
    low, high = interval or (None, None)
    measure = ".".join(part for part in path if part not in MODALITIES)
    return {"measure": measure, "modality": modality, "layer": layer, "mean": mean, "low": low, "high": high,
            "n": None if interval is None else num_pictures}  # fmt: skip
