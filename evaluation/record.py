"""A benchmark result as stored in `evaluation.json`, which the model card reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.files import write_whole


EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A row of `evaluation.json`: a result, and if known a baseline without a model.

    Attributes:
        value: A fraction of 1, or what the harness gives.
        n: Number of rows, or questions.
        standard_error: Of the value; `None` if unknown.
        command: Command that produced it.
        weights: [`~common.files.fingerprint`] of the weights that it is of; the card takes no other's, and
            none without.
        harness: Its name and version; `None` for one's own script.
        choice: Number of shots, and what else was chosen.
        baseline: The value of `baseline_name`, guessing for example.
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
    """Write results into a model's `evaluation.json`.

    Earlier ones of the same metric on the same rows, and those of other weights, are removed.
    """
    path = folder / EVALUATION_FILE
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    new = [asdict(evaluation) for evaluation in evaluations]

    measured_again = [measured(row) for row in new]
    # A user's own rows may not say which weights they are of.
    weights = {None, *(evaluation.weights for evaluation in evaluations)}
    kept = [row for row in earlier if measured(row) not in measured_again and row.get("weights") in weights]
    write_whole(path, json.dumps([*kept, *new], indent=1) + "\n")


def measured(row: dict[str, Any]) -> list[Any]:
    """What a row is a measurement of: a metric on some rows."""
    return [row.get(field) for field in ("task", "dataset", "split", "metric")]
