"""Load rows from a LLaVA JSON file, a dataset on disk or on the Hub, or a stream of these."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetBuilder,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    LargeList,
    List,
    Value,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from pyarrow import ArrowInvalid

from conversations.files import sha256
from conversations.json_rows import open_json
from conversations.rows import Row
from conversations.streams import RowStream
from conversations.tars import is_tars, stream_tars


# File extension of a glob: `datasets`' name for the format.
KINDS = {".parquet": "parquet", ".tar": "webdataset"}


def load_rows(
    name: str,
    image_folder: str | None = None,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
) -> Dataset | RowStream:
    """Rows of a LLaVA JSON or JSONL file, or of a dataset on disk or on the Hub, also as a stream; a glob selects
    parquet files or tars. Tars in WebDataset's layout can only be streamed.

    Rows are memory-mapped; a JSON file is converted once, into datasets' cache folder. Picture paths are relative to
    `image_folder` and may not leave it. Its default is the folder of the file or dataset; for a dataset on the Hub,
    its folder in the Hub's cache.

    Raises:
        ValueError: if the file is not a list of rows, there is no such split, there are no rows, or columns are
            missing or of the wrong type, or a tar has another layout.
        BadRowError: if a JSON file names a picture outside its folder.
    """
    path = Path(name)
    if image_folder is not None and not Path(image_folder).is_dir():
        raise ValueError(f"The image folder {image_folder} does not exist; fix --image_folder.")
    if (_is_json(path) or _is_saved(path) or _is_glob(name)) and config is not None:
        raise ValueError(f"{name} has no configurations, so there is no {config!r}; leave it out.")
    if _is_json(path):
        if split != "train":
            raise ValueError(f"{path} has one split, train, so there is no {split!r}.")
        rows = open_json(path, os.path.abspath(image_folder or path.parent))
    elif _is_saved(path):
        rows = _standardise(_load_saved(name, split), name, image_folder)
    elif path.is_file():
        raise ValueError(f"{name} is not a file of rows: give .json, .jsonl or .ndjson, or the folder of a dataset.")
    else:
        try:
            rows = _stream(name, config, split) if streaming else _load_dataset(name, config, split)
        except ValueError as error:  # unknown configuration or split; the message lists the known ones
            raise ValueError(f"{name}: {error}") from error
        except DatasetGenerationError as error:
            raise ValueError(f"{name} can't be read: {error.__cause__}") from error
        if not isinstance(rows, RowStream):
            rows = _standardise(rows, name, image_folder)
    try:
        first = next(iter(rows), None)
    except ArrowInvalid as error:
        raise ValueError(f"{name} can't be read: {error}") from error
    if first is None:
        raise ValueError(f"{name} has no rows.")
    return RowStream(rows.to_iterable_dataset(), name, name) if streaming and isinstance(rows, Dataset) else rows


def has_splits(name: str) -> bool:
    """Whether a dataset may have named splits; a JSON file, a glob or a single saved dataset only has "train"."""
    path = Path(name)
    return not _is_json(path) and not _is_glob(name) and (not _is_saved(path) or (path / "dataset_dict.json").exists())


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in (".json", ".jsonl", ".ndjson")


def _is_glob(name: str) -> bool:
    return glob.has_magic(name) and not Path(name).exists()


def _source(name: str, config: str | None) -> dict[str, Any]:
    """Arguments of `load_dataset` and `load_dataset_builder`."""
    if not _is_glob(name):
        return {"path": name, "name": config}
    kind = KINDS.get(Path(name).suffix.lower())
    if kind is None:
        raise ValueError(f"a glob must end in one of {', '.join(KINDS)}.")
    return {"path": kind, "data_files": {"train": name}}


def _find(name: str, config: str | None) -> DatasetBuilder:
    return load_dataset_builder(**_source(name, config))


def _load_dataset(name: str, config: str | None, split: str) -> Dataset:
    if is_tars(_find(name, config)):
        raise ValueError(
            "tars can only be streamed, which training does with --dataset_streaming true and max_steps. Other rows "
            "must come as JSON, parquet or a saved dataset."
        )
    return load_dataset(**_source(name, config), split=split)


def _stream(name: str, config: str | None, split: str) -> IterableDataset | RowStream:
    builder = _find(name, config)
    if is_tars(builder):
        return RowStream(stream_tars(builder, split), name, name)
    return builder.as_streaming_dataset(split=split)


def _is_saved(path: Path) -> bool:
    """Whether a folder is what `save_to_disk` writes."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _load_saved(name: str, split: str) -> Dataset:
    try:
        dataset = load_from_disk(name)
    except IndexError as error:  # what datasets raises for a folder without shards
        raise ValueError(f"{name} has no rows.") from error
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise ValueError(f"{name} has no split {split!r}; give one of {', '.join(dataset)}.")
        dataset = dataset[split]
    elif split not in ("train", str(dataset.split)):
        raise ValueError(f"{name} is a dataset without splits, so there is no {split!r}; leave it out.")
    return dataset


