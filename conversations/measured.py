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
from datasets import Dataset, Features, List, Value, concatenate_datasets, config
from datasets.fingerprint import Hasher

from common.files import hash_files
from conversations.layouts import PICTURE_COLUMNS
from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, check_row, picture_path, row_images, row_turns
from conversations.tokens import RowTokenizer


logger = logging.getLogger(__name__)

# The number of rows whose pictures are in memory at a time.
BATCH = 100
# The number of rows whose pictures' paths are in memory at a time.
PATHS_BATCH = 1000
# The columns that are kept of a row. A good row's `problem` is "", and a bad row has nothing but its `problem`.
FEATURES = Features(
    {
        "conversations": Value("string"),
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
        tokenize: The tokenizer of rows.
        open_pictures: Whether pictures are opened, to find those that can't be read.
    """

    tokenize: RowTokenizer
    open_pictures: bool = True

    def __call__(self, row: Row) -> Row:
        """Check a row, and return it with its tokens.

        Raises:
            BadRowError: if the row can't be trained on.
        """
        image_sizes = self.look(row)
        return self.tokenize(row, image_sizes)

    def look(self, row: Row) -> list[tuple[int, int]] | None:
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

    The result is kept in datasets' cache folder. The next run uses it if neither the rows, nor the paths, sizes and
    times of picture files, nor anything that the check depends on has changed.

    Returns:
        A dataset of as many rows with the columns of `FEATURES`, in which bad rows have a `problem`.

    Raises:
        BadRowError: if a row can't be read through a fault of the disk, such as an I/O error.
    """
    fingerprint = _fingerprint(dataset, check)
    folder = Path(config.HF_DATASETS_CACHE) / "normllava"
    folder.mkdir(parents=True, exist_ok=True)
    return dataset.map(
        partial(_tokenize_batch, check=check),
        batched=True,
        batch_size=BATCH,
        num_proc=num_proc,
        features=FEATURES,
        remove_columns=dataset.column_names,
        cache_file_name=str(folder / f"rows-{fingerprint}.arrow"),
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
        tokenize.processor.image_processor.to_json_string(),  # the number of a picture's tiles depends on it
        check.open_pictures,
        hash_files(Path(__file__).parent, "*.py"),
        transformers.__version__,
        tokenizers.__version__,
    ])  # fmt: skip


def _hash_picture_files(dataset: Dataset) -> str:
    """A hash of the paths, sizes and modification times of all picture files.

    The fingerprint that `datasets` gives a dataset doesn't change when these files do.
    """
    states = hashlib.sha256()
    folder = dataset[0]["image_folder"]
    with ThreadPoolExecutor() as threads:
        for paths in _picture_paths(dataset):
            batch = list(threads.map(partial(_file_state, folder), paths))
            states.update(json.dumps(batch).encode())
    return states.hexdigest()


def _picture_paths(dataset: Dataset) -> Iterator[list[str | None]]:
    """The paths of pictures that are files outside the dataset, in batches.

    The paths are selected in Arrow. Rows in Python would also load the pictures that are inside the dataset.
    """
    columns = [name for name in PICTURE_COLUMNS if name in dataset.column_names]
    if not columns:
        return
    for table in dataset.select_columns(columns).with_format("arrow").iter(PATHS_BATCH):
        for column in table.columns:
            for chunk in column.chunks:
                # A row holds a picture, or a list of pictures.
                pictures = chunk if pa.types.is_struct(chunk.type) else chunk.flatten()
                is_file = pictures.field("bytes").is_null()
                yield pictures.field("path").filter(is_file).to_pylist()


def _file_state(folder: str, path: str | None) -> tuple[str | None, int, int]:
    """A path, and the size and modification time of its file, or twice 0 if there is no such file."""
    try:
        status = os.stat(os.path.join(folder, path or ""))
    except (OSError, ValueError):  # a path with a null character raises ValueError
        return path, 0, 0
    return path, status.st_size, status.st_mtime_ns


def _tokenize_batch(batch: dict[str, list[Any]], check: RowCheck) -> dict[str, list[Any]]:
    """The columns of `FEATURES` for a batch of rows. Pictures are opened in several threads."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    with ThreadPoolExecutor() as threads:
        looks = [threads.submit(check.look, row) for row in rows]

    measured = [_tokens_or_problem(row, look, check) for row, look in zip(rows, looks, strict=True)]
    return {name: [row[name] for row in measured] for name in FEATURES}


def _tokens_or_problem(row: Row, look: Future[list[tuple[int, int]] | None], check: RowCheck) -> Row:
    """What is kept of a row: its tokens if it is good, otherwise only its problem.

    Args:
        row: The row.
        look: The call of `check.look` for this row, which a thread has made.
        check: Tokenizes the row.

    Raises:
        BadRowError: if the disk is at fault. As the row's problem it would be kept even after the disk is mended.
    """
    try:
        image_sizes = look.result()
        conversations = json.dumps(row_turns(row), default=str)
        tokens = check.tokenize(row, image_sizes)
    except BadRowError as error:
        is_disk_fault = getattr(error.__cause__, "errno", None) is not None
        if is_disk_fault:
            raise
        nothing: Row = dict.fromkeys(FEATURES)
        return nothing | {"problem": error.problem}

    checksum = _checksum(row, conversations)
    return tokens | {"conversations": conversations, "checksum": checksum, "problem": ""}


def _checksum(row: Row, conversations: str) -> int:
    """A checksum of a row's conversation and of its pictures' names and sizes.

    It stays the same if the image folder is moved.
    """
    pictures = []
    for image in row_images(row):
        path = picture_path(row, image)
        if path is None:
            pictures.append((image["path"], len(image["bytes"])))
        else:
            pictures.append((path.removeprefix(row["image_folder"]), os.path.getsize(path)))
    return zlib.crc32(json.dumps([conversations, pictures]).encode())


def keep_good_rows(
    dataset: Dataset, tokens: Dataset, bad_rows: Literal["error", "skip"], report_file: Path | None
) -> tuple[Dataset, str]:
    """Join the good rows with their tokens, and refuse or leave out the bad rows.

    Args:
        dataset: The rows.
        tokens: The result of `tokenize_rows` for these rows.
        bad_rows: `"error"` refuses the dataset if there is a bad row, `"skip"` leaves bad rows out.
        report_file: The JSON lines file to which bad rows that are left out are added, if there is to be one.

    Returns:
        The good rows with their tokens, and a fingerprint of their content.

    Raises:
        BadRowError: with `"error"` if there is a bad row, with `"skip"` if all rows are bad.
    """
    is_bad = np.array([problem != "" for problem in tokens["problem"]])
    if is_bad.any():
        problems = _join(dataset.select_columns("source"), tokens.select_columns("problem"))
        bad = problems.select(np.flatnonzero(is_bad))
        _refuse_bad_rows(bad, len(dataset), bad_rows)
        if report_file is not None:
            _report_bad_rows(bad, len(dataset), report_file)

    # `tokens` has the turns in one form, and good rows have no problem.
    replaced = [name for name in ("conversations", "problem") if name in dataset.column_names]
    good = _join(dataset.remove_columns(replaced), tokens.remove_columns("problem"))
    if is_bad.any():
        good = good.select(np.flatnonzero(~is_bad))

    checksums = row_lengths(good, "checksum")
    fingerprint = hashlib.sha256(checksums.tobytes()).hexdigest()
    return good.remove_columns("checksum"), fingerprint


def _join(*columns: Dataset) -> Dataset:
    """Put the columns of several datasets of the same rows side by side, in one dataset."""
    return concatenate_datasets(list(columns), axis=1)


def _refuse_bad_rows(bad: Dataset, num_rows: int, bad_rows: Literal["error", "skip"]) -> None:
    """Raise an error about bad rows, unless they are to be left out and there are good rows too."""
    if bad_rows == "skip" and len(bad) < num_rows:
        return
    advice = "fix the data"
    if len(bad) < num_rows:
        advice += ", or leave them out with bad_rows: skip"
    problem = f"{bad[0]['problem']}. {len(bad)} of {num_rows} rows are bad; {advice}"
    raise BadRowError(bad[0]["source"], problem)


def _report_bad_rows(bad: Dataset, num_rows: int, report_file: Path) -> None:
    report_file.parent.mkdir(parents=True, exist_ok=True)
    with report_file.open("a", encoding="utf-8") as file:
        for row in bad:
            file.write(json.dumps(row) + "\n")
    logger.warning("Left out %d of %d rows; listed with reasons in %s", len(bad), num_rows, report_file)


def row_lengths(dataset: Dataset, column: str = "length") -> np.ndarray:
    """The lengths of checked rows in tokens, or another column of integers: int64 of shape `(num_rows,)`."""
    return dataset.with_format("numpy", columns=[column])[column][:]
