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
    """The first and the last answers in the folder of a run, of the rows that have both; empty if there are none.

    Raises:
        UserError: if a line of the file isn't valid JSON.
    """
    path = folder / ANSWERS_FILE
    if not path.exists():
        return []

    lines: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:  # `splitlines` would split inside of answers, too, at U+2028
        for number, text in enumerate(file, start=1):
            try:
                lines.append(json.loads(text))
            except ValueError as error:
                raise UserError(f"{path}, line {number}, is not valid JSON ({error}). Delete the line.") from error
    if not lines:
        return []

    first_step = min(line["step"] for line in lines)
    last_step = max(line["step"] for line in lines)
    first_by_row = {line["row"]: line for line in lines if line["step"] == first_step}
    answers = []
    for line in lines:
        if line["step"] != last_step or line["row"] not in first_by_row:
            continue
        answer = TrainingAnswer(
            question=line["question"],
            expected=line["expected"],
            first_step=first_step,
            first=first_by_row[line["row"]]["answer"],
            last_step=last_step,
            last=line["answer"],
        )
        answers.append(answer)
    return answers
