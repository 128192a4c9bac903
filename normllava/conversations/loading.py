"""Loads rows from JSON or parquet files, or from a dataset on disk or on the Hub, also as a stream.

The rows may have any layout of `layouts.py`. They are returned with their pictures undecoded, in the layout of
`rows.py`, which is called "our layout" below.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowException

from normllava.conversations.columns import (
    common_features,
    count_pictures,
    count_unread_fields,
    find_media,
    media_columns,
    parquet_files,
    read_columns,
    undecoded_features,
)
from normllava.conversations.json_files import read_json_files
from normllava.conversations.layouts import TURN_COLUMNS, Row, media_problem, read_row
from normllava.conversations.sources import Source, find_source
from normllava.errors import UserError
from normllava.files import sha256


logger = logging.getLogger(__name__)

# The largest number of rows of a parquet file that are read at once.
READ_AT_ONCE = 1000
# The number of shards of a stream that is made from rows on disk.
NUM_SHARDS = 64


def load_rows(
    name: str,
    image_folder: str | None = None,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Load the rows of a file, of files that a pattern matches, of a folder, or of a dataset on disk or on the Hub.

    JSON files are converted once, into datasets' cache folder, and rows are memory-mapped from that folder. A warning
    names the fields that have content and that nothing reads.

    Args:
        name: The file, pattern, folder or Hub id.
        image_folder: The folder that picture paths are relative to, by default the folder of the file or dataset. Rows
            on the Hub need an image folder if their pictures are paths.
        config: The configuration, if the dataset has several.
        split: The split.
        streaming: Whether to return a stream. A stream reads parquet files, folders of loose files and datasets on the
            Hub while its rows are used. JSON files, and folders that `save_to_disk` wrote, are read first.

    Raises:
        UserError: if the file, folder, split or configuration doesn't exist, holds no rows, or can't be read.
    """
    source = find_source(name)
    absolute_image_folder = _absolute_image_folder(source, image_folder)
    if streaming and source.kind in ("parquet", "dataset"):
        return _stream(source, absolute_image_folder, config, split)

    stored_rows = _load_stored_rows(source, config, split)
    rows = _standardise(stored_rows, source, absolute_image_folder)
    if len(rows) == 0:
        raise UserError(f"{source.name}: there are no rows.")
    if streaming:
        return rows.to_iterable_dataset(num_shards=min(NUM_SHARDS, len(rows)))
    return rows


def _absolute_image_folder(source: Source, image_folder: str | None) -> str:
    """The folder that paths of pictures are relative to."""
    if image_folder is None:
        return source.folder

    folder = os.path.abspath(os.path.expanduser(image_folder))
    if not Path(folder).is_dir():
        raise UserError(f"The image folder {image_folder} does not exist.")
    return folder


def _load_stored_rows(source: Source, config: str | None, split: str) -> datasets.Dataset:
    """The rows in the layout that they are stored in. Rows of JSON files come in our layout already."""
    if source.kind == "dataset":
        return _load_dataset(source, config, split)

    if source.kind == "json":
        loaded = read_json_files(source)
    elif source.kind == "parquet":
        loaded = _load_dataset(source)
    else:  # a folder that `save_to_disk` wrote
        with _library_errors_for(source):
            loaded = datasets.load_from_disk(source.name)

    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    _require_split(source, list(splits), config, split)
    return splits[split]


def _require_split(source: Source, splits: Sequence[str], config: str | None, split: str) -> None:
    """Refuse a split that a source doesn't have, and any configuration of a source that has none."""
    if config is not None or split not in splits:
        available = f"it has the splits {', '.join(splits)} and no configurations"
        missing = split if config is None else config
        raise UserError(f"{source.name}: {available}, so no {missing!r}.")


