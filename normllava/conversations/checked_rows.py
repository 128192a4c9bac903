"""Checks, tokenizes and measures every row once, before training. `datasets` keeps the result for later runs."""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.fingerprint import Hasher

from normllava.conversations.columns import cache_file
from normllava.conversations.layouts import PICTURE_COLUMNS
from normllava.conversations.pictures import open_images
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.conversations.rows import BadRowError, Row, check_row, picture_path, row_images, row_turns
from normllava.files import hash_files


logger = logging.getLogger(__name__)

# The number of rows whose pictures are in memory at a time.
BATCH_SIZE = 100
# The number of rows whose pictures' paths are in memory at a time.
PATHS_BATCH_SIZE = 1000
# The columns that `tokenize_rows` returns. `RowTokenizer` describes `input_ids` to `length`, and `_checksum` describes
# `checksum`. A good row's `problem` is "". A bad row has only a `problem`; its other columns are null.
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "tiles_per_image": List(Value("int32")),
        "num_tiles": Value("int32"),
        "length": Value("int32"),
        "checksum": Value("uint32"),
        "problem": Value("string"),
    }
)


@dataclass
class RowCheck:
    """Checks a row, opens its pictures, and tokenizes it.

    Args:
        tokenize: Turns a checked row into token ids and labels.
        open_pictures: Whether pictures are opened, to find those that can't be read.
    """

    tokenize: RowTokenizer
    open_pictures: bool = True

    def __call__(self, row: Row) -> Row:
        """Check a row, and return it with its tokens.

        Raises:
            BadRowError: if the row can't be trained on.
        """
        image_sizes = self.check_content(row)
        return self.tokenize(row, image_sizes)

    def check_content(self, row: Row) -> list[tuple[int, int]] | None:
        """Check a row's text and pictures, without tokenizing it.

        Returns:
            Width and height of each picture, or `None` if pictures aren't opened.

        Raises:
            BadRowError: if the row can't be trained on.
        """
        check_row(row, self.tokenize.control_tokens)
        if not self.open_pictures:
            return None
        return [image.size for image in open_images(row)]


def tokenize_rows(dataset: Dataset, check: RowCheck, num_proc: int | None = None) -> Dataset:
    """Check and tokenize every row, in `num_proc` processes.

    The result is kept in datasets' cache folder. The next run uses the kept result unless one of these has changed: a
    row, the path, size or modification time of a picture file, or something else that the check depends on.

    Returns:
        A row with the columns of `FEATURES` for each row of `dataset`, in the same order.

    Raises:
        BadRowError: if a row can't be read because of a fault of the disk, such as an I/O error.
    """
    fingerprint = _fingerprint(dataset, check)
    return dataset.map(
        partial(_tokenize_batch, check=check),
        batched=True,
        batch_size=BATCH_SIZE,
        num_proc=num_proc,
        features=FEATURES,
        remove_columns=dataset.column_names,
        cache_file_name=cache_file(f"rows-{fingerprint}"),
        new_fingerprint=fingerprint,
        load_from_cache_file=True,
        desc=f"Checking {len(dataset):,} rows",
    )


def _fingerprint(dataset: Dataset, check: RowCheck) -> str:
    """A hash of all that the result of `tokenize_rows` depends on."""
    tokenize = check.tokenize
    return Hasher.hash([
        dataset._fingerprint,
        _hash_picture_files(dataset),
        tokenize.processor.tokenizer,
        tokenize.chat_template,
        tokenize.processor.image_token,
        tokenize.tokens_per_tile,
        tokenize.max_length,
        tokenize.max_positions,
        tokenize.max_tiles,
        tokenize.processor.image_processor.to_json_string(),  # settings such as the number of tiles
        check.open_pictures,
        hash_files(Path(__file__).parent, "*.py"),  # the code of this package
        transformers.__version__,
        tokenizers.__version__,
    ])  # fmt: skip


