"""The functions that the task files in this folder name. Each is given a row of the digits or the emoji.

The rows are in LLaVA's layout.
"""

from pathlib import Path
from typing import Any

from PIL import Image


# The folders that hold the pictures. Like the task files' paths they are relative to the repository's root.
FOLDERS = (Path("runs/digits/data"), Path("runs/emoji/pictures"))


def pictures(row: dict[str, Any]) -> list[Image.Image]:
    """The picture of a row, in a list, as harnesses expect it.

    Raises:
        FileNotFoundError: if the picture is in none of the folders.
    """
    for folder in FOLDERS:
        path = folder / row["image"]
        if path.exists():
            return [Image.open(path).convert("RGB")]

    searched = " or ".join(str(folder.absolute()) for folder in FOLDERS)
    raise FileNotFoundError(
        f"{row['image']} is not in {searched}: run the evaluation from the repository's root, after the example that "
        "writes the pictures."
    )


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 for the right answer and 0 for any other, as in the examples' own reports."""
    answer = results[0].strip()
    right_answer = row["conversations"][1]["value"]
    return {"exact_match": float(answer == right_answer)}
