"""Every row is checked, tokenized and measured once, before training; `datasets` keeps the result."""

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

# Rows whose pictures are in memory at a time.
BATCH = 100
# Rows whose pictures' paths are in memory at a time.
PATHS_BATCH = 1000
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


@dataclass
class RowCheck:
    """Checks a row, opens its pictures unless told not to, and tokenizes it."""

    tokenize: RowTokenizer
    open_pictures: bool = True

    def __call__(self, row: Row) -> Row:
        """The row with its tokens.

        Raises:
            BadRowError: if it can't be trained on.
        """
        self.look(row)
        return self.tokenize(row)

    def look(self, row: Row) -> None:
        """Look at text and pictures.

        Raises:
            BadRowError: if the row can't be trained on.
        """
        check_row(row, self.tokenize.control_tokens)
        if self.open_pictures:
            open_images(row)


def tokenize_rows(dataset: Dataset, check: RowCheck, num_proc: int | None = None) -> Dataset:
    """Check and tokenize every row, in `num_proc` processes; the result has the columns of `FEATURES`.

    It is kept in datasets' cache folder for the next run. The key is the rows, the paths, sizes and times of picture
    files, and all that the check depends on.

    Raises:
        BadRowError: if the disk, not the row, is at fault.
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
    """Hash of all that the tokens of a dataset's rows depend on."""
    tokenize = check.tokenize
    return Hasher.hash([
        dataset._fingerprint,
        _hash_picture_files(dataset),
        tokenize.processor.tokenizer,
        tokenize.chat_template,
        tokenize.processor.image_token,
        tokenize.tokens_per_image,
        tokenize.max_length,
        tokenize.max_positions,
        check.open_pictures,
        hash_files(Path(__file__).parent, "*.py"),
        transformers.__version__,
        tokenizers.__version__,
    ])  # fmt: skip


def _hash_picture_files(dataset: Dataset) -> str:
    """Hash of the paths, sizes and modification times of all picture files, which `datasets` doesn't see."""
    states = hashlib.sha256()
    folder = dataset[0]["image_folder"]
    with ThreadPoolExecutor() as threads:
        for paths in _picture_paths(dataset):
            batch = list(threads.map(partial(_file_state, folder), paths))
            states.update(json.dumps(batch).encode())
    return states.hexdigest()


def _picture_paths(dataset: Dataset) -> Iterator[list[str | None]]:
    """The paths of pictures that aren't inside the dataset, batch by batch.

    They are taken in Arrow, since Python would read the pictures inside, too.
    """
    columns = [name for name in PICTURE_COLUMNS if name in dataset.column_names]
    if not columns:
        return
    for table in dataset.select_columns(columns).with_format("arrow").iter(PATHS_BATCH):
        for column in table.columns:
            for chunk in column.chunks:
                pictures = chunk if pa.types.is_struct(chunk.type) else chunk.flatten()
                is_file = pictures.field("bytes").is_null()
                yield pictures.field("path").filter(is_file).to_pylist()


def _file_state(folder: str, path: str | None) -> tuple[str | None, int, int]:
    """A path, and the size and modification time of its file, which are 0 if there is none."""
    try:
        status = os.stat(os.path.join(folder, path or ""))
    except (OSError, ValueError):  # ValueError: of a path with a null character
        return path, 0, 0
    return path, status.st_size, status.st_mtime_ns


def _tokenize_batch(batch: dict[str, list[Any]], check: RowCheck) -> dict[str, list[Any]]:
    """The columns of `FEATURES` for a batch of rows; threads open the pictures."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    with ThreadPoolExecutor() as threads:
        looks = [threads.submit(check.look, row) for row in rows]

    measured = [_tokens_or_problem(row, look, check) for row, look in zip(rows, looks, strict=True)]
    return {name: [row[name] for row in measured] for name in FEATURES}


def _tokens_or_problem(row: Row, look: Future[None], check: RowCheck) -> Row:
    """What is kept of a row: its tokens, or its problem alone."""
    try:
        look.result()
        conversations = json.dumps(row_turns(row), default=str)
        tokens = check.tokenize(row)
    except BadRowError as error:
        if getattr(error.__cause__, "errno", None) is not None:
            raise  # by the disk's fault: what is kept would outlast it
        return {**dict.fromkeys(FEATURES), "problem": error.problem}
    return {**tokens, "conversations": conversations, "checksum": _checksum(row, conversations), "problem": ""}


def _checksum(row: Row, conversations: str) -> int:
    """Of a row's conversation, and its pictures' names and sizes; independent of where the folder is."""
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
    """The good rows with their tokens, and a fingerprint of their content.

    Args:
        dataset: The rows.
        tokens: What `tokenize_rows` made of them.
        bad_rows: What to do with bad ones.
        report_file: To which bad rows that are left out are added, one a line.

    Raises:
        BadRowError: with `"error"` if there is a bad row, with `"skip"` if all are bad.
    """
    is_bad = np.array([problem != "" for problem in tokens["problem"]])
    if is_bad.any():
        bad = _join(dataset.select_columns("source"), tokens.select_columns("problem")).select(np.flatnonzero(is_bad))
        _refuse_bad_rows(bad, len(dataset), bad_rows)
        if report_file is not None:
            _report_bad_rows(bad, len(dataset), report_file)

    replaced = [name for name in ("conversations", "problem") if name in dataset.column_names]
    good = _join(dataset.remove_columns(replaced), tokens.remove_columns("problem"))
    if is_bad.any():
        good = good.select(np.flatnonzero(~is_bad))

    checksums = row_lengths(good, "checksum")
    return good.remove_columns("checksum"), hashlib.sha256(checksums.tobytes()).hexdigest()


def _join(*columns: Dataset) -> Dataset:
    """Datasets of the same rows as one, side by side."""
    return concatenate_datasets(list(columns), axis=1)


def _refuse_bad_rows(bad: Dataset, num_rows: int, bad_rows: Literal["error", "skip"]) -> None:
    """End the run over bad rows, unless they are to be left out and there are good ones."""
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
    """A column of integers of checked rows: int64 [rows]."""
    return dataset.with_format("numpy", columns=[column])[column][:]