def _standardise(dataset: Any, name: str, image_folder: str | None) -> Any:
    """Convert a dataset with `conversations` and `images` or `image` to our columns, pictures undecoded.

    Columns are renamed and cast, never rewritten: the pictures of a dataset can take hundreds of gigabytes.
    """
    if dataset.column_names is None:  # a stream may not know them before it is read
        dataset = dataset._resolve_features()
    if "conversations" not in dataset.column_names:
        raise ValueError(f"{name}: no column 'conversations' among {dataset.column_names}.")
    column = "images" if "images" in dataset.column_names else "image"
    if column not in dataset.column_names:
        raise ValueError(f"{name}: no column 'images' or 'image' among {dataset.column_names}.")
    if image_folder is None and _is_glob(name):
        image_folder = os.path.dirname(name)
    if image_folder is None and not Path(name).exists():
        image_folder = os.path.join(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="dataset"))
    image_folder = os.path.abspath(image_folder or name)
    dataset = dataset.select_columns([column, "conversations"])
    features = Features({**dataset.features, column: _undecoded(dataset.features[column], name)})
    if isinstance(dataset, IterableDataset):
        return RowStream(dataset.cast(features), name, image_folder)
    # `Dataset.cast` rewrites all pictures of a list column; casting the table copies none.
    info = dataset.info.copy()
    info.features = features
    dataset = Dataset(dataset.data.cast(features.arrow_schema), info=info, split=dataset.split)
    dataset = dataset if column == "images" else dataset.rename_column(column, "images")
    if not len(dataset):
        raise ValueError(f"{name} has no rows.")
    # In datasets' cache folder, because a million names would take 100 MB in every process.
    given = {"name": name, "image_folder": image_folder, "count": len(dataset)}
    features = Features({"image_folder": Value("string"), "source": Value("string")})
    key = hashlib.sha256(json.dumps(given).encode()).hexdigest()
    names = Dataset.from_generator(_names, features=features, gen_kwargs=given, fingerprint=key)
    return concatenate_datasets([dataset, names], axis=1)


def _names(name: str, image_folder: str, count: int) -> Iterator[Row]:
    for number in range(count):
        yield {"image_folder": image_folder, "source": f"{name}, row {number}"}


def _undecoded(feature: Any, name: str) -> Any:
    """The undecoded type of a column with a picture, or a list, per row, as pictures, their bytes or their paths."""
    picture = feature.feature if isinstance(feature, (List, LargeList)) else feature
    is_struct = isinstance(picture, dict) and picture.keys() <= {"bytes", "path"}
    is_value = isinstance(picture, Value) and picture.dtype.removeprefix("large_") in ("binary", "string", "null")
    if not (isinstance(picture, Image) or is_struct or is_value):
        raise ValueError(f"{name}: the column of pictures holds {feature}, not pictures, their bytes or their paths.")
    return Image(decode=False) if picture is feature else List(Image(decode=False))


def stream_fingerprint(name: str, config: str | None, split: str) -> str:
    """A fingerprint of what a stream reads: names and sizes of local files, or the commit on the Hub, with the
    configuration and the split. Of a JSON file, which is read completely anyway, the content."""
    path = Path(name)
    if _is_json(path):
        files: Any = [sha256(path)]
    else:
        if _is_saved(path):
            folder = path / split if (path / "dataset_dict.json").exists() else path
            found = [str(file) for file in sorted(folder.glob("data-*.arrow"))]
        else:
            builder = _find(name, config)
            data_files = builder.config.data_files or {split: [builder.hash]}
            found = data_files.get(split) or [file for files in data_files.values() for file in files]
        files = [
            [os.path.relpath(file, path), os.path.getsize(file)] if os.path.exists(file) else file for file in found
        ]
    return hashlib.sha256(json.dumps([config, split, files]).encode()).hexdigest()
