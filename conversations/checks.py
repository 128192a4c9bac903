"""Every row is checked before training: what is wrong with it, how many tokens it has, and what all of them hold."""

import hashlib
import json
import logging
import os
import re
import reprlib
import stat
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
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
    row_images,
    row_turns,
)


logger = logging.getLogger(__name__)

# What makes token ids and labels of a row.
Tokenize = Callable[[Row], tuple[list[int], list[int]]]

# What messages quote, cut in the middle.
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 200


def control_tokens(tokenizer: PreTrainedTokenizerBase, image_token: str) -> frozenset[str]:
    """Text that a tokenizer reads as a token of its own meaning: the special ones, and what stands for a picture."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset({*special, *tokenizer.all_special_tokens, image_token} - {IMAGE_MARK, ""})


def row_problem(row: Row, control_tokens: frozenset[str] = frozenset(), needs_answer: bool = True) -> str | None:
    """Why a row can't be trained on, or `None`. Looks at everything but the pixels.

    Args:
        row: A row of `conversations.rows`.
        control_tokens: What the model's tokenizer gives a meaning of its own; text must not hold it.
        needs_answer: Whether a row without an answer is a problem; it is where the row is to be trained on.

    Raises:
        BadRowError: if a picture lies outside the row's folder.
    """
    try:
        turns, images = row_turns(row), row_images(row)
    except (ValueError, RecursionError):
        return "`conversations` is text that is not JSON"
    if not isinstance(turns, list) or not turns:
        return "`conversations` is empty or not a list of turns"
    for number, turn in enumerate(turns):
        role, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or role not in ROLES or not isinstance(value, str):
            return f'turn {number} is not {{"from": one of {", ".join(ROLES)}, "value": text}}: {_brief.repr(turn)}'
        problem = _text_problem(value, control_tokens)
        if problem is not None:
            return f"turn {number} holds {problem}"
    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    if needs_answer and not any(answer.strip() for answer in answers):
        return "no assistant turn (`gpt`) with text, so there is nothing to learn"
    if any(IMAGE_MARK in answer for answer in answers):
        return f"an assistant turn holds {IMAGE_MARK}"
    marks = sum(turn["value"].count(IMAGE_MARK) for turn in turns)
    if marks != len(images):
        return f"{marks} {IMAGE_MARK} marks but {len(images)} images"
    for image in images:
        problem = None if is_embedded(image) else _picture_problem(row, image)
        if problem is not None:
            return problem
    return None


def _text_problem(text: str, control_tokens: frozenset[str]) -> str | None:
    found = _find_token(text, control_tokens) if control_tokens else None
    if found is not None:
        return f"{found}, which this model's tokenizer reads as a control token"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!a}, which is half a character; write its text as UTF-8 again"
    return None


def _cut(name: str) -> str:
    return _brief.repr(name)[1:-1]  # without the quotes


@lru_cache
def _first_characters_and_lengths(tokens: frozenset[str]) -> tuple[re.Pattern[str], list[int]]:
    first = "".join(re.escape(token[0]) for token in tokens)
    return re.compile(f"[{first}]"), sorted({len(token) for token in tokens}, reverse=True)


def _find_token(text: str, tokens: frozenset[str]) -> str | None:
    # Not one pattern of all tokens: some tokenizers have thousands, and each would be tried wherever a `<` stands.
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
    return None if is_file else f"image file {_cut(path)} is missing: what has its name is no file"


@dataclass(frozen=True)
class MeasuredRows:
    """What a look at every row found."""

    problems: list[str]
    """Why a row can't be trained on; empty for a good one."""
    lengths: list[int]
    """Tokens of each row."""
    checksums: list[int]
    """Of each row's conversation, and of the names and sizes of its pictures; 0 for a bad one."""


def measure_rows(
    dataset: Dataset,
    control_tokens: frozenset[str],
    tokenize: Tokenize,
    open_pictures: bool,
    num_proc: int | None = None,
) -> MeasuredRows:
    """Look at every row: at its text, at its pictures' files, and inside these only with `open_pictures`.

    Raises:
        BadRowError: if a picture lies outside its row's folder.
    """

    def measure(table: pa.Table) -> dict[str, list[Any]]:
        columns = {name: table[name].to_pylist() for name in ("image_folder", "conversations", "source")}
        columns["images"] = _picture_references(table["images"], with_bytes=open_pictures)
        measured: dict[str, list[Any]] = {"problem": [], "length": [], "checksum": []}
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            problem, length = _measure_row(row, control_tokens, tokenize, open_pictures)
            measured["problem"].append(problem)
            measured["length"].append(length)
            measured["checksum"].append(0 if problem else _checksum(row))
        return measured

    # Not from the cache: files may have come or gone since. As Arrow, since pictures of hundreds of gigabytes would be
    # read otherwise.
    measured = dataset.with_format("arrow").map(
        measure,
        batched=True,
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        load_from_cache_file=False,
        new_fingerprint=uuid.uuid4().hex,
        desc="Checking rows",
    )
    return MeasuredRows(
        *(measured.with_format("arrow")[name].to_pylist() for name in ("problem", "length", "checksum"))
    )


