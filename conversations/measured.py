"""Every row is checked, tokenized and measured once, before training; `datasets` keeps the result."""

import hashlib
import json
import logging
import os
import zlib
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
        """The row with its tokens. Raises `BadRowError` if it can't be trained on."""
        self.look(row)
        return self.tokenize(row)

    def look(self, row: Row) -> None:
        """Look at text and pictures. Raises `BadRowError` if the row can't be trained on."""
        check_row(row, self.tokenize.control_tokens)
        if self.open_pictures:
            open_images(row)


def tokenize_rows(dataset: Dataset, check: RowCheck, num_proc: int | None = None) -> Dataset:
    """Check and tokenize every row, in `num_proc` processes; the result has the columns of `FEATURES`.

    It is kept in datasets' cache folder for the next run. The key is the rows, the paths, sizes and times of picture
    files, and all that the check depends on. Raises `BadRowError` if the disk, not the row, is at fault.
    """
    tokenize, code = check.tokenize, hash_files(Path(__file__).parent, "*.py")
    fingerprint = Hasher.hash([
        dataset._fingerprint, _file_states(dataset), tokenize.processor.tokenizer, tokenize.chat_template,
        tokenize.processor.image_token, tokenize.tokens_per_image, tokenize.max_length, tokenize.max_positions,
        check.open_pictures, code,
        transformers.__version__, tokenizers.__version__,
    ])  # fmt: skip
    folder = Path(config.HF_DATASETS_CACHE) / "normllava"
    folder.mkdir(parents=True, exist_ok=True)
    return dataset.map(
        partial(_tokenize_batch, check=check), batched=True, batch_size=BATCH, num_proc=num_proc, features=FEATURES,
        remove_columns=dataset.column_names, cache_file_name=str(folder / f"rows-{fingerprint}.arrow"),
        new_fingerprint=fingerprint, load_from_cache_file=True, desc=f"Checking {len(dataset):,} rows",
    )  # fmt: skip


def _tokenize_batch(batch: dict[str, list[Any]], check: RowCheck) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    with ThreadPoolExecutor() as threads:
        looks = [threads.submit(check.look, row) for row in rows]
    found = [_tokens_or_problem(row, look, check) for row, look in zip(rows, looks, strict=True)]
    return {name: [row[name] for row in found] for name in FEATURES}


def _tokens_or_problem(row: Row, look: Future[None], check: RowCheck) -> Row:
    try:
        look.result()
        text, tokens = json.dumps(row_turns(row), default=str), check.tokenize(row)
    except BadRowError as error:
        if getattr(error.__cause__, "errno", None) is not None:
            raise  # by the disk's fault: what is kept would outlast it
        return {**dict.fromkeys(FEATURES), "problem": error.problem}
    return {**tokens, "conversations": text, "checksum": _checksum(row, text), "problem": ""}


def keep_good_rows(
    dataset: Dataset, tokens: Dataset, bad_rows: Literal["error", "skip"], report_file: Path | None
) -> tuple[Dataset, str]:
    """The good rows with their tokens, and a fingerprint of their content; `report_file`, if any, lists bad ones.

    Raises `BadRowError` with `"error"` if there is a bad row, with `"skip"` if all are bad.
    """
    is_bad = np.array([problem != "" for problem in tokens["problem"]])
    columns = [dataset.select_columns("source"), tokens.select_columns("problem")]
    bad = concatenate_datasets(columns, axis=1).select(np.flatnonzero(is_bad))
    if len(bad) and (bad_rows == "error" or is_bad.all()):
        advice = "fix the data" if is_bad.all() else "fix the data, or leave them out with bad_rows: skip"
        first, counts = bad[0], f"{len(bad)} of {len(is_bad)} rows are bad"
        raise BadRowError(first["source"], f"{first['problem']}. {counts}; {advice}")
    if len(bad) and report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        with report_file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in bad)
        logger.warning("Left out %d of %d rows; listed with reasons in %s", len(bad), len(is_bad), report_file)
    replaced = [name for name in ("conversations", "problem") if name in dataset.column_names]
    columns = [dataset.remove_columns(replaced), tokens.remove_columns(["problem", "checksum"])]
    joined, good = concatenate_datasets(columns, axis=1), np.flatnonzero(~is_bad)
    checksums = row_lengths(tokens.select(good), "checksum")
    return (joined.select(good) if len(bad) else joined), hashlib.sha256(checksums.tobytes()).hexdigest()


def row_lengths(dataset: Dataset, column: str = "length") -> np.ndarray:
    """A column of numbers of checked rows: int32 [rows]."""
    return dataset.with_format("numpy", columns=[column])[column][:]


def _file_states(dataset: Dataset) -> str:
    """Hash of the paths, sizes and modification times of all picture files, which `datasets` doesn't see."""

    def state(path: str | None) -> tuple[str | None, int, int]:
        try:
            found = os.stat(os.path.join(folder, path or ""))
        except (OSError, ValueError):
            return path, 0, 0
        return path, found.st_size, found.st_mtime_ns

    seen = hashlib.sha256()
    folder = dataset[0]["image_folder"]
    columns = [name for name in PICTURE_COLUMNS if name in dataset.column_names]
    if not columns:
        return seen.hexdigest()

    with ThreadPoolExecutor() as threads:
        for table in dataset.select_columns(columns).with_format("arrow").iter(1000):
            for column in table.columns:
                for chunk in column.chunks:  # in Arrow, since Python would read pictures inside too
                    pictures = chunk if pa.types.is_struct(chunk.type) else chunk.flatten()
                    paths = pictures.field("path").filter(pictures.field("bytes").is_null()).to_pylist()
                    seen.update(json.dumps(list(threads.map(state, paths))).encode())
    return seen.hexdigest()


def _checksum(row: Row, text: str) -> int:
    """Of a row's conversation, and its pictures' names and sizes; independent of where the folder is."""
    described = []
    for image in row_images(row):
        path = picture_path(row, image)
        if path is None:
            described.append((image["path"], len(image["bytes"])))
        else:
            described.append((path.removeprefix(row["image_folder"]), os.path.getsize(path)))
    return zlib.crc32(json.dumps([text, described]).encode())
