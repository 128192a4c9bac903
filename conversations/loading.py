"""Load rows from a LLaVA JSON file, a dataset on disk or on the Hub, or a stream of these."""

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
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
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from huggingface_hub.constants import HF_HUB_CACHE
from pyarrow import ArrowInvalid

from conversations.files import sha256
from conversations.rows import Row


# File extension of a glob: `datasets`' name for the format.
KINDS = {".parquet": "parquet", ".tar": "webdataset"}
FEATURES = Features(
    {
        "images": List(Image(decode=False)),
        "image_folder": Value("string"),
        "conversations": Value("string"),
        "source": Value("string"),
    }
)
# Shards of a stream of rows that are on disk: as many readers can share them evenly.
NUM_SHARDS = 64


def load_rows(
    name: str,
    image_folder: str | None = None,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Rows of a LLaVA JSON or JSONL file, or of a dataset on disk or on the Hub, also as a stream; a glob selects
    parquet files or tars. Tars in WebDataset's layout can only be streamed.

    Rows are memory-mapped; a JSON file is converted once, into datasets' cache folder. Picture paths are relative to
    `image_folder`. Its default is the folder of the file or dataset; for a dataset on the Hub, its folder in the Hub's
    cache.

    Raises:
        ValueError: if the file is not a list of rows, there is no such split, there are no rows, or columns are
            missing or of the wrong type.
    """
    path = Path(name)
    if image_folder is not None and not Path(image_folder).is_dir():
        raise ValueError(f"The image folder {image_folder} does not exist.")
    if (_is_json(path) or _is_saved(path) or _is_glob(name)) and config is not None:
        raise ValueError(f"{name} has no configurations, so there is no {config!r}; leave it out.")
    if image_folder is None:
        image_folder = _own_folder(name)
    image_folder = os.path.abspath(image_folder)
    if path.is_file() and not _is_json(path):
        raise ValueError(f"{name} is not a file of rows: give .json, .jsonl or .ndjson, or the folder of a dataset.")
    try:
        if _is_json(path):
            rows = _open_json(path, image_folder, split)
        elif _is_saved(path):
            rows = _standardise(_load_saved(name, split), name, image_folder)
        elif streaming:
            rows = _stream(name, config, split, image_folder)
        else:
            with _naming(name):
                rows = load_dataset(**_source(name, config), split=split)
            rows = _standardise(rows, name, image_folder)
        first = next(iter(rows), None)
    except (DatasetGenerationError, ArrowInvalid) as error:
        raise ValueError(f"{name} can't be read: {error.__cause__ or error}") from error
    if first is None:
        raise ValueError(f"{name} has no rows.")
    if streaming and isinstance(rows, Dataset):
        rows = rows.to_iterable_dataset(num_shards=min(NUM_SHARDS, len(rows)))
    return rows


def has_splits(name: str) -> bool:
    """Whether a dataset may have named splits; a JSON file, a glob or a single saved dataset only has "train"."""
    path = Path(name)
    return not _is_json(path) and not _is_glob(name) and (not _is_saved(path) or (path / "dataset_dict.json").exists())


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in (".json", ".jsonl", ".ndjson")


def _is_glob(name: str) -> bool:
    return glob.has_magic(name) and not Path(name).exists()


def _is_saved(path: Path) -> bool:
    """Whether a folder is what `save_to_disk` writes."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _own_folder(name: str) -> str:
    """The folder that picture paths are relative to where none is given."""
    if _is_json(Path(name)) or _is_glob(name):
        return os.path.dirname(name)
    return name if Path(name).exists() else os.path.join(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")


def _open_json(path: Path, image_folder: str, split: str) -> Dataset:
    """The rows of a JSON or JSONL file, memory-mapped from datasets' cache folder.

    The first process parses the file; the key is its content and name, the image folder and this code.
    """
    if split != "train":
        raise ValueError(f"{path} has one split, train, so there is no {split!r}.")
    given = {"name": str(path), "image_folder": image_folder}
    key = json.dumps([given, sha256(path), sha256(Path(__file__))])
    fingerprint = hashlib.sha256(key.encode()).hexdigest()
    try:
        return Dataset.from_generator(_read_json, features=FEATURES, gen_kwargs=given, fingerprint=fingerprint)
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def _read_json(name: str, image_folder: str) -> Iterator[Row]:
    """The rows of a file with the columns of `conversations.rows`. Raises `ValueError` as `load_rows` does."""
    number = -1
    for number, (place, row) in enumerate(_parse_json(Path(name))):
        if not isinstance(row, dict):
            raise ValueError(
                f'{name}, {place} is not a row like {{"image": ..., "conversations": [...]}}: {json.dumps(row)[:60]}'
            )
        given = row.get("image") if row.get("images") is None else row["images"]
        given = [] if given is None else given if isinstance(given, list) else [given]
        # Only the fields that are used: LLaVA's `id` is a number in some rows and a string in others, which Arrow
        # rejects. What is not a path becomes text that names no file, so that the row's check reports it.
        names = [image if isinstance(image, str) and image else f"{json.dumps(image)} (not a path)" for image in given]
        yield {
            "images": [{"bytes": None, "path": image.encode(errors="replace").decode()} for image in names],
            "image_folder": image_folder,
            "conversations": json.dumps(row.get("conversations")),
            "source": f"{name}, row {number}",
        }
    if number < 0:
        raise ValueError(f"{name} has no rows.")


def _parse_json(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSON list or of JSON lines, each with its place in the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8, see byte {error.start}; save it as UTF-8.") from error
    kind, place = "JSON", ""
    try:
        if path.suffix.lower() == ".json":
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise ValueError('it is not a list of rows: [{"image": ..., "conversations": [...]}]')
            yield from ((f"row {number}", row) for number, row in enumerate(rows))
            return
        kind = "JSONL"
        for number, line in enumerate(text.split("\n"), 1):  # strings may contain Unicode line separators
            place = f"line {number}"
            if line.strip():
                yield place, json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = " If each line is a row, name the file .jsonl." if "Extra data" in str(error) and not place else ""
        raise ValueError(f"{path} is not valid {kind}: {f'{place}: ' * bool(place)}{error}.{hint}") from error


def _source(name: str, config: str | None) -> dict[str, Any]:
    """Arguments of `load_dataset` and `load_dataset_builder`."""
    if not _is_glob(name):
        return {"path": name, "name": config}
    kind = KINDS.get(Path(name).suffix.lower())
    if kind is None:
        raise ValueError(f"a glob must end in one of {', '.join(KINDS)}.")
    return {"path": kind, "data_files": {"train": name}}


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """A `with` block whose errors name the dataset: an unknown configuration or split, with those there are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


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


def _undecoded(features: Features, name: str) -> Features:
    """The columns of pictures and conversations, with the pictures undecoded.

    Raises:
        ValueError: if a column is missing or holds something else than pictures, their bytes or their paths.
    """
    if "conversations" not in features:
        raise ValueError(f"{name}: no column 'conversations' among {list(features)}.")
    column = "images" if "images" in features else "image"
    if column not in features:
        raise ValueError(f"{name}: no column 'images' or 'image' among {list(features)}.")
    feature = features[column]
    picture = feature.feature if isinstance(feature, (List, LargeList)) else feature
    is_struct = isinstance(picture, dict) and picture.keys() <= {"bytes", "path"}
    is_value = isinstance(picture, Value) and picture.dtype.removeprefix("large_") in ("binary", "string", "null")
    if not (isinstance(picture, Image) or is_struct or is_value):
        raise ValueError(f"{name}: the column of pictures holds {feature}, not pictures, their bytes or their paths.")
    undecoded = Image(decode=False) if picture is feature else List(Image(decode=False))
    return Features({column: undecoded, "conversations": features["conversations"]})


def _standardise(dataset: Dataset, name: str, image_folder: str) -> Dataset:
    """A dataset with our columns, pictures undecoded. These are never rewritten, as they can take 100 GB."""
    features = _undecoded(dataset.features, name)
    if not len(dataset):  # which can't be cast
        raise ValueError(f"{name} has no rows.")
    dataset = dataset.select_columns(list(features))
    # `Dataset.cast` rewrites all pictures of a list column; casting the table copies none.
    info = dataset.info.copy()
    info.features = features
    dataset = Dataset(dataset.data.cast(features.arrow_schema), info=info, split=dataset.split)
    # In datasets' cache folder, because a million names would take 100 MB in every process.
    given = {"name": name, "image_folder": image_folder, "count": len(dataset)}
    key = hashlib.sha256(json.dumps(given).encode()).hexdigest()
    features = Features({"image_folder": Value("string"), "source": Value("string")})
    names = Dataset.from_generator(_names, features=features, gen_kwargs=given, fingerprint=key)
    return concatenate_datasets([dataset, names], axis=1)


def _names(name: str, image_folder: str, count: int) -> Iterator[Row]:
    for number in range(count):
        yield {"image_folder": image_folder, "source": f"{name}, row {number}"}


def _stream(name: str, config: str | None, split: str, image_folder: str) -> IterableDataset:
    """A stream of a dataset's rows with our columns, pictures undecoded."""
    with _naming(name):
        builder = load_dataset_builder(**_source(name, config))
        is_of_tars = isinstance(builder, WebDataset)
        if is_of_tars:
            # Any features keep it from taking those of the first samples, which may have fewer pictures than others.
            builder.info.features = Features({"json": Value("string")})
        rows = builder.as_streaming_dataset(split=split)
    if is_of_tars:
        rows.info.features = None
        return rows.map(_row_of_sample)
    features = rows.info.features or rows._resolve_features().info.features
    wanted = _undecoded(features, name)
    wanted |= {"id": features["id"]} if "id" in features else {}
    undecoded = rows.select_columns(list(wanted)).cast(Features(wanted))
    return undecoded.map(partial(_name_row, name=name, image_folder=image_folder))


def _name_row(row: Row, name: str, image_folder: str) -> Row:
    """A stream doesn't number its rows, so the source is the `id` or the beginning of the text."""
    place = row.get("id") or json.dumps(row["conversations"], default=str)[:80]
    return {"image_folder": image_folder, "source": f"{name}, row {place}"}


def _row_of_sample(sample: Row) -> Row:
    """A row of the members of a sample in WebDataset's layout: `json`, with the conversations or a record that holds
    them, and pictures in the order of the last number in their names."""
    record = sample.get("json", sample.get("jsn"))
    pictures = [member for member in sample if member.rsplit(".", 1)[-1].lower() in WebDataset.IMAGE_EXTENSIONS]
    pictures.sort(key=lambda member: [int(number) for number in re.findall(r"\d+", member.rpartition(".")[0])[-1:]])
    return {
        "images": [{"bytes": sample[member], "path": f"{sample['__key__']}.{member}"} for member in pictures],
        "image_folder": sample["__url__"],  # unused, as the pictures are in the row
        "conversations": json.dumps(record.get("conversations") if isinstance(record, dict) else record),
        "source": f"{sample['__url__']}, {sample['__key__']}",
    }


def stream_fingerprint(name: str, config: str | None, split: str) -> str:
    """A fingerprint of what a stream reads: names and sizes of local files, or the commit on the Hub, with the
    configuration and the split. Of a JSON file, which is read completely anyway, the content."""
    path = Path(name)
    if _is_json(path):
        read: Any = sha256(path)
    elif path.is_dir() or _is_glob(name):
        folder = path if path.is_dir() else path.parent
        files = sorted(map(Path, glob.glob(name)) if _is_glob(name) else path.rglob("*"))
        read = [(str(file.relative_to(folder)), file.stat().st_size) for file in files if file.is_file()]
    else:
        read = load_dataset_builder(name, config).hash
    return hashlib.sha256(json.dumps([config, split, read]).encode()).hexdigest()
