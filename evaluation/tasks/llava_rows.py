"""What the harnesses call for a held-out row of the digits, in LLaVA's layout."""

from pathlib import Path
from typing import Any

from PIL import Image


FOLDER = Path("runs/digits/data")


def pictures(row: dict[str, Any]) -> list[Image.Image]:
    """The picture of a row."""
    return [Image.open(FOLDER / row["image"]).convert("RGB")]


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Exact match, as in the quickstart's report."""
    return {"exact_match": float(results[0].strip() == row["conversations"][1]["value"])}
