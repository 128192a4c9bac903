"""How the harnesses read a held-out row in LLaVA's layout, of the digits or the emoji."""

from pathlib import Path
from typing import Any

from PIL import Image


DIGITS, EMOJI = Path("runs/digits/data"), Path("runs/emoji/pictures")
MARK = "<image>"
Row = dict[str, Any]


def digits_pictures(row: Row) -> list[Image.Image]:
    """The picture of a row of the digits."""
    return [Image.open(DIGITS / row["image"]).convert("RGB")]


def emoji_pictures(row: Row) -> list[Image.Image]:
    """The picture of a row of the emoji."""
    return [Image.open(EMOJI / row["image"]).convert("RGB")]


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
    """Exact match, as in both examples' reports."""
    return {"exact_match": float(results[0].strip() == answer(row))}
