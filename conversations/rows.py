"""Rows of pictures and conversations, as LLaVA ships them.

A row has `images` (paths, or what `datasets.Image(decode=False)` gives), `image_folder` (the folder that paths are
relative to and may not leave), `conversations` (LLaVA's turns with `from` and `value`) and `source` (file or dataset
and row number, for messages).
"""

import json
import os
from typing import Any

from conversations.files import lies_in, real_file, real_folder


IMAGE_MARK = "<image>"
# A row's columns by name; users' rows may be malformed, so the values have no fixed type.
Row = dict[str, Any]
# A path, or what `datasets.Image(decode=False)` gives: `bytes` and `path`.
Picture = str | dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


class BadRowError(ValueError):
    """A row that can't be trained on; the message names its source and the reason."""


def reason(error: BadRowError, row: Row) -> str:
    """What is wrong with a row, without its source and the full stop."""
    return str(error).removeprefix(f"{row['source']}: ").removesuffix(".")


def row_images(row: Row) -> list[Picture]:
    """The row's undecoded pictures: a column may hold one, a list, or nothing."""
    images = row["images"]
    return [image for image in (images if isinstance(images, list) else [images]) if image is not None]


def is_embedded(image: Picture) -> bool:
    """Whether a picture's bytes are in its row, or were before only their number was kept, as `size`."""
    return isinstance(image, dict) and (image["bytes"] is not None or image.get("size") is not None)


def picture_path(row: Row, image: Picture) -> str | None:
    """Path of a row's picture, links resolved; `None` if it is embedded in the row.

    Raises:
        BadRowError: if it is outside the row's folder: downloaded data must not read arbitrary files.
    """
    if is_embedded(image):
        return None
    name = image["path"] if isinstance(image, dict) else image
    if "image_folder" not in row:
        return name
    path = real_file(os.path.normpath(os.path.join(row["image_folder"], name)))
    if not lies_in(path, real_folder(row["image_folder"])):
        raise BadRowError(
            f"{row['source']}: image {name} is outside the image folder {row['image_folder']}, directly or by a link; "
            "set --image_folder."
        )
    return path


def row_turns(row: Row) -> list[dict[str, str]]:
    """The row's turns in LLaVA's layout; rows of JSON files store them as text, since they may be malformed."""
    turns = row["conversations"]
    return json.loads(turns) if isinstance(turns, str) else turns


def to_messages(row: Row) -> list[dict[str, Any]]:
    """The row's turns as chat messages: each `<image>` mark becomes an image part.

    The template puts each part on its own line, so the line break that LLaVA writes next to a mark is removed here.
    What the assistant says stays a string, stripped as LLaVA does.
    """
    messages: list[dict[str, Any]] = []
    for turn in row_turns(row):
        role, text = ROLES[turn["from"]], turn["value"].strip()
        if role == "assistant":
            messages.append({"role": role, "content": text})
            continue
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(IMAGE_MARK)):
            if number > 0:
                parts.append({"type": "image"})
            piece = piece.strip("\n")
            if piece:
                parts.append({"type": "text", "text": piece})
        messages.append({"role": role, "content": parts})
    return messages
