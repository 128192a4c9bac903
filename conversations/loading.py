"""Load rows from a LLaVA JSON file, a dataset on disk or on the Hub, or a stream of these."""

import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets.exceptions import DatasetGenerationError
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
) -> datasets.Dataset | datasets.IterableDataset:
    """Rows of a LLaVA JSON or JSONL file, or of a dataset on disk or on the Hub.

    A JSON file is converted once, into datasets' cache folder; rows are memory-mapped. Picture paths are relative to
    `image_folder`, by default the folder of the file or dataset; rows on the Hub need one if their pictures are paths.

    Raises:
        ValueError: if these are not rows, there are none, or there is no such folder, split or configuration.
    """
    if image_folder is not None and not Path(image_folder).is_dir():
        raise ValueError(f"The image folder {image_folder} does not exist.")
    folder = os.path.abspath(image_folder or (os.path.dirname(name) if _kind(name) == "json" else name))
    try:
        if streaming and _kind(name) == "dataset":
            rows = _stream(name, folder, config, split)
        else:
            rows = _standardise(_open(name, config, split), name, folder)
        if next(iter(rows), None) is None:
            raise ValueError("there are no rows.")
    except (ArrowException, DatasetGenerationError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error.__cause__ or error}") from error
    if streaming and isinstance(rows, datasets.Dataset):
        return rows.to_iterable_dataset(num_shards=min(NUM_SHARDS, len(rows)))
    return rows


def has_splits(name: str) -> bool:
    """Whether a dataset may have named splits; a JSON file or a single saved dataset only has "train"."""
    return _kind(name) == "dataset" or Path(name, "dataset_dict.json").exists()


def _kind(name: str) -> Literal["json", "saved", "dataset"]:
    """A JSON file; what `save_to_disk` writes; or a folder or Hub id for `load_dataset`."""
    if name.lower().endswith((".json", ".jsonl", ".ndjson")):
        return "json"
    is_saved = any(Path(name, file).exists() for file in ("dataset_dict.json", "state.json"))
    return "saved" if is_saved else "dataset"


def _open(name: str, config: str | None, split: str) -> datasets.Dataset:
    """The rows as they are stored."""
    kind = _kind(name)
    if kind == "dataset":
        return datasets.load_dataset(name, config, split=split)
    if kind == "saved":
        rows = datasets.load_from_disk(name)
    else:
        features = datasets.Features(
            {"images": datasets.List(datasets.Image(decode=False)), "conversations": datasets.Value("string")}
        )
        # The first process parses the file. The key is its content and this code.
        key = hashlib.sha256((sha256(Path(name)) + sha256(Path(__file__))).encode()).hexdigest()
        rows = datasets.Dataset.from_generator(
            _read_json, features=features, gen_kwargs={"name": name}, fingerprint=key
        )
    splits = rows if isinstance(rows, datasets.DatasetDict) else {"train": rows}
    if config is not None or split not in splits:
        raise ValueError(f"it has the splits {', '.join(splits)} and no configurations, so no {config or split!r}.")
    return splits[split]


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
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}. Give a list of rows, or a row on each line.") from None


def _undecoded(features: datasets.Features) -> datasets.Features:
    """The columns of pictures and conversations, with the pictures undecoded."""
    column = "images" if "images" in features else "image"
    for needed in ("conversations", column):
        if needed not in features:
            raise ValueError(f"no column {needed!r} among {list(features)}.")
    picture = datasets.Image(decode=False)
    is_list = isinstance(features[column], (datasets.List, datasets.LargeList))
    return datasets.Features(
        {column: datasets.List(picture) if is_list else picture, "conversations": features["conversations"]}
    )


def _standardise(dataset: datasets.Dataset, name: str, image_folder: str) -> datasets.Dataset:
    """A dataset with our columns, pictures undecoded. These are never rewritten, as they can take 100 GB."""
    features = _undecoded(dataset.features)
    dataset = dataset.select_columns(list(features))
    # `Dataset.cast` rewrites all pictures of a list column; casting the table copies none.
    info = dataset.info.copy()
    info.features = features
    dataset = datasets.Dataset(dataset.data.cast(features.arrow_schema), info=info, split=dataset.split)
    sources = [f"{name}, row {number}" for number in range(len(dataset))]
    names = datasets.Dataset.from_dict({"image_folder": [image_folder] * len(sources), "source": sources})
    return datasets.concatenate_datasets([dataset, names], axis=1)


def _stream(name: str, image_folder: str, config: str | None, split: str) -> datasets.IterableDataset:
    """A stream of a dataset's rows with our columns, pictures undecoded."""
    rows = datasets.load_dataset(name, config, split=split, streaming=True)
    features = rows.features or rows._resolve_features().features
    wanted = datasets.Features({name: features[name] for name in ("id",) if name in features} | _undecoded(features))
    undecoded = rows.select_columns(list(wanted)).cast(wanted)
    return undecoded.map(partial(_name_row, name=name, image_folder=image_folder))


def _name_row(row: Row, name: str, image_folder: str) -> Row:
    """A stream doesn't number its rows, so the source is the `id` or the beginning of the text."""
    place = row.get("id") or json.dumps(row["conversations"], default=str)[:80]
    return {"image_folder": image_folder, "source": f"{name}, row {place}"}


def stream_fingerprint(name: str, config: str | None, split: str) -> str:
    """A fingerprint of what a stream reads: the content of a JSON file, or names and sizes of local files, or the
    commit on the Hub; with the configuration and the split."""
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
