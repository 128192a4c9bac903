"""Reads what a model answered to held-out rows while it was trained, from the `answers.jsonl` of its run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normllava.errors import UserError


ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class TrainingAnswer:
    """A held-out row, and the model's answers to it at the first and at the last evaluation of the run."""

    question: str
    expected: str
    first_step: int
    first: str
    last_step: int
    last: str


def read_training_answers(folder: Path) -> list[TrainingAnswer]:
    """The first and the last answers in the folder of a run; empty if the folder has none.

    Raises:
        UserError: if a line of the file can't be read. A run that was killed may have written only a part of a line.
    """
    path = folder / ANSWERS_FILE
    if not path.exists():
        return []

    lines_by_row: dict[int, list[dict[str, Any]]] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            lines_by_row.setdefault(line["row"], []).append(line)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number}, can't be read ({error!r}). Delete the line.") from error

    answers = []
    for lines in lines_by_row.values():
        first, last = lines[0], lines[-1]
        answers.append(
            TrainingAnswer(
                question=last["question"],
                expected=last["expected"],
                first_step=first["step"],
                first=first["answer"],
                last_step=last["step"],
                last=last["answer"],
            )
        )
    return answers