def _hash_picture_files(dataset: Dataset) -> str:
    """A hash of the paths, sizes and modification times of all picture files.

    The fingerprint that `datasets` gives a dataset doesn't change when such a file changes.
    """
    states_hash = hashlib.sha256()
    image_folder = dataset[0]["image_folder"]  # the same for all rows
    with ThreadPoolExecutor() as threads:
        for paths in _picture_paths(dataset):
            states = list(threads.map(partial(_file_state, image_folder), paths))
            states_hash.update(json.dumps(states).encode())
    return states_hash.hexdigest()


def _picture_paths(dataset: Dataset) -> Iterator[list[str | None]]:
    """The paths of pictures that are files outside the dataset, in batches.

    The paths are selected in Arrow, since rows in Python would also load the pictures inside the dataset.
    """
    columns = [name for name in PICTURE_COLUMNS if name in dataset.column_names]
    if not columns:
        return
    arrow_rows = dataset.select_columns(columns).with_format("arrow")
    for table in arrow_rows.iter(PATHS_BATCH_SIZE):
        for column in table.columns:
            for chunk in column.chunks:
                # In each row the column holds a picture, or a list of pictures.
                pictures = chunk if pa.types.is_struct(chunk.type) else chunk.flatten()
                is_file = pictures.field("bytes").is_null()
                yield pictures.field("path").filter(is_file).to_pylist()


def _file_state(image_folder: str, path: str | None) -> tuple[str | None, int, int]:
    """The path of a picture, and the size and modification time of its file. If there is no file, both are 0."""
    if not path:  # joined with the image folder, an empty path would mean the folder itself
        return path, 0, 0
    try:
        status = os.stat(os.path.join(image_folder, path))
    except (OSError, ValueError):  # a path with a null character raises ValueError
        return path, 0, 0
    return path, status.st_size, status.st_mtime_ns


def _tokenize_batch(batch: dict[str, list[Any]], check: RowCheck) -> dict[str, list[Any]]:
    """The columns of `FEATURES` for a batch of rows. Pictures are opened in several threads."""
    rows = []
    for index in range(len(batch["source"])):
        rows.append({name: column[index] for name, column in batch.items()})

    with ThreadPoolExecutor() as threads:
        content_checks = [threads.submit(check.check_content, row) for row in rows]

    measured_rows = []
    for row, content_check in zip(rows, content_checks, strict=True):
        measured_rows.append(_tokens_or_problem(row, content_check, check))
    return {name: [row[name] for row in measured_rows] for name in FEATURES}


def _tokens_or_problem(row: Row, content_check: Future[list[tuple[int, int]] | None], check: RowCheck) -> Row:
    """The columns of `FEATURES` for a row: its tokens if it is good, otherwise only its problem.

    Args:
        row: The row.
        content_check: The call of `check.check_content` for this row, which a thread has made.
        check: Tokenizes the row.

    Raises:
        BadRowError: if the disk is at fault. A problem that is returned would stay in the cache after the disk is
            mended.
    """
    try:
        image_sizes = content_check.result()  # raises what the call raised
        tokens = check.tokenize(row, image_sizes)
    except BadRowError as error:
        # An error of the operating system has an `errno`. The error that a broken picture raises has none.
        is_disk_fault = getattr(error.__cause__, "errno", None) is not None
        if is_disk_fault:
            raise
        bad_row: Row = dict.fromkeys(FEATURES)
        bad_row["problem"] = error.problem
        return bad_row

    return tokens | {"checksum": _checksum(row), "problem": ""}


def _checksum(row: Row) -> int:
    """A checksum of a row's conversation and of its pictures' names and sizes.

    If the image folder is moved, the checksum stays the same.
    """
    names_and_sizes = []
    for image in row_images(row):
        path = picture_path(row, image)
        if path is None:  # the picture is in the row
            names_and_sizes.append((image["path"], len(image["bytes"])))
        else:
            relative_path = path.removeprefix(row["image_folder"])
            names_and_sizes.append((relative_path, os.path.getsize(path)))
    conversations = json.dumps(row_turns(row), default=str)
    content = json.dumps([conversations, names_and_sizes])
    return zlib.crc32(content.encode())


