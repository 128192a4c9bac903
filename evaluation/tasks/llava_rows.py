"""What the harnesses call for a held-out row of the digits or the emoji, in LLaVA's layout."""

from pathlib import Path
from typing import Any

from PIL import Image


# Relative to the working directory, as the tasks' rows are.
FOLDERS = (Path("runs/digits/data"), Path("runs/emoji/pictures"))


def pictures(row: dict[str, Any]) -> list[Image.Image]:
    """The picture of a row.

    Raises:
        FileNotFoundError: if it is in none of the folders.
    """
    for folder in FOLDERS:
        if (folder / row["image"]).exists():
            return [Image.open(folder / row["image"]).convert("RGB")]

    searched = " or ".join(str(folder.absolute()) for folder in FOLDERS)
    raise FileNotFoundError(
        f"{row['image']} is not in {searched}: run the evaluation from the repository's root, after the example that "
        "writes the pictures."
    )


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Exact match, as in the examples' own reports."""
    return {"exact_match": float(results[0].strip() == row["conversations"][1]["value"])}
