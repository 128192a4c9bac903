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
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value, concatenate_datasets

from conversations import pictures, rows, tokens
from conversations.files import sha256
from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, check_row, control_tokens, is_embedded, picture_path, row_images
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
BAD: Row = {"input_ids": [], "labels": [], "num_images": 0, "length": 0, "checksum": 0}


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

    def tokenize(table: pa.Table) -> dict[str, list[Any]]:
        batch = _to_rows(table, with_bytes=check.open_pictures)
        with ThreadPoolExecutor() as threads:
            looks = [threads.submit(check.look, row) for row in batch]
        found: dict[str, list[Any]] = {name: [] for name in FEATURES}
        for row, look in zip(batch, looks, strict=True):
            try:
                look.result()
                result = {**check.tokenize(row), "problem": ""}
                result["conversations"] = json.dumps(rows.row_turns(row), default=str)
                result["checksum"] = _checksum(result)
            except BadRowError as error:
                result = {**BAD, "conversations": "", "problem": error.problem}
            for name, values in found.items():
                values.append(result[name])
        return found

    key = json.dumps([piece._fingerprint, _file_states(piece), identity])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "normllava"
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f"rows-{hashlib.sha256(key.encode()).hexdigest()}.arrow"
    is_kept = any(folder.glob(f"{name.stem}*"))
    for load_from_cache_file in (True, False):
        found = piece.with_format("arrow").map(
            tokenize, batched=True, batch_size=BATCH, num_proc=num_proc, remove_columns=piece.column_names,
            features=FEATURES, cache_file_name=str(name), load_from_cache_file=load_from_cache_file,
            new_fingerprint=name.stem[-64:], desc=f"Checking {len(piece):,} rows",
        ).with_format(None)  # fmt: skip
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


def _to_rows(table: pa.Table, with_bytes: bool) -> list[Row]:
    """Rows of an Arrow table; pictures inside have a `size` in place of their bytes, which are read only
    `with_bytes`."""
    columns = {
        name: table[name].to_pylist() if with_bytes or name not in ("image", "images") else _references(table[name])
        for name in table.column_names
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _references(column: pa.ChunkedArray) -> list[Any]:
    references: list[Any] = []
    for chunk in column.chunks:
        is_list = pa.types.is_list(chunk.type)
        pictures = chunk.flatten() if is_list else chunk
        sizes, paths = pc.binary_length(pictures.field("bytes")).to_pylist(), pictures.field("path").to_pylist()
        leaves = [
            {"bytes": None, "path": path, "size": size} if there else None
            for there, path, size in zip(pictures.is_valid().to_pylist(), paths, sizes, strict=True)
        ]
        if is_list:
            remaining = iter(leaves)
            counts = chunk.value_lengths().fill_null(0).to_pylist()
            references += [[next(remaining) for _ in range(count)] for count in counts]
        else:
            references += leaves
    return references


def _file_states(piece: Dataset) -> str:
    """Hash of the paths, sizes and modification times of all picture files, which `datasets` doesn't see."""

    def state(row: Row) -> list[tuple[str, int, int]]:
        states = []
        for image in row_images(row):
            try:
                path = picture_path(row, image)
                found = None if path is None else os.stat(path)
            except (OSError, ValueError):
                continue
            if found is not None:
                states.append((str(path), found.st_size, found.st_mtime_ns))
        return states

    seen = hashlib.sha256()
    with ThreadPoolExecutor() as threads:
        for table in piece.remove_columns("conversations").with_format("arrow").iter(1000):
            seen.update(json.dumps(list(threads.map(state, _to_rows(table, with_bytes=False)))).encode())
    return seen.hexdigest()


def _checksum(row: Row) -> int:
    """Of a row's conversation, and its pictures' names and sizes; independent of where the folder is."""
    described = []
    for image in row_images(row):
        if isinstance(image, dict) and is_embedded(image):
            size = image["size"] if image["bytes"] is None else len(image["bytes"])
            described.append((image["path"], size))
        else:
            path = str(picture_path(row, image))
            described.append((path.removeprefix(row["image_folder"]), os.path.getsize(path)))
    return zlib.crc32(json.dumps([row["conversations"], described]).encode())