def keep_good_rows(
    dataset: Dataset,
    tokens: Dataset,
    bad_rows: Literal["error", "skip"],
    report_file: Path | None,
    keeps_turns: bool = False,
) -> tuple[Dataset, str]:
    """Join the good rows with their tokens, and refuse or leave out the bad rows.

    Args:
        dataset: The rows.
        tokens: The result of `tokenize_rows` for these rows.
        bad_rows: `"error"` refuses the dataset if there is a bad row, `"skip"` leaves bad rows out.
        report_file: A file of JSON lines, to which the bad rows that are left out are added; `None` for no file.
        keeps_turns: Whether the rows keep their column `conversations`. Training needs the tokens alone, and rows of
            several sources, whose turns may be stored in different types, are joined only without it.

    Returns:
        The good rows with their tokens, and a fingerprint of their content.

    Raises:
        BadRowError: with `"error"` if there is a bad row, with `"skip"` if all rows are bad.
    """
    is_bad = np.array([problem != "" for problem in tokens["problem"]])
    if is_bad.any():
        sources_and_problems = _join(dataset.select_columns("source"), tokens.select_columns("problem"))
        problems = sources_and_problems.select(np.flatnonzero(is_bad))
        _refuse_bad_rows(problems, len(dataset), bad_rows)
        if report_file is not None:
            _report_bad_rows(problems, len(dataset), report_file)

    unneeded_columns = {"problem"} if keeps_turns else {"problem", "conversations"}
    unneeded_columns &= set(dataset.column_names)
    good = _join(dataset.remove_columns(list(unneeded_columns)), tokens.remove_columns("problem"))
    if is_bad.any():
        good = good.select(np.flatnonzero(~is_bad))

    checksums = integer_column(good, "checksum")
    fingerprint = hashlib.sha256(checksums.tobytes()).hexdigest()
    return good.remove_columns("checksum"), fingerprint


def _join(*parts: Dataset) -> Dataset:
    """One dataset with the columns of several datasets, which hold the same rows."""
    return concatenate_datasets(list(parts), axis=1)


def _refuse_bad_rows(problems: Dataset, num_rows: int, bad_rows: Literal["error", "skip"]) -> None:
    """Raise an error about bad rows, unless they are to be left out and there are good rows too.

    Args:
        problems: The `source` and the `problem` of each bad row.
        num_rows: The number of all rows.
        bad_rows: The option of `keep_good_rows`.
    """
    has_good_rows = len(problems) < num_rows
    if bad_rows == "skip" and has_good_rows:
        return

    advice = "fix the data"
    if has_good_rows:
        advice += ", or leave them out with bad_rows: skip"
    first = problems[0]
    problem = f"{first['problem']}. {len(problems)} of {num_rows} rows are bad; {advice}"
    raise BadRowError(first["source"], problem)


def _report_bad_rows(problems: Dataset, num_rows: int, report_file: Path) -> None:
    """Add the `source` and the `problem` of each bad row to a file of JSON lines."""
    report_file.parent.mkdir(parents=True, exist_ok=True)
    with report_file.open("a", encoding="utf-8") as file:
        for bad_row in problems:
            file.write(json.dumps(bad_row) + "\n")
    logger.warning("Left out %d of %d rows; listed with reasons in %s", len(problems), num_rows, report_file)


def row_lengths(dataset: Dataset) -> np.ndarray:
    """The lengths of checked rows in tokens: int64 of shape `(num_rows,)`."""
    return integer_column(dataset, "length")


def integer_column(dataset: Dataset, name: str) -> np.ndarray:
    """A column of integers: int64 of shape `(num_rows,)`."""
    column = dataset.with_format("numpy", columns=[name])[name]
    return column[:]  # reads the whole column into one array
