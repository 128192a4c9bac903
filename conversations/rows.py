"""Rows of pictures and conversations, as LLaVA ships them, and what makes one a bad row.

A row has `images` or `image` (paths, or what `datasets.Image(decode=False)` gives), `image_folder` (the folder that
paths are relative to), `conversations` (LLaVA's turns with `from` and `value`) and `source` (file or dataset and row
number, for messages).
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase


IMAGE_MARK = "<image>"
# A row's columns by name; users' rows may be malformed, so the values have no fixed type.
Row = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


class BadRowError(ValueError):
    """A row that can't be trained on: its `source` (file or dataset, and number) and its `problem`, without a stop."""

    def __init__(self, source: str, problem: str = "") -> None:  # a data loader raises it anew with its message alone
        super().__init__(source, problem)
        self.source, self.problem = source, problem

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}." if self.problem else self.source


def row_images(row: Row) -> list[Any]:
    """The row's undecoded pictures: a column may hold one, a list, or nothing."""
    images = row.get("image") if row.get("images") is None else row["images"]
    return [image for image in (images if isinstance(images, list) else [images]) if image is not None]


def picture_path(row: Row, image: Any) -> str | None:
    """Path of a row's picture; `None` if it is embedded in the row. Links are followed.

    Raises `BadRowError` if it has no path, or one out of the row's folder: downloaded rows must not name any file.
    """
    if isinstance(image, dict) and image["bytes"] is not None:
        return None
    name = image["path"] if isinstance(image, dict) else image
    if name is None:
        raise BadRowError(row["source"], "an image has neither bytes nor a path")
    if "image_folder" not in row:
        return name
    path = os.path.normpath(os.path.join(row["image_folder"], name))
    if not path.startswith(os.path.join(row["image_folder"], "")):
        problem = f"image {name} is outside the image folder {row['image_folder']}; set one that holds all"
        raise BadRowError(row["source"], problem)
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
        pieces = filter(None, (piece.strip("\n") for piece in re.split(f"({IMAGE_MARK})", text)))
        parts = [{"type": "image"} if piece == IMAGE_MARK else {"type": "text", "text": piece} for piece in pieces]
        messages.append({"role": role, "content": parts})
    return messages


def control_tokens(tokenizer: PreTrainedTokenizerBase, image_token: str) -> re.Pattern[str]:
    """Texts that a tokenizer reads as control tokens: its special tokens and the image token."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = {*special, *tokenizer.all_special_tokens, image_token} - {IMAGE_MARK, ""}
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))


def check_row(row: Row, control_tokens: re.Pattern[str] | None = None, needs_answer: bool = True) -> None:
    """Look at everything but the pixels. Text must not contain `control_tokens`, the model's.

    Raises `BadRowError` if the row can't be trained on, or, where it needs no answer, not be asked about.
    """
    problem = next(_problems(row, control_tokens, needs_answer), None)
    if problem is not None:
        raise BadRowError(row["source"], problem)


def _problems(row: Row, control_tokens: re.Pattern[str] | None, needs_answer: bool) -> Iterator[str]:
    """What is wrong with a row. Ask for the first alone: each check relies on those before it."""
    try:
        turns, images = row_turns(row), row_images(row)
    except ValueError:
        yield "`conversations` is text that is not JSON"
    if not isinstance(turns, list) or not turns:
        yield "`conversations` is empty or not a list of turns"
    for number, turn in enumerate(turns):
        role, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or role not in ROLES or not isinstance(value, str):
            yield f'turn {number} is not {{"from": one of {", ".join(ROLES)}, "value": text}}: {str(turn)[:200]}'
        elif control_tokens and (found := control_tokens.search(value)):
            yield f"turn {number} contains {found[0]}, which this model's tokenizer reads as a control token"
    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    if needs_answer and not any(answer.strip() for answer in answers):
        yield "no assistant turn (`gpt`) with text, so there is nothing to learn"
    if any(IMAGE_MARK in answer for answer in answers):
        yield f"an assistant turn contains {IMAGE_MARK}"
    marks = sum(turn["value"].count(IMAGE_MARK) for turn in turns)
    if marks != len(images):
        yield f"{marks} {IMAGE_MARK} marks but {len(images)} images"
    for path in filter(None, (picture_path(row, image) for image in images)):
        if not os.path.isfile(path):
            yield f"image file {path} is missing, or not a regular file"
