"""Our rows as TRL's trainer takes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List

from training.batches import shuffled


ROLES = {"human": "user", "gpt": "assistant"}


def trl_dataset(rows: Sequence[dict[str, Any]], image_folder: Path, seed: int) -> Dataset:
    """Rows in LLaVA's layout as messages and pictures, in the order in which our command takes them with this seed.

    TRL puts the pictures before the text by itself.
    """
    images = []
    messages = []
    for number in shuffled(len(rows), seed):
        row = rows[number]
        images.append([str(image_folder / row["image"])] if row.get("image") else [])
        messages.append([to_message(turn) for turn in row["conversations"]])
    return Dataset.from_dict({"images": images, "messages": messages}).cast_column("images", List(Image()))


def to_message(turn: dict[str, str]) -> dict[str, str]:
    """A turn as a chat message."""
    return {"role": ROLES[turn["from"]], "content": turn["value"].replace("<image>\n", "")}
