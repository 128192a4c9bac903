"""Rows in the one layout that the rest of the code uses, and the check that finds bad rows.

`normllava/conversations/layouts.py` converts rows of other layouts. A row in this layout has these fields:

- `images` or `image`: its pictures. Each is a path, or a dict as from `datasets.Image(decode=False)`, with `bytes` and
  `path`, one of which may be null.
- `image_folder`: the folder that paths are relative to, as an absolute path without `..`.
- `conversations`: LLaVA's turns with `from` and `value`.
- `source`: the file or dataset and the row's number, for messages.
- `problem`: why the row couldn't be read from its own layout; null or missing in all other rows.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from normllava.conversations.layouts import IMAGE_MARK, LLAVA_ROLES, LayoutError, Row, pictures_in_columns
from normllava.errors import UserError


# The roles' names in chat messages, by LLaVA's names.
CHAT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
# How other tools mark a picture's place in a text: Qwen-VL's `<img>a.png</img>`, Phi's `<|image_1|>`, MMMU's
# `<image 1>`, and the tokens of Gemma, DeepSeek-VL and InternLM. A text about HTML has no reason to contain them.
FOREIGN_MARKS = re.compile(
    r"<img>[^<>]+</img>|<\|image(_\d+|_pad)?\|>|<image[ _]?\d+>|<start_of_image>|<image_placeholder>|<ImageHere>"
)
# Markdown or HTML that embeds a picture. A text about Markdown or HTML may contain it too, so it counts as a picture
# only if the file exists, or if it is a data URL.
NAMED_PICTURES = re.compile(r"!\[[^\]]*\]\(([^()\s]+)\)|<img\b[^<>]*\bsrc=[\"']([^\"']+)[\"']")
# How many characters of a path an error message shows.
LONGEST_PATH = 200


class BadRowError(UserError):
    """A row that can't be trained on.

    Attributes:
        source: The file or dataset, and the row's number.
        problem: What is wrong, without a full stop. Empty if a data loader raises a worker's error again: the loader
            passes on only the whole message, as the `source`.
    """

    def __init__(self, source: str, problem: str = "") -> None:
        super().__init__(source, problem)
        self.source = source
        self.problem = problem

    def __str__(self) -> str:
        if not self.problem:
            return self.source
        return f"{self.source}: {self.problem}."


def shorten_path(path: str) -> str:
    """The beginning of a path, for a message. A bad row may have a picture's whole content in place of its path."""
    if len(path) <= LONGEST_PATH:
        return path
    return f"{path[:LONGEST_PATH]}... ({len(path)} characters)"


def row_images(row: Row) -> list[Any]:
    """The row's undecoded pictures.

    Raises:
        BadRowError: if both `image` and `images` hold pictures.
    """
    try:
        return pictures_in_columns(row)
    except LayoutError as error:
        raise BadRowError(row["source"], str(error)) from error


def picture_path(row: Row, image: Any) -> str | None:
    """The path of a row's picture; `None` if the picture's bytes are in the row.

    Raises:
        BadRowError: if the picture has neither bytes nor a path, or its path leaves the image folder. (Rows from the
            internet must not be able to name any file on the disk.)
    """
    if isinstance(image, dict) and image["bytes"] is not None:
        return None

    name = _picture_name(image)
    if name is None:
        raise BadRowError(row["source"], "an image has neither bytes nor a path")
    if "image_folder" not in row:  # the row isn't from `load_rows`, but was made in Python
        return name

    # Symbolic links are not resolved here, since the folder may hold links to other disks.
    folder = row["image_folder"]
    path = os.path.normpath(os.path.join(folder, name))
    if not Path(path).is_relative_to(folder):
        problem = (
            f"image {shorten_path(name)} is outside the image folder {folder}; "
            "set one that holds the pictures of all rows"
        )
        raise BadRowError(row["source"], problem)
    return path


def _picture_name(image: Any) -> str | None:
    """The path of an undecoded picture as the row gives it; `None` if the row gives no path."""
    return image["path"] if isinstance(image, dict) else image


def row_turns(row: Row) -> list[dict[str, str]]:
    """The row's turns, with LLaVA's names of the roles. Malformed turns are returned as they are."""
    turns = row["conversations"]
    if isinstance(turns, str):  # rows that were read from another layout store their turns as JSON text
        turns = json.loads(turns)
    if not isinstance(turns, list):
        return turns

    # A dataset in LLaVA's layout, whose turns are used as they are stored, may call the roles `user` and `assistant`.
    renamed = []
    for turn in turns:
        role = turn.get("from") if isinstance(turn, dict) else None
        if role in ("user", "assistant"):
            turn = turn | {"from": LLAVA_ROLES[role]}
        renamed.append(turn)
    return renamed


