"""Every row is checked, tokenized and measured once, before training; `datasets` keeps the result."""

import hashlib
import json
import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets

from conversations import pictures, rows, tokens
from conversations.files import sha256
from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, check_row, control_tokens, picture_path, row_images, row_turns
from conversations.tokens import RowTokenizer


logger = logging.getLogger(__name__)

# Rows of a cache file: what a killed check, or a repaired picture, has to repeat.
PIECE = 50_000
# Rows whose pictures are in memory at a time.
BATCH = 100
FEATURES = Features(
    {
        "conversations": Value("string"),
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "num_images": Value("int32"),
        "length": Value("int32"),
        "checksum": Value("uint32"),
        "problem": Value("string"),
    }
)
BAD: Row = {"conversations": "", "input_ids": [], "labels": [], "num_images": 0, "length": 0, "checksum": 0}


@dataclass
class RowCheck:
    """Checks a row and tokenizes it.

    Args:
        tokenize: Tokenizes a good row.
        open_pictures: Whether to open its pictures too.
    """

    tokenize: RowTokenizer
    open_pictures: bool = True
    control_tokens: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        processor = self.tokenize.processor
        self.control_tokens = control_tokens(processor.tokenizer, processor.image_token)

    def __call__(self, row: Row) -> Row:
        """The row with its tokens. Raises `BadRowError` if it can't be trained on."""
        self.look(row)
        return self.tokenize(row)

    def look(self, row: Row) -> None:
        """Look at text and pictures. Raises `BadRowError` if the row can't be trained on."""
        check_row(row, self.control_tokens)
        if self.open_pictures:
            open_images(row)

    def problem(self, row: Row) -> str:
        """Why a row can't be trained on; an empty text for a good one."""
        try:
            self(row)
        except BadRowError as error:
            return error.problem
        return ""


def tokenize_rows(dataset: Dataset, check: RowCheck, num_proc: int | None = None) -> Dataset:
    """Check and tokenize every row; the result has the columns of `FEATURES`.

    It is kept in datasets' cache folder for the next run. The key is the rows, the paths, sizes and times of picture
    files, and all that `check` depends on.

    Args:
        dataset: Rows of `conversations.rows`.
        check: Checks a row.
        num_proc: Processes that share the work; in each, threads open the pictures.
    """
    code = [sha256(Path(file)) for file in (__file__, pictures.__file__, rows.__file__, tokens.__file__)]
    identity = [check.tokenize.identity(), sorted(check.control_tokens), check.open_pictures, code]
    pieces = []
    for start in range(0, len(dataset), PIECE):
        piece = dataset.select(range(start, min(start + PIECE, len(dataset))))
        pieces.append(_tokenize_piece(piece, check, identity, num_proc))
    return concatenate_datasets(pieces)


def _tokenize_piece(piece: Dataset, check: RowCheck, identity: list[Any], num_proc: int | None) -> Dataset:
    """[`tokenize_rows`] for the rows of a cache file."""

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        with ThreadPoolExecutor() as threads:
            looks = [threads.submit(check.look, row) for row in rows]
        found = []
        for row, look in zip(rows, looks, strict=True):
            try:
                look.result()
                text = json.dumps(row_turns(row), default=str)
                tokens = check.tokenize(row)
                found.append({**tokens, "conversations": text, "checksum": _checksum(row, text), "problem": ""})
            except BadRowError as error:
                found.append({**BAD, "problem": error.problem})
        return {name: [row[name] for row in found] for name in FEATURES}

    key = json.dumps([piece._fingerprint, _file_states(piece), identity])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "normllava"
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f"rows-{hashlib.sha256(key.encode()).hexdigest()}.arrow"
    is_kept = any(folder.glob(f"{name.stem}*"))
    for load_from_cache_file in (True, False):
        found = piece.map(
            tokenize, batched=True, batch_size=BATCH, num_proc=num_proc, remove_columns=piece.column_names,
            features=FEATURES, cache_file_name=str(name), load_from_cache_file=load_from_cache_file,
            new_fingerprint=name.stem[-64:], desc=f"Checking {len(piece):,} rows",
        )  # fmt: skip
        # A bad row is looked at again at the next start: the cause may have been the disk.
        problems = _problems(found) if is_kept else {}
        if all(check.problem(piece[number]) == problem for number, problem in problems.items()):
            break
    return found


