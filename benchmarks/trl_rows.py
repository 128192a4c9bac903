"""Converts rows from LLaVA's layout into the layout that TRL's trainer takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List

from training.rows.batches import random_order


ROLES = {"human": "user", "gpt": "assistant"}


def trl_dataset(rows: Sequence[dict[str, Any]], image_folder: Path, seed: int) -> Dataset:
    """A data set of messages and pictures, in the order in which our command takes the rows.

    Args:
        rows: Rows in LLaVA's layout.
        image_folder: Folder of the pictures that the rows name.
        seed: The seed of the training, on which the order depends.
    """
    images = []
    messages = []
    for index in random_order(len(rows), seed):
        row = rows[index]
        row_images = []
        if row.get("image"):
            row_images.append(str(image_folder / row["image"]))
        images.append(row_images)
        messages.append([to_message(turn) for turn in row["conversations"]])
    dataset = Dataset.from_dict({"images": images, "messages": messages})
    return dataset.cast_column("images", List(Image()))  # pictures are read from their paths when a row is read


def to_message(turn: dict[str, str]) -> dict[str, str]:
    """Convert a turn into a chat message, without `<image>`: TRL itself puts the picture before the text."""
    text = turn["value"].replace("<image>\n", "")
    return {"role": ROLES[turn["from"]], "content": text}