def to_messages(row: Row) -> list[dict[str, Any]]:
    """The row's turns as chat messages, in which each `<image>` mark is an image part.

    A question's text is stripped, as LLaVA strips it. The chat template puts each part on its own line, so the line
    breaks between a text and a mark are removed too, but spaces are kept. An answer stays as it is written.
    """
    messages: list[dict[str, Any]] = []
    for turn in row_turns(row):
        role = CHAT_ROLES[turn["from"]]
        text = turn["value"]
        answer_parts = [{"type": "text", "text": text}]
        content = answer_parts if role == "assistant" else _split_at_marks(text.strip())
        messages.append({"role": role, "content": content})
    return messages


def _split_at_marks(text: str) -> list[dict[str, str]]:
    """A text as the parts of a message: an image part for each `<image>` mark, and the texts between them."""
    parts = []
    for piece in re.split(f"({IMAGE_MARK})", text):  # the group makes `split` return the marks too
        piece = piece.strip("\n")
        if piece == IMAGE_MARK:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def control_token_pattern(tokenizer: PreTrainedTokenizerBase, image_token: str) -> re.Pattern[str]:
    """A pattern that finds what a tokenizer reads as a control token: its special tokens and the image token.

    The pattern doesn't find `<image>`, with which rows mark their pictures.
    """
    tokens = {*tokenizer.all_special_tokens, image_token}
    for added_token in tokenizer.added_tokens_decoder.values():
        if added_token.special:
            tokens.add(added_token.content)
    tokens -= {IMAGE_MARK, ""}

    if not tokens:
        return re.compile(r"(?!)")  # matches nothing, while an empty pattern would match everywhere

    # If one token begins with another, the pattern has to find the longer token, since an error message names it.
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first))


def check_row(row: Row, control_tokens: re.Pattern[str] | None = None, needs_answer: bool = True) -> None:
    """Check all of a row except the pixels of its pictures.

    Args:
        row: The row.
        control_tokens: A pattern of texts that the row must not contain, which [`control_token_pattern`] makes.
        needs_answer: Whether the row needs an answer, as it does in training.

    Raises:
        BadRowError: if there is a problem.
    """
    problem = row.get("problem") or _find_problem(row, control_tokens, needs_answer)
    if problem:
        raise BadRowError(row["source"], problem)


def _find_problem(row: Row, control_tokens: re.Pattern[str] | None, needs_answer: bool) -> str | None:
    """What is wrong with a row; `None` if it is good."""
    try:
        turns = row_turns(row)
    except ValueError:  # `row_turns` decodes JSON
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


def _find_turn_problem(turn: Any, control_tokens: re.Pattern[str] | None) -> str | None:
    """What is wrong with a turn, as the end of a sentence that begins "turn 0"; `None` if nothing is."""
    if not _is_well_formed(turn):
        roles = ", ".join(CHAT_ROLES)
        return f'is not {{"from": one of {roles}, "value": text}}: {str(turn)[:200]}'

    match = control_tokens.search(turn["value"]) if control_tokens else None
    if match:
        return (
            f"contains {match[0]}, which this model's tokenizer reads as a control token. Write it otherwise, "
            "or with a token of your own that isn't special: docs/rows.md says how"
        )
    return None


def _is_well_formed(turn: Any) -> bool:
    """Whether a turn is a mapping with a known role and a text."""
    if not isinstance(turn, dict):
        return False
    role = turn.get("from")
    has_role = isinstance(role, str) and role in CHAT_ROLES
    return has_role and isinstance(turn.get("value"), str)


def _find_image_problem(row: Row, turns: list[dict[str, str]]) -> str | None:
    """What is wrong with the number or the paths of a row's pictures; `None` if nothing is."""
    images = row_images(row)
    if not images:
        mark = _find_unread_mark(row, turns)
        if mark is not None:
            return (
                f"a question names a picture as {shorten_path(mark)}, and the row has no picture: give it in `image`, "
                f"and write {IMAGE_MARK} in its place"
            )
    num_marks = sum(turn["value"].count(IMAGE_MARK) for turn in turns)
    if num_marks != len(images):
        return f"{num_marks} {IMAGE_MARK} marks but {len(images)} images"
    for image in images:
        path = picture_path(row, image)
        if path is not None and not os.path.isfile(path):
            return _describe_missing(image, path)
    return None


def _find_unread_mark(row: Row, turns: list[dict[str, str]]) -> str | None:
    """What a question of a row without pictures says in place of a picture; `None` if it says no such thing."""
    for turn in turns:
        if turn["from"] != "human":
            continue
        mark = FOREIGN_MARKS.search(turn["value"])
        if mark:
            return mark[0]
        for match in NAMED_PICTURES.finditer(turn["value"]):
            path = match[1] or match[2]
            if path.startswith("data:image/") or os.path.isfile(os.path.join(row.get("image_folder", ""), path)):
                return match[0]
    return None


def _describe_missing(image: Any, path: str) -> str:
    """What is wrong with a picture whose path leads to no file."""
    name = str(_picture_name(image))  # a malformed row may have a number in place of the path
    if name.startswith("data:"):
        return f"an image is base64 text ({len(name)} characters): write it to a file, and give its path"
    return f"image file {shorten_path(path)} is missing, or not a regular file"