def keep_good_rows(
    dataset: Dataset, tokens: Dataset, bad_rows: Literal["error", "skip"], report_file: Path | None
) -> tuple[Dataset, str]:
    """The good rows with their tokens, and a fingerprint of their content.

    Bad rows are added to `report_file`, a line of JSON each; `None` for a process that should not write it.

    Raises:
        BadRowError: with `"error"`, if there is a bad row; with `"skip"`, if all are bad.
    """
    problems, count = _problems(tokens), len(dataset)
    sources = dataset.select_columns("source")
    if problems and (bad_rows == "error" or len(problems) == count):
        number, problem = next(iter(problems.items()))
        advice = "fix the data" if len(problems) == count else "fix the data, or leave them out with bad_rows: skip"
        raise BadRowError(sources[number]["source"], f"{problem}. {len(problems)} of {count} rows are bad; {advice}")
    if problems and report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        with report_file.open("a", encoding="utf-8") as file:
            for number, problem in problems.items():
                file.write(json.dumps({"source": sources[number]["source"], "problem": problem}) + "\n")
        logger.warning("Left out %d of %d rows; listed with reasons in %s", len(problems), count, report_file)
    good = [number for number in range(count) if number not in problems]
    checksums = tokens.with_format("numpy", columns=["checksum"])["checksum"][:][good]
    columns = [dataset.remove_columns("conversations"), tokens.remove_columns(["problem", "checksum"])]
    joined = concatenate_datasets(columns, axis=1)
    return (joined.select(good) if problems else joined), hashlib.sha256(checksums.tobytes()).hexdigest()


def row_lengths(dataset: Dataset, column: str = "length") -> np.ndarray:
    """A column of numbers of checked rows: int32 [rows]."""
    return dataset.with_format("numpy", columns=[column])[column][:]


def _problems(tokens: Dataset) -> dict[int, str]:
    return {number: problem for number, problem in enumerate(tokens["problem"]) if problem}


def _file_states(piece: Dataset) -> str:
    """Hash of the paths, sizes and modification times of all picture files, which `datasets` doesn't see."""

    def state(path: str | None) -> tuple[str | None, int, int]:
        try:
            found = os.stat(os.path.join(folder, path or ""))
        except (OSError, ValueError):
            return path, 0, 0
        return path, found.st_size, found.st_mtime_ns

    seen, column = hashlib.sha256(), "images" if "images" in piece.column_names else "image"
    with ThreadPoolExecutor() as threads:
        for table in piece.select_columns([column, "image_folder"]).with_format("arrow").iter(1000):
            folder = table["image_folder"][0].as_py()
            for chunk in table[column].chunks:  # in Arrow, since Python would read pictures inside too
                pictures = chunk if pa.types.is_struct(chunk.type) else chunk.flatten()
                paths = pictures.field("path").filter(pictures.field("bytes").is_null()).to_pylist()
                seen.update(json.dumps(list(threads.map(state, paths))).encode())
    return seen.hexdigest()


def _checksum(row: Row, text: str) -> int:
    """Of a row's conversation, and its pictures' names and sizes; independent of where the folder is."""
    described = []
    for image in row_images(row):
        path = picture_path(row, image)
        if path is not None:
            described.append((path.removeprefix(row["image_folder"]), os.path.getsize(path)))
        elif isinstance(image, dict):
            described.append((image["path"], len(image["bytes"])))
    return zlib.crc32(json.dumps([text, described]).encode())
