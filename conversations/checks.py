"""Checks of a row, and of a stream's rows as they are read."""

import json
import logging
import os
import re
import reprlib
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from conversations.pictures import open_images
from conversations.rows import (
    IMAGE_MARK,
    ROLES,
    BadRowError,
    Picture,
    Row,
    is_embedded,
    picture_path,
    reason,
    row_images,
    row_turns,
)


logger = logging.getLogger(__name__)

# Turns a row into token ids and labels.
Tokenize = Callable[[Row], tuple[list[int], list[int]]]

# Shortens what messages quote, in the middle.
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 200


def control_tokens(tokenizer: PreTrainedTokenizerBase, image_token: str) -> frozenset[str]:
    """Texts that a tokenizer reads as control tokens: its special tokens and the image token."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset({*special, *tokenizer.all_special_tokens, image_token} - {IMAGE_MARK, ""})


def row_problem(row: Row, control_tokens: frozenset[str] = frozenset(), needs_answer: bool = True) -> str | None:
    """Why a row can't be trained on, or `None`. Looks at everything but the pixels.

    Args:
        row: A row of `conversations.rows`.
        control_tokens: Control tokens of the model's tokenizer; text must not contain them.
        needs_answer: Whether a row without an answer is a problem, as it is for training.

    Raises:
        BadRowError: if a picture is outside the row's folder.
    """
    return text_problem(row, control_tokens, needs_answer) or pictures_problem(row, count_marks(row))


def check_question(row: Row) -> None:
    """Check a row that is only asked about: raises `BadRowError` for what `row_problem` finds; no answer is needed."""
    problem = row_problem(row, needs_answer=False)
    if problem is not None:
        raise BadRowError(f"{row['source']}: {problem}.")


def text_problem(row: Row, control_tokens: frozenset[str], needs_answer: bool = True) -> str | None:
    """Why a row's text can't be trained on, or `None`. Arguments are those of `row_problem`."""
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
        problem = _value_problem(value, control_tokens)
        if problem is not None:
            return f"turn {number} contains {problem}"
    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    if needs_answer and not any(answer.strip() for answer in answers):
        return "no assistant turn (`gpt`) with text, so there is nothing to learn"
    if any(IMAGE_MARK in answer for answer in answers):
        return f"an assistant turn contains {IMAGE_MARK}"
    return None


def count_marks(row: Row) -> int:
    """Number of `<image>` marks in a row whose text has no problem."""
    return sum(turn["value"].count(IMAGE_MARK) for turn in row_turns(row))


def pictures_problem(row: Row, marks: int) -> str | None:
    """Why the pictures of a row with this many `<image>` marks can't be trained on, or `None`; doesn't open them.

    Raises:
        BadRowError: if a picture is outside the row's folder.
    """
    images = row_images(row)
    if marks != len(images):
        return f"{marks} {IMAGE_MARK} marks but {len(images)} images"
    for image in images:
        problem = None if is_embedded(image) else _picture_problem(row, image)
        if problem is not None:
            return problem
    return None


def _value_problem(text: str, control_tokens: frozenset[str]) -> str | None:
    found = _find_token(text, control_tokens) if control_tokens else None
    if found is not None:
        return f"{found}, which this model's tokenizer reads as a control token"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!a}, which is an unpaired surrogate; save the text as UTF-8 again"
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


def _picture_problem(row: Row, image: Picture) -> str | None:
    """What is wrong with the file of a picture that is given by its path."""
    name = image["path"] if isinstance(image, dict) else image
    if name is None:
        return "an image has neither bytes nor a path"
    if "://" in name:
        return f"image {_cut(name)} is a web address; download it, and give the path of its file"
    if "\0" in name:
        return f"image file {_cut(name)} can't be read (null byte in its name)"
    path = picture_path(row, image)
    assert path is not None  # as it is not embedded
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return f"image file {_cut(path)} is missing"
    except OSError as error:
        return f"image file {_cut(path)} can't be read ({error.strerror})"
    return None if is_file else f"image file {_cut(path)} is not a regular file"


@dataclass
class BadRowList:
    """A file that lists each bad row once, although several processes may find it, in every epoch."""

    path: Path
    _listed: set[str] = field(default_factory=set)
    _size: int = 0

    def add(self, source: str, problem: str) -> None:
        """Add a row, unless it is listed already."""
        if source in self._listed:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")), self.path.open("a+b") as file:
            file.seek(self._size)  # skip what was read before
            lines = file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):  # incomplete: the run was killed here and resumed
                file.truncate(file.tell() - len(lines.pop()))
            self._listed |= {json.loads(line)["source"] for line in lines}
            if source not in self._listed:
                file.write(json.dumps({"source": source, "problem": problem}).encode() + b"\n")
                self._listed.add(source)
            self._size = file.seek(0, os.SEEK_END)


@dataclass
class StreamCheck:
    """Checks a stream's rows, each when it is read.

    Args:
        control_tokens, tokenize: As for `measure_rows`.
        bad_rows: `"error"` raises `BadRowError` at a bad row. `"skip"` raises only if all rows are bad, that is, if a
            bad row comes again without a good one in between.
        report: Where bad rows are listed as they are found.
    """

    control_tokens: frozenset[str]
    tokenize: Tokenize
    bad_rows: Literal["error", "skip"]
    report: BadRowList
    _num_good: int = 0
    _met: dict[str, int] = field(default_factory=dict)  # source of a bad row: number of good rows before it

    def __call__(self, row: Row) -> Row | None:
        """The row with its `length`, in tokens; `None` for a bad row, which is listed."""
        problem, length = _measure_row(row, self.control_tokens, self.tokenize, open_pictures=self.bad_rows == "skip")
        if not problem:
            self._num_good += 1
            return {**row, "length": length}
        source = row["source"]
        if self.bad_rows == "error":
            raise BadRowError(f"{source}: {problem}.")
        if self._met.get(source) == self._num_good:
            num_bad = sum(number == self._num_good for number in self._met.values())
            raise BadRowError(
                f"{source}: {problem}. All {num_bad} rows are bad that one process or worker reads of the stream; fix "
                "them, or use fewer processes and dataloader workers."
            )
        self._met[source] = self._num_good
        self.report.add(source, problem)
        return None


def _measure_row(
    row: Row,
    control_tokens: frozenset[str],
    tokenize: Tokenize,
    open_pictures: bool,
) -> tuple[str, int]:
    """Why a row can't be trained on, or an empty string; and its length in tokens."""
    problem = row_problem(row, control_tokens)
    if problem is not None:
        return problem, 0
    try:
        if open_pictures:
            open_images(row)
        return "", len(tokenize(row)[0])
    except BadRowError as error:
        return reason(error, row), 0
