"""A result of a benchmark as `evaluation.json` holds it, which the model card reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conversations.files import write_whole
from diagnostics.results import from_json, to_json


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
    baseline: float | None = None
    baseline_name: str | None = None


def write_evaluations(folder: Path, rows: Sequence[Evaluation]) -> None:
    """Write results into a model's `evaluation.json`. Those of harnesses and of scripts leave each other alone.

    Raises:
        ValueError: if the file that is there can't be read.
    """
    path = folder / EVALUATION_FILE
    before: list[Evaluation] = []
    if path.exists():
        try:
            before = from_json(list[Evaluation], json.loads(path.read_text(encoding="utf-8")), path)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON ({error}); mend it or take it away.") from error
    replaced = {row.harness is None for row in rows}
    others = [row for row in before if (row.harness is None) not in replaced]
    write_whole(path, json.dumps(to_json([*others, *rows]), indent=1) + "\n")
