"""The one row that all else uses, and what makes it a bad row.

A row has `images` or `image` (paths, or what `datasets.Image(decode=False)` gives), `image_folder` (the folder that
paths are relative to), `conversations` (LLaVA's turns with `from` and `value`) and `source` (file or dataset and row
number, for messages). Where its layout was another, `problem` says why it couldn't be read, if it couldn't.
conversations/layouts.py reads the layouts.
"""

import json
import os
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from conversations.layouts import IMAGE_MARK, ROLE_NAMES, LayoutError, Row, beside_pictures


# Roles of chat messages by LLaVA's names of them.
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
# Characters of a path that messages show.
LONGEST_PATH = 200


class BadRowError(UserError):
    """A row that can't be trained on.

    Attributes:
        source: File or dataset, and number of the row.
        problem: What is wrong, without a full stop. A data loader raises a worker's error anew with its message as
            the only argument; then it is empty.
    """

    def __init__(self, source: str, problem: str = "") -> None:
        super().__init__(source, problem)
        self.source = source
        self.problem = problem

    def __str__(self) -> str:
        if not self.problem:
            return self.source
        return f"{self.source}: {self.problem}."


def shortened(path: str) -> str:
    """A path for a message: one of a megabyte is no path."""
    if len(path) <= LONGEST_PATH:
        return path
    return f"{path[:LONGEST_PATH]}... ({len(path)} characters)"


def row_images(row: Row) -> list[Any]:
    """The row's undecoded pictures: a column may hold one, a list, or nothing.

    Raises:
        BadRowError: if two columns hold some.
    """
    try:
        return beside_pictures(row)
    except LayoutError as error:
        raise BadRowError(row["source"], str(error)) from error


def picture_path(row: Row, image: Any) -> str | None:
    """Path of a row's picture; `None` if it is embedded in the row.

    Raises:
        BadRowError: if it has no path, or one out of the row's folder: downloaded rows must not name any file.
    """
    if isinstance(image, dict) and image["bytes"] is not None:
        return None

    name = _picture_name(image)
    if name is None:
        raise BadRowError(row["source"], "an image has neither bytes nor a path")
    if "image_folder" not in row:
        return name

    # Compared as text, without resolving links: a link to another disk may lie in the folder.
    folder = row["image_folder"]
    path = os.path.normpath(os.path.join(folder, name))
    if not path.startswith(os.path.join(folder, "")):
        problem = f"image {shortened(name)} is outside the image folder {folder}; set one that holds all"
        raise BadRowError(row["source"], problem)
    return path


def _picture_name(image: Any) -> str | None:
    """The path of an undecoded picture, as the row gives it."""
    return image["path"] if isinstance(image, dict) else image


def row_turns(row: Row) -> list[dict[str, str]]:
    """The row's turns, with LLaVA's names of the roles; malformed ones as they are.

    Rows of JSON files store them as text. A dataset's turns may say `user` and `assistant`.
    """
    stored = row["conversations"]
    turns = json.loads(stored) if isinstance(stored, str) else stored
    if not isinstance(turns, list):
        return turns

    renamed = []
    for turn in turns:
        role = turn.get("from") if isinstance(turn, dict) else None
        if role in ("user", "assistant"):
            turn = turn | {"from": ROLE_NAMES[role]}
        renamed.append(turn)
    return renamed


def to_messages(row: Row) -> list[dict[str, Any]]:
    """The row's turns as chat messages: each `<image>` mark becomes an image part.

    The template puts each part on its own line, so the line break that LLaVA writes next to a mark is removed here.
    What the assistant says stays a string, stripped as LLaVA does.
    """
    messages: list[dict[str, Any]] = []
    for turn in row_turns(row):
        role = ROLES[turn["from"]]
        text = turn["value"].strip()
        content = text if role == "assistant" else _split_at_marks(text)
        messages.append({"role": role, "content": content})
    return messages


def _split_at_marks(text: str) -> list[dict[str, str]]:
    """A text as the parts of a message: an image part for each `<image>` mark, and the texts between them."""
    parts = []
    for piece in re.split(f"({IMAGE_MARK})", text):
        piece = piece.strip("\n")
        if piece == IMAGE_MARK:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def control_tokens(tokenizer: PreTrainedTokenizerBase, image_token: str) -> re.Pattern[str]:
    """Texts that a tokenizer reads as control tokens: its special tokens and the image token."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = {*special, *tokenizer.all_special_tokens, image_token} - {IMAGE_MARK, ""}

    # A message names the first that matches: the whole token, where one begins with another.
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first))


def check_row(row: Row, control_tokens: re.Pattern[str] | None = None, needs_answer: bool = True) -> None:
    """Look at everything but the pixels. Text must not contain `control_tokens`, the model's.

    Raises:
        BadRowError: if the row can't be trained on, or, where it needs no answer, not be asked about.
    """
    problem = row.get("problem") or _find_problem(row, control_tokens, needs_answer)
    if problem:
        raise BadRowError(row["source"], problem)


def _find_problem(row: Row, control_tokens: re.Pattern[str] | None, needs_answer: bool) -> str | None:
    """What is wrong with a row, if anything is."""
    try:
        turns = row_turns(row)
    except ValueError:  # of `json.loads`
        return "`conversations` is text that is not JSON"
    if not isinstance(turns, list) or not turns:
        return "`conversations` is empty or not a list of turns"
    for number, turn in enumerate(turns):
        problem = _find_turn_problem(turn, control_tokens)
        if problem:
            return f"turn {number} {problem}"

    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    if needs_answer and not any(answer.strip() for answer in answers):
        return "no assistant turn (`gpt`) with text, so there is nothing to learn"
    if any(IMAGE_MARK in answer for answer in answers):
        return f"an assistant turn contains {IMAGE_MARK}"
    return _find_image_problem(row, turns)


def _find_image_problem(row: Row, turns: list[dict[str, str]]) -> str | None:
    """What is wrong with the pictures of a row, their pixels aside."""
    images = row_images(row)
    marks = sum(turn["value"].count(IMAGE_MARK) for turn in turns)
    if marks != len(images):
        return f"{marks} {IMAGE_MARK} marks but {len(images)} images"
    for image in images:
        path = picture_path(row, image)
        if path is not None and not os.path.isfile(path):
            return _describe_missing(image, path)
    return None


def _find_turn_problem(turn: Any, control_tokens: re.Pattern[str] | None) -> str | None:
    """What is wrong with a turn, as a sentence without its subject."""
    role = turn.get("from") if isinstance(turn, dict) else None
    value = turn.get("value") if isinstance(turn, dict) else None
    if not isinstance(role, str) or role not in ROLES or not isinstance(value, str):
        return f'is not {{"from": one of {", ".join(ROLES)}, "value": text}}: {str(turn)[:200]}'

    control_token = control_tokens.search(value) if control_tokens else None
    if control_token:
        return (
            f"contains {control_token[0]}, which this model's tokenizer reads as a control token. Write it otherwise, "
            "or with a token of your own that isn't special: docs/data.md says how"
        )
    return None


def _describe_missing(image: Any, path: str) -> str:
    """What is wrong with a picture that has a path but no file."""
    name = str(_picture_name(image))
    if name.startswith("data:"):
        return f"an image is base64 text ({len(name)} characters): write it to a file, and give its path"
    return f"image file {shortened(path)} is missing, or not a regular file"
