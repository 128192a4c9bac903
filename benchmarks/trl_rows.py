"""Converts our rows into the layout that TRL's trainer takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List

from training.batches import random_order


ROLES = {"human": "user", "gpt": "assistant"}


def trl_dataset(rows: Sequence[dict[str, Any]], image_folder: Path, seed: int) -> Dataset:
    """Convert rows from LLaVA's layout into messages and pictures, in the order in which our command takes them.

    Marks of pictures are left out of the text, because TRL puts the pictures before it.
    """
    images = []
    messages = []
    for number in random_order(len(rows), seed):
        row = rows[number]
        images.append([str(image_folder / row["image"])] if row.get("image") else [])
        messages.append([to_message(turn) for turn in row["conversations"]])
    return Dataset.from_dict({"images": images, "messages": messages}).cast_column("images", List(Image()))


def to_message(turn: dict[str, str]) -> dict[str, str]:
    """Convert a turn into a chat message without the mark of a picture."""
    return {"role": ROLES[turn["from"]], "content": turn["value"].replace("<image>\n", "")}
