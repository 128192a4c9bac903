"""A benchmark result as stored in `evaluation.json`, which the model card reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normllava.files import write_whole


EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A result, which is one row of `evaluation.json`.

    Attributes:
        task: Name of the task.
        dataset: Hub id of the dataset, or a title.
        split: Split of the data.
        metric: Name of the metric.
        value: The score. A harness's score is stored as a fraction of 1.
        n: Number of rows or questions that were scored.
        standard_error: Standard error of the value; `None` if it is unknown.
        command: The command that measured the value.
        weights: [`~normllava.files.fingerprint`] of the weights that were measured. The model card refuses results
            without a fingerprint, and results of other weights.
        harness: Name and version of the harness; `None` if a script measured the value.
        choice: Number of shots, and other choices of method.
        baseline: The score of something simpler than a model, such as guessing; `None` if it is unknown.
        baseline_name: What the baseline is, such as "guessing".
    """

    task: str
    dataset: str
    split: str
    metric: str
    value: float
    n: int
    standard_error: float | None
    command: str
    weights: str | None = None
    harness: str | None = None
    choice: str | None = None
    baseline: float | None = None
    baseline_name: str | None = None


def write_evaluations(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Add results to a model's `evaluation.json`.

    An earlier row is replaced if a new row measures the same, and removed if it names other weights. Rows of the same
    weights are kept. So are rows that name no weights, because users may have added them by hand.
    """
    path = folder / EVALUATION_FILE
    earlier_rows = []
    if path.exists():
        earlier_rows = json.loads(path.read_text(encoding="utf-8"))

    new_rows = [asdict(evaluation) for evaluation in evaluations]
    new_measurements = [name_measurement(row) for row in new_rows]
    new_weights = [row["weights"] for row in new_rows]

    kept_rows = []
    for row in earlier_rows:
        is_replaced = name_measurement(row) in new_measurements
        names_weights = row.get("weights") is not None
        has_other_weights = names_weights and row["weights"] not in new_weights
        if not is_replaced and not has_other_weights:
            kept_rows.append(row)
    write_whole(path, json.dumps([*kept_rows, *new_rows], indent=1) + "\n")


def name_measurement(row: dict[str, Any]) -> list[Any]:
    """What a row measures: its task, dataset, split and metric."""
    return [row.get(field) for field in ("task", "dataset", "split", "metric")]
