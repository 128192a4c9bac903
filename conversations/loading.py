"""Load rows from JSON or parquet files, a dataset on disk or on the Hub, or a stream of these.

Whatever their layout (conversations/layouts.py), rows come out with `images` or `image`, undecoded, `conversations` in
LLaVA's turns, `problem`, `image_folder` and `source`.
"""

import hashlib
import json
import logging
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowException

from common.errors import UserError
from common.files import sha256
from conversations.columns import common_features, count_names, read_columns, require_turns, undecoded_features
from conversations.json_files import read_json_files
from conversations.layouts import Row, read_row
from conversations.sources import Source, find_source


logger = logging.getLogger(__name__)

# Shards of a stream of rows that are on disk: as many readers can share them evenly.
NUM_SHARDS = 64


def load_rows(
    name: str,
    image_folder: str | None = None,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Rows of a file, of files that a pattern matches, of a folder, or of a dataset on disk or on the Hub.

    A JSON file is converted once, into datasets' cache folder; rows are memory-mapped. Picture paths are relative to
    `image_folder`, by default the folder of the file or dataset; rows on the Hub need one if their pictures are paths.
    Fields that have content and that nothing reads are named in a warning.

    Raises:
        UserError: if these are not rows, there are none, or there is no such file, folder, split or configuration.
    """
    source = find_source(name)
    if image_folder is not None:
        image_folder = os.path.expanduser(image_folder)
        if not Path(image_folder).is_dir():
            raise UserError(f"The image folder {image_folder} does not exist.")
    folder = os.path.abspath(image_folder or source.folder)

    try:
        if streaming and source.kind in ("parquet", "dataset"):
            rows = _stream(source, folder, config, split)
        else:
            rows = _standardise(_open(source, config, split), source, folder)
        if next(iter(rows), None) is None:
            raise UserError("there are no rows.")
    except (ArrowException, DatasetGenerationError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{name}: {error.__cause__ or error}") from error
    if streaming and isinstance(rows, datasets.Dataset):
        return rows.to_iterable_dataset(num_shards=min(NUM_SHARDS, len(rows)))
    return rows


def has_splits(name: str) -> bool:
    """Whether a dataset may have named splits; files or a single saved dataset only have "train"."""
    source = find_source(name)
    return source.kind == "dataset" or Path(source.name, "dataset_dict.json").exists()


def _open(source: Source, config: str | None, split: str) -> datasets.Dataset:
    """The rows as they are stored."""
    if source.kind == "dataset":
        return datasets.load_dataset(source.name, config, split=split, features=common_features(source))
    if source.kind == "saved":
        rows = datasets.load_from_disk(source.name)
    elif source.kind == "parquet":
        files = [str(file) for file in source.files]
        rows = datasets.load_dataset("parquet", data_files=files, split="train", features=common_features(source))
    else:
        rows = read_json_files(source)

    splits = rows if isinstance(rows, datasets.DatasetDict) else {"train": rows}
    if config is not None or split not in splits:
        raise UserError(f"it has the splits {', '.join(splits)} and no configurations, so no {config or split!r}.")
    return splits[split]


def _standardise(dataset: datasets.Dataset, source: Source, image_folder: str) -> datasets.Dataset:
    """A dataset with our columns, pictures undecoded; says what nothing reads."""
    if source.kind == "json":
        unread = count_names(dataset)
        columns = [dataset.remove_columns("unread")]
    else:
        columns, unread = read_columns(dataset)
    for field, count in unread.items():
        message = "%s: nothing reads `%s`, which has content in %d of %d rows"
        logger.warning(message, source.name, field, count, len(dataset))

    sources = [f"{source.name}, row {number}" for number in range(len(dataset))]
    names = datasets.Dataset.from_dict({"image_folder": [image_folder] * len(sources), "source": sources})
    return datasets.concatenate_datasets([*columns, names], axis=1)


def _stream(source: Source, image_folder: str, config: str | None, split: str) -> datasets.IterableDataset:
    """A stream of a dataset's rows with our columns, pictures undecoded."""
    options: dict[str, Any] = {"streaming": True, "features": common_features(source)}
    if source.kind == "parquet":
        files = [str(file) for file in source.files]
        rows = datasets.load_dataset("parquet", data_files=files, split="train", **options)
    else:
        rows = datasets.load_dataset(source.name, config, split=split, **options)
    stored = rows.features or rows._resolve_features().features
    require_turns(stored)
    read = partial(_read_streamed, name=source.name, image_folder=image_folder)
    return rows.cast(undecoded_features(stored)).map(read, remove_columns=list(stored))


def _read_streamed(fields: Row, name: str, image_folder: str) -> Row:
    """A streamed row in our layout. A stream doesn't number its rows, so the source is the `id` or the beginning of
    the text."""
    row = read_row(fields)
    for field in row.pop("unread"):
        _say_unread(name, field)
    place = fields.get("id") or str(row["conversations"] or fields)[:80]
    return {**row, "image_folder": image_folder, "source": f"{name}, row {place}"}


@cache
def _say_unread(name: str, field: str) -> None:
    """Say it once in each process, since a stream's rows can't be counted before they are read."""
    logger.warning("%s: nothing reads `%s`, which has content", name, field)


def stream_fingerprint(name: str, config: str | None, split: str) -> str:
    """A fingerprint of what a stream reads: the content of JSON files, or names and sizes of other local files, or the
    commit on the Hub; with the configuration and the split."""
    source = find_source(name)
    path = Path(source.name)
    read: Any
    if source.kind == "json" and len(source.files) == 1:
        read = sha256(source.files[0])
    elif source.kind == "json":
        read = [sha256(file) for file in source.files]
    elif source.files:
        read = [(str(file), file.stat().st_size) for file in source.files]
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        read = [(str(file.relative_to(path)), file.stat().st_size) for file in files]
    else:
        read = datasets.load_dataset_builder(source.name, config).hash
    return hashlib.sha256(json.dumps([config, split, read]).encode()).hexdigest()