def keep_good_rows(
    dataset: Dataset, measured: MeasuredRows, bad_rows: Literal["error", "skip"], report_file: Path | None
) -> tuple[Dataset, str]:
    """The dataset without its bad rows and with a column `length`, in tokens; and a fingerprint of what it says.

    Bad rows go to `report_file`, a line of JSON each; `None` for a process that should not write it.

    Raises:
        BadRowError: with `"error"`, if there is a bad row; with `"skip"`, if there is no other.
    """
    bad = [number for number, problem in enumerate(measured.problems) if problem]
    good = [number for number, problem in enumerate(measured.problems) if not problem]
    if bad:
        sources = dataset.select_columns("source")
        examples = [{"source": sources[number]["source"], "problem": measured.problems[number]} for number in bad]
        if bad_rows == "skip" and report_file is not None:
            report_file.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(example) + "\n" for example in examples]
            report_file.write_text("".join(lines), encoding="utf-8")
            logger.warning("Left out %d of %d rows; listed with reasons in %s", len(bad), len(dataset), report_file)
        if bad_rows == "error" or not good:
            first = examples[0]
            advice = "leave them out with --bad_rows skip" if good else "no row is left to train on"
            raise BadRowError(
                f"{first['source']}: {first['problem']}. {len(bad)} of {len(dataset)} rows are bad; mend the data, "
                f"{'or ' if good else ''}{advice}."
            )
    dataset = dataset.add_column("length", measured.lengths)
    content = [(measured.lengths[number], measured.checksums[number]) for number in good]
    fingerprint = hashlib.sha256(np.array(content, dtype=np.int64).tobytes()).hexdigest()
    return (dataset.select(good) if bad else dataset), fingerprint


@dataclass
class BadRowList:
    """A file that lists bad rows, each once: several processes may meet a row, and each does in every epoch."""

    path: Path
    _listed: set[str] = field(default_factory=set)
    _size: int = 0

    def add(self, source: str, problem: str) -> None:
        """List a row, unless it is there."""
        if source in self._listed:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")), self.path.open("a+b") as file:
            file.seek(self._size)  # past what is known
            lines = file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith(b"\n"):  # torn, where a run that goes on was killed
                file.truncate(file.tell() - len(lines.pop()))
            self._listed |= {json.loads(line)["source"] for line in lines}
            if source not in self._listed:
                file.write(json.dumps({"source": source, "problem": problem}).encode() + b"\n")
                self._listed.add(source)
            self._size = file.seek(0, os.SEEK_END)


@dataclass
class StreamCheck:
    """The same for data that is read as it comes: a row is looked at when it is reached.

    Args:
        control_tokens, tokenize: As for `measure_rows`.
        bad_rows: `"error"` raises `BadRowError` at a bad row. `"skip"` does only where all are bad, which shows where
            one is met again and no good one was met in between.
        report: Where bad rows are listed as they are met.
    """

    control_tokens: frozenset[str]
    tokenize: Tokenize
    bad_rows: Literal["error", "skip"]
    report: BadRowList
    _num_good: int = 0
    _met: dict[str, int] = field(default_factory=dict)  # by source of a bad row the number of good rows before it

    def __call__(self, row: Row) -> Row | None:
        """The row with its `length`, in tokens; `None` if it is a bad one, which is listed."""
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
                f"{source}: {problem}. All {num_bad} rows of the stream are bad; mend the data, no row is left to "
                "train on."
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
    """Why a row can't be trained on, or nothing; and its length in tokens."""
    problem = row_problem(row, control_tokens)
    if problem is not None:
        return problem, 0
    try:
        if open_pictures:
            open_images(row)
        return "", len(tokenize(row)[0])
    except BadRowError as error:
        return str(error).removeprefix(f"{row['source']}: "), 0


def _checksum(row: Row) -> int:
    """Of a row's conversation and of its pictures' names and sizes; the same wherever its folder lies."""
    folder, pictures = row["image_folder"], []
    for image in row_images(row):
        name = image["path"] if isinstance(image, dict) else image
        if isinstance(image, dict) and is_embedded(image):
            pictures.append((name, image["size"]))
        else:
            path = os.path.normpath(os.path.join(folder, name))
            pictures.append((path.removeprefix(folder), os.path.getsize(path)))
    return zlib.crc32(json.dumps([row["conversations"], pictures]).encode())


def _picture_references(column: pa.ChunkedArray, with_bytes: bool) -> list[Any]:
    """A column of pictures as Python values, with the size of encoded ones, whose bytes are left where they are unless
    asked for."""
    references: list[Any] = []
    for chunk in column.chunks:
        kind = chunk.type.value_type if pa.types.is_list(chunk.type) else chunk.type
        if not pa.types.is_struct(kind):  # paths
            references += chunk.to_pylist()
            continue
        pictures = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
        encoded = pictures.field("bytes")
        columns = {
            "bytes": encoded.to_pylist() if with_bytes else [None] * len(encoded),
            "path": pictures.field("path").to_pylist(),
            "size": pc.binary_length(encoded).to_pylist(),
        }
        leaves = [
            dict(zip(columns, values, strict=True)) if there else None
            for there, *values in zip(pictures.is_valid().to_pylist(), *columns.values(), strict=True)
        ]
        if pa.types.is_list(chunk.type):
            remaining = iter(leaves)
            counts = chunk.value_lengths().fill_null(0).to_pylist()
            references += [[next(remaining) for _ in range(count)] for count in counts]
        else:
            references += leaves
    return references
