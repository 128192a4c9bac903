"""How the harnesses read a row of the quickstart's held-out questions, in LLaVA's layout."""

from pathlib import Path
from typing import Any

from PIL import Image


DATA = Path("runs/digits/data")
MARK = "<image>"
Row = dict[str, Any]


def pictures(row: Row) -> list[Image.Image]:
    """The row's picture."""
    return [Image.open(DATA / row["image"]).convert("RGB")]


def marked_question(row: Row) -> str:
    """The question after lm-eval's image mark."""
    return MARK + question(row)


def question(row: Row, lmms_eval_specific_kwargs: object = None) -> str:
    """The question alone."""
    return row["conversations"][0]["value"].removeprefix(f"{MARK}\n")


def answer(row: Row) -> str:
    """The right answer."""
    return row["conversations"][1]["value"]


def score(row: Row, results: list[str]) -> dict[str, float]:
    """Exact match, as in the quickstart's report."""
    return {"exact_match": float(results[0].strip() == answer(row))}