def _load_dataset(
    source: Source, config: str | None = None, split: str = "train", streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """Load a source with `datasets.load_dataset`: parquet files, a folder or a Hub id."""
    options: dict[str, Any] = {"features": common_features(source), "streaming": streaming}
    if parquet_files(source):
        # By default, `datasets` takes the first group's number of rows, which in an empty file is 0, and fails.
        options["batch_size"] = READ_AT_ONCE
    with _library_errors_for(source):
        if source.kind == "parquet":  # the files are one split, and have no configurations
            files = [str(file) for file in source.files]
            return datasets.load_dataset("parquet", data_files=files, split="train", **options)
        return datasets.load_dataset(source.name, config, split=split, **options)


@contextmanager
def _library_errors_for(source: Source) -> Iterator[None]:
    """Run the body of a `with`, and turn an error of `datasets` or Arrow into a `UserError` that names the source.

    These libraries raise errors of many types for data that they can't read, and for an unknown split or
    configuration. No code of ours may run in the `with`, since its bugs would look like faults of the user's data.
    """
    try:
        yield
    except (ArrowException, DatasetGenerationError, TypeError, ValueError) as error:
        # `datasets` wraps many errors into one of its own, which says less.
        cause = error.__cause__ or error
        raise UserError(f"{source.name}: {cause}") from error


def _standardise(dataset: datasets.Dataset, source: Source, image_folder: str) -> datasets.Dataset:
    """A dataset in our layout, with its pictures undecoded. Warns of fields that nothing reads."""
    if source.kind == "json":
        unread = count_unread_fields(dataset)
        column_groups = [dataset.remove_columns("unread")]
    else:
        _require_turns(source, dataset.features)
        try:
            column_groups, unread = read_columns(dataset)  # each group has some columns of all rows
        except ArrowException as error:  # Arrow can't cast a column, such as numbers in place of pictures
            raise UserError(f"{source.name}: {error}") from error
        column_groups = add_problems(column_groups, find_media(dataset))
    for field, count in unread.items():
        message = "%s: nothing reads `%s`, which has content in %d of %d rows"
        logger.warning(message, source.name, field, count, len(dataset))

    added_columns = datasets.Dataset.from_dict({
        "image_folder": [image_folder] * len(dataset),
        "source": [f"{source.name}, row {number}" for number in range(len(dataset))],
    })  # fmt: skip
    return datasets.concatenate_datasets([*column_groups, added_columns], axis=1)


def add_problems(column_groups: list[datasets.Dataset], media: dict[str, np.ndarray]) -> list[datasets.Dataset]:
    """Column groups whose column `problem` also tells of the rows whose pictures, videos or sounds nothing reads.

    Args:
        column_groups: Datasets that each hold some columns of all rows.
        media: What [`find_media`] returns.
    """
    if not any(mask.any() for mask in media.values()):
        return column_groups

    has_pictures = count_pictures(column_groups) > 0
    problems: list[str | None] = [None] * len(column_groups[0])
    kept_groups = []
    for group in column_groups:
        if "problem" in group.column_names:
            problems = group["problem"][:]
            group = group.remove_columns("problem")
        kept_groups.append(group)
    for column, mask in media.items():
        for number in np.flatnonzero(mask & ~has_pictures):
            problems[number] = media_problem(column)
    return [*kept_groups, datasets.Dataset.from_dict({"problem": problems})]


def _require_turns(source: Source, features: datasets.Features) -> None:
    """Refuse a dataset that has no column of turns."""
    if not any(name in TURN_COLUMNS for name in features):
        raise UserError(
            f"{source.name}: no turns: the columns are {', '.join(features)}, and turns are read from "
            f"{', '.join(TURN_COLUMNS)}. Write one of these from your own; docs/data.md has an example of each."
        )


def _stream(source: Source, image_folder: str, config: str | None, split: str) -> datasets.IterableDataset:
    """A stream of a dataset's rows in our layout, with their pictures undecoded."""
    if source.kind == "parquet":
        _require_split(source, ["train"], config, split)
    rows: Any = _load_dataset(source, config, split, streaming=True)
    with _library_errors_for(source):
        if not rows.features:
            rows = rows._resolve_features()  # finds the features from the first rows
    features = rows.features
    _require_turns(source, features)

    rows = rows.cast(undecoded_features(features))
    with _library_errors_for(source):
        first_rows = list(rows.take(1))
    if not first_rows:
        raise UserError(f"{source.name}: there are no rows.")

    read_streamed = partial(
        _read_streamed, name=source.name, image_folder=image_folder, media_columns=media_columns(features)
    )
    return rows.map(read_streamed, remove_columns=list(features))


def _read_streamed(fields: Row, name: str, image_folder: str, media_columns: list[str]) -> Row:
    """A streamed row in our layout.

    A stream doesn't number its rows, so `source` names a row by its `id`, or by the beginning of its text.
    """
    row = read_row(fields, media_columns)
    for field in row.pop("unread"):
        _warn_once(name, field)

    row_name = fields.get("id")
    if row_name in (None, ""):
        content = row["conversations"]
        if not content:  # the turns can't be read
            content = fields
        row_name = str(content)[:80]
    return row | {"image_folder": image_folder, "source": f"{name}, row {row_name}"}


@cache
def _warn_once(name: str, field: str) -> None:
    """Warn of a field of a stream that nothing reads, once in each process: `cache` skips a repeated call.

    The warning has no number of rows, since a stream's rows can't be counted before they are read.
    """
    logger.warning("%s: nothing reads `%s`, which has content", name, field)


def has_splits(name: str) -> bool:
    """Whether a dataset may have several splits. Files, and a saved dataset without splits, only have "train"."""
    source = find_source(name)
    return source.kind == "dataset" or Path(source.name, "dataset_dict.json").exists()


def stream_fingerprint(name: str, config: str | None, split: str) -> str:
    """A fingerprint of the data that a stream reads, of the configuration and of the split."""
    content = _describe_content(find_source(name), config)
    description = json.dumps([config, split, content])
    return hashlib.sha256(description.encode()).hexdigest()


def _describe_content(source: Source, config: str | None) -> Any:
    """The hashes of JSON files, the names and sizes of other local files, or a hash for a dataset's commit on the Hub.

    Checkpoints hold fingerprints that are made from this value, so its form must not change.
    """
    if source.kind == "json":
        hashes = [sha256(file) for file in source.files]
        if len(hashes) == 1:
            return hashes[0]
        return hashes
    if source.files:
        return [(str(file), file.stat().st_size) for file in source.files]

    path = Path(source.name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return [(str(file.relative_to(path)), file.stat().st_size) for file in files]
    return datasets.load_dataset_builder(source.name, config).hash
