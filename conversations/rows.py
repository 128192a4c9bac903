"""Rows of pictures and conversations, as LLaVA ships them, and what makes one a bad row.

A row has `images` or `image` (paths, or what `datasets.Image(decode=False)` gives), `image_folder` (the folder that
paths are relative to), `conversations` (LLaVA's turns with `from` and `value`) and `source` (file or dataset and row
number, for messages).
"""

import json
import os
import re
import reprlib
import stat
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase


IMAGE_MARK = "<image>"
# A row's columns by name; users' rows may be malformed, so the values have no fixed type.
Row = dict[str, Any]
# A path, or what `datasets.Image(decode=False)` gives: `bytes` and `path`.
Picture = str | dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}

# Shortens what messages quote, in the middle.
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 200


class BadRowError(ValueError):
    """A row that can't be trained on.

    Attributes:
        source: File or dataset, and number of the row.
        problem: Why, without a full stop.
    """

    def __init__(self, source: str, problem: str = "") -> None:  # a data loader raises it anew with its message alone
        super().__init__(source, problem)
        self.source, self.problem = source, problem

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}." if self.problem else self.source


def row_images(row: Row) -> list[Picture]:
    """The row's undecoded pictures: a column may hold one, a list, or nothing."""
    images = row["image"] if row.get("images") is None and "image" in row else row["images"]
    return [image for image in (images if isinstance(images, list) else [images]) if image is not None]


def picture_path(row: Row, image: Picture) -> str | None:
    """Path of a row's picture; `None` if it is embedded in the row. Links are followed.

    Raises:
        BadRowError: if it has no path, or one that leaves the row's folder: downloaded rows must not name any file.
    """
    if isinstance(image, dict) and image["bytes"] is not None:
        return None
    name = image["path"] if isinstance(image, dict) else image
    if name is None:
        raise BadRowError(row["source"], "an image has neither bytes nor a path")
    if "image_folder" not in row:
        return name
    if "://" in name:
        raise BadRowError(row["source"], f"image {_cut(name)} is a web address; download it, and give its file")
    path = os.path.normpath(os.path.join(row["image_folder"], name))
    if not path.startswith(os.path.join(row["image_folder"], "")):
        raise BadRowError(
            row["source"],
            f"image {_cut(name)} is outside the image folder {row['image_folder']}; set one that holds all",
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


def control_tokens(tokenizer: PreTrainedTokenizerBase, image_token: str) -> frozenset[str]:
    """Texts that a tokenizer reads as control tokens: its special tokens and the image token."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset({*special, *tokenizer.all_special_tokens, image_token} - {IMAGE_MARK, ""})


def check_row(row: Row, control_tokens: frozenset[str] = frozenset(), needs_answer: bool = True) -> None:
    """Look at everything but the pixels.

    Args:
        row: The row.
        control_tokens: Control tokens of the model's tokenizer; text must not contain them.
        needs_answer: Whether the row must have an answer, as it must for training.

    Raises:
        BadRowError: if it can't be trained on, or, without an answer, not be asked about.
    """
    problem = _text_problem(row, control_tokens, needs_answer) or _pictures_problem(row)
    if problem is not None:
        raise BadRowError(row["source"], problem)


def _text_problem(row: Row, control_tokens: frozenset[str], needs_answer: bool) -> str | None:
    try:
        turns = row_turns(row)
    except (ValueError, RecursionError):
        return "`conversations` is text that is not JSON"
    if not isinstance(turns, list) or not turns:
        return "`conversations` is empty or not a list of turns"
    for number, turn in enumerate(turns):
        role, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or role not in ROLES or not isinstance(value, str):
            return f'turn {number} is not {{"from": one of {", ".join(ROLES)}, "value": text}}: {_brief.repr(turn)}'
        found = _find_token(value, control_tokens) if control_tokens else None
        if found is not None:
            return f"turn {number} contains {found}, which this model's tokenizer reads as a control token"
    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    if needs_answer and not any(answer.strip() for answer in answers):
        return "no assistant turn (`gpt`) with text, so there is nothing to learn"
    if any(IMAGE_MARK in answer for answer in answers):
        return f"an assistant turn contains {IMAGE_MARK}"
    return None


def _pictures_problem(row: Row) -> str | None:
    marks, images = sum(turn["value"].count(IMAGE_MARK) for turn in row_turns(row)), row_images(row)
    if marks != len(images):
        return f"{marks} {IMAGE_MARK} marks but {len(images)} images"
    for path in filter(None, (picture_path(row, image) for image in images)):
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return f"image file {_cut(path)} is not a regular file"
        except (FileNotFoundError, NotADirectoryError):
            return f"image file {_cut(path)} is missing"
        except (OSError, ValueError) as error:  # such as a null byte in the name
            return f"image file {_cut(path)} can't be read ({getattr(error, 'strerror', None) or error})"
    return None


def _cut(name: str) -> str:
    return _brief.repr(name)[1:-1]  # without the quotes


@lru_cache
def _first_characters_and_lengths(tokens: frozenset[str]) -> tuple[re.Pattern[str], list[int]]:
    first = "".join(re.escape(token[0]) for token in tokens)
    return re.compile(f"[{first}]"), sorted({len(token) for token in tokens}, reverse=True)


def _find_token(text: str, tokens: frozenset[str]) -> str | None:
    # Not one regex of all tokens: some tokenizers have thousands, and each would be tried at every `<`.
    first, lengths = _first_characters_and_lengths(tokens)
    for start in (match.start() for match in first.finditer(text)):
        for length in lengths:
            if text[start : start + length] in tokens:
                return text[start : start + length]
    return None
