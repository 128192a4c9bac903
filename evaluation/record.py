"""A result of a benchmark as `evaluation.json` holds it, which the model card reads."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversations.files import write_whole
from diagnostics.results import to_json


EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A row of `evaluation.json`: a result, and what it would be without a model where that is known.

    Attributes:
        value: A share of 1, or what the harness gives.
        n: Rows, or questions, that it is of.
        standard_error: Of the value; `None` where it is not known.
        command: What gave it.
        harness: Who scored it, with its version; `None` for a script of one's own.
        choice: Examples before each question, and what else was chosen.
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
    harness: str | None = None
    choice: str | None = None
    baseline: float | None = None
    baseline_name: str | None = None


def write_evaluations(folder: Path, rows: Sequence[Evaluation], is_replaced: Callable[[dict[str, Any]], bool]) -> None:
    """Write results into a model's `evaluation.json`. Rows that are there and not replaced stay as they are.

    Raises:
        ValueError: if the file that is there can't be read.
    """
    path = folder / EVALUATION_FILE
    before: Any = []
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}); mend it or take it away.") from error
        if not isinstance(before, list) or not all(isinstance(row, dict) for row in before):
            raise ValueError(f"{path} is no list of results; mend it or take it away.")
    kept = [row for row in before if not is_replaced(row)]
    if rows or len(kept) < len(before):
        write_whole(path, json.dumps([*kept, *to_json(list(rows))], indent=1) + "\n")
