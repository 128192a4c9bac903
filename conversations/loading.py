"""Load rows from a LLaVA JSON file, a dataset on disk or on the Hub, or a stream of these."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from huggingface_hub.constants import HF_HUB_CACHE
from pyarrow import ArrowException

from conversations.files import sha256
from conversations.rows import Row, row_images


# Shards of a stream of rows that are on disk: as many readers can share them evenly.
NUM_SHARDS = 64


def load_rows(
    name: str,
    image_folder: str | None = None,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Rows of a LLaVA JSON or JSONL file, or of a dataset on disk or on the Hub; tars in WebDataset's layout only as a
    stream.

    A JSON file is converted once, into datasets' cache folder; rows are memory-mapped. Picture paths are relative to
    `image_folder`, by default the folder of the file or dataset (on the Hub: its folder in the Hub's cache).

    Raises:
        ValueError: if these are not rows, there are none, or there is no such folder, split or configuration.
    """
    if image_folder is not None and not Path(image_folder).is_dir():
        raise ValueError(f"The image folder {image_folder} does not exist.")
    folder = os.path.abspath(_own_folder(name) if image_folder is None else image_folder)
    try:
        if streaming and _kind(name) == "dataset":
            rows = _stream(name, folder, config, split)
        else:
            rows = _standardise(_open(name, config, split), name, folder)
        if next(iter(rows), None) is None:
            raise ValueError("there are no rows.")
    except (ArrowException, DatasetGenerationError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error.__cause__ or error}") from error
    if streaming and isinstance(rows, Dataset):
        return rows.to_iterable_dataset(num_shards=min(NUM_SHARDS, len(rows)))
    return rows


def has_splits(name: str) -> bool:
    """Whether a dataset may have named splits; a JSON file or a single saved dataset only has "train"."""
    return _kind(name) in ("splits", "dataset")


def _kind(name: str) -> Literal["json", "splits", "saved", "dataset"]:
    """A JSON file; what `save_to_disk` writes, in splits or not; or a folder or Hub id for `load_dataset`."""
    if name.lower().endswith((".json", ".jsonl", ".ndjson")):
        return "json"
    if Path(name, "dataset_dict.json").exists():
        return "splits"
    return "saved" if Path(name, "state.json").exists() else "dataset"


def _own_folder(name: str) -> str:
    """The folder that picture paths are relative to where none is given."""
    if _kind(name) == "json":
        return os.path.dirname(name)
    return name if Path(name).exists() else os.path.join(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")


def _open(name: str, config: str | None, split: str) -> Dataset:
    """The rows as they are stored."""
    kind = _kind(name)
    if kind == "dataset":
        return datasets.load_dataset(name, config, split=split)
    if split != "train" and kind != "splits":
        raise ValueError(f"it has one split, train, so there is no {split!r}.")
    if config is not None:
        raise ValueError(f"it has no configurations, so there is no {config!r}; leave it out.")
    if kind == "json":
        features = Features({"images": List(Image(decode=False)), "conversations": Value("string")})
        # The first process parses the file. The key is its content and this code.
        key = hashlib.sha256((sha256(Path(name)) + sha256(Path(__file__))).encode()).hexdigest()
        return Dataset.from_generator(_read_json, features=features, gen_kwargs={"name": name}, fingerprint=key)
    saved = datasets.load_from_disk(name)
    if kind == "splits" and split not in saved:
        raise ValueError(f"there is no split {split!r}; give one of {', '.join(saved)}.")
    return saved[split] if kind == "splits" else saved


def _read_json(name: str) -> Iterator[Row]:
    """Pictures and conversations of a file's rows."""
    for number, row in enumerate(_parse_json(Path(name))):
        if not isinstance(row, dict):
            problem = 'is not a row like {"image": ..., "conversations": [...]}'
            raise ValueError(f"row {number} {problem}: {json.dumps(row)[:60]}")
        # Only the fields that are used: LLaVA's `id` is a number in some rows and a string in others, which Arrow
        # rejects. What is not a path becomes text that names no file, so that the row's check reports it.
        paths = [image if isinstance(image, str) else f"{image} (not a path)" for image in row_images(row)]
        yield {
            "images": [{"bytes": None, "path": path.encode(errors="replace").decode()} for path in paths],
            "conversations": json.dumps(row.get("conversations")),
        }


def _parse_json(path: Path) -> Iterator[Any]:
    """The values of a JSON list or of JSON lines."""
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        yield from json.loads(text)
        return
    for number, line in enumerate(text.split("\n"), 1):  # strings may contain Unicode line separators
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}. Give a list of rows, or a row on each line.") from None
            yield row


def _undecoded(features: Features) -> Features:
    """The columns of pictures and conversations, with the pictures undecoded."""
    column = "images" if "images" in features else "image"
    for needed in ("conversations", column):
        if needed not in features:
            raise ValueError(f"no column {needed!r} among {list(features)}.")
    picture = Image(decode=False)
    is_list = isinstance(features[column], (List, datasets.LargeList))
    return Features({column: List(picture) if is_list else picture, "conversations": features["conversations"]})


def _standardise(dataset: Dataset, name: str, image_folder: str) -> Dataset:
    """A dataset with our columns, pictures undecoded. These are never rewritten, as they can take 100 GB."""
    features = _undecoded(dataset.features)
    dataset = dataset.select_columns(list(features))
    # `Dataset.cast` rewrites all pictures of a list column; casting the table copies none.
    info = dataset.info.copy()
    info.features = features
    dataset = Dataset(dataset.data.cast(features.arrow_schema), info=info, split=dataset.split)
    sources = [f"{name}, row {number}" for number in range(len(dataset))]
    names = Dataset.from_dict({"image_folder": [image_folder] * len(sources), "source": sources})
    return datasets.concatenate_datasets([dataset, names], axis=1)


def _stream(name: str, image_folder: str, config: str | None, split: str) -> IterableDataset:
    """A stream of a dataset's rows with our columns, pictures undecoded."""
    builder = datasets.load_dataset_builder(name, config)
    if isinstance(builder, WebDataset):
        # Any features keep it from taking those of the first samples, which may have fewer pictures than others.
        builder.info.features = Features({"json": Value("string")})
        rows = builder.as_streaming_dataset(split=split)
        rows.info.features = None
        return rows.map(_row_of_sample)
    rows = builder.as_streaming_dataset(split=split)
    features = rows.features or rows._resolve_features().features
    wanted = _undecoded(features)
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
    record = sample.get("json")
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
    read: Any
    if _kind(name) == "json":
        read = sha256(path)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        read = [(str(file.relative_to(path)), file.stat().st_size) for file in files]
    else:
        read = datasets.load_dataset_builder(name, config).hash
    return hashlib.sha256(json.dumps([config, split, read]).encode()).hexdigest()
