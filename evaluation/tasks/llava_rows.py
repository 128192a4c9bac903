"""What the harnesses call for a held-out row of the digits or the emoji, in LLaVA's layout."""

from pathlib import Path
from typing import Any

from PIL import Image


FOLDERS = (Path("runs/digits/data"), Path("runs/emoji/pictures"))


def pictures(row: dict[str, Any]) -> list[Image.Image]:
    """The picture of a row."""
    path = next(folder / row["image"] for folder in FOLDERS if (folder / row["image"]).exists())
    return [Image.open(path).convert("RGB")]


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Exact match, as in the examples' own reports."""
    return {"exact_match": float(results[0].strip() == row["conversations"][1]["value"])}
