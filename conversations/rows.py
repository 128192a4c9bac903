"""Rows of pictures and conversations, as LLaVA ships them.

A row has `images` (paths, or what `datasets.Image(decode=False)` gives), `conversations` (LLaVA's turns with `from`
and `value`) and `source` (file or dataset and number, for messages to people).
"""

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Image, IterableDataset, List, Value, load_dataset, load_from_disk


IMAGE_MARK = "<image>"
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


class BadRowError(ValueError):
    """A row that can't be trained on; the message names its source and the reason."""


def load_rows(
    name: str,
    image_folder: str | None = None,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Rows of a LLaVA JSON or JSONL file, or of a dataset on disk or on the Hub; the latter also as a stream.

    `image_folder` goes before the paths of a JSON file; without it they are relative to the file's own folder.

    Raises:
        ValueError: if the file is not a list of rows, or columns are missing.
    """
    path = Path(name)
    if path.suffix in (".json", ".jsonl"):
        rows = _load_json(path, Path(image_folder) if image_folder is not None else path.parent)
        return rows.to_iterable_dataset() if streaming else rows
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        dataset = load_from_disk(name)
        dataset = dataset[split] if isinstance(dataset, DatasetDict) else dataset
    else:
        dataset = load_dataset(name, config, split=split, streaming=streaming)
    dataset = dataset.to_iterable_dataset() if streaming and isinstance(dataset, Dataset) else dataset
    return _standardise(dataset, name)


def _load_json(path: Path, image_folder: Path) -> Dataset:
    text = path.read_text(encoding="utf-8")
    try:
        # Split at line feeds alone: JSON allows other line breaks of Unicode inside a string.
        rows = (
            [json.loads(line) for line in text.split("\n") if line.strip()]
            if path.suffix == ".jsonl"
            else json.loads(text)
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid {path.suffix[1:].upper()}: {error}, near {error.doc[:60]!r}."
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f'{path} is not a list of rows. LLaVA\'s layout is [{{"image": ..., "conversations": [...]}}].'
        )
    images: list[list[str]] = []
    for row in rows:
        given = row.get("images", row.get("image"))
        given = [] if given is None else given if isinstance(given, list) else [given]
        images.append([_inside(image_folder, str(image), f"{path}, row {len(images)}") for image in given])
    # Only the fields that are used: LLaVA's `id` is a number in some rows and a string in others, which Arrow refuses.
    return Dataset.from_dict(
        {
            "images": images,
            "conversations": [json.dumps(row.get("conversations")) for row in rows],
            "source": [f"{path}, row {number}" for number in range(len(rows))],
        }
    ).cast_column("images", List(Value("string")))


def _inside(folder: Path, name: str, source: str) -> str:
    """The path of a picture. Data from elsewhere must not read files outside the folder that it was given."""
    path = os.path.normpath(folder / name)
    if not Path(path).is_relative_to(os.path.normpath(folder)):
        raise BadRowError(f"{source}: image {name} lies outside the image folder {folder}; give --image_folder.")
    return path


def _standardise(dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """Give a dataset of `conversations` and `images` or `image` the columns of this module, pictures undecoded.

    Columns are renamed and cast, never rewritten: the pictures of a dataset can take hundreds of gigabytes.
    """
    if dataset.column_names is None:  # a stream may not know them before it is read
        dataset = dataset._resolve_features()
    if "conversations" not in dataset.column_names:
        raise ValueError(f"{name}: no column 'conversations' among {dataset.column_names}.")
    if "images" not in dataset.column_names:
        if "image" not in dataset.column_names:
            raise ValueError(f"{name}: no column 'images' or 'image' among {dataset.column_names}.")
        dataset = dataset.rename_column("image", "images")
    feature = dataset.features["images"]
    if isinstance(feature, Image):
        dataset = dataset.cast_column("images", Image(decode=False))
    elif isinstance(feature, List) and isinstance(feature.feature, Image):
        dataset = dataset.cast_column("images", List(Image(decode=False)))
    dataset = dataset.select_columns(["images", "conversations"])
    if isinstance(dataset, IterableDataset):
        return dataset.map(lambda _, number: {"source": f"{name}, row {number}"}, with_indices=True)
    return dataset.add_column("source", [f"{name}, row {number}" for number in range(len(dataset))])


def row_images(row: dict[str, Any]) -> list[str | dict[str, Any]]:
    """The row's undecoded pictures: a column may hold one, a list, or nothing."""
    images = row["images"]
    return [image for image in (images if isinstance(images, list) else [images]) if image is not None]


def row_turns(row: dict[str, Any]) -> list[dict[str, str]]:
    """The row's turns in LLaVA's layout, which JSON files keep as text since their rows may be malformed."""
    turns = row["conversations"]
    return json.loads(turns) if isinstance(turns, str) else turns


def to_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's turns as chat messages: each `<image>` mark becomes an image part.

    The template puts parts on lines of their own, so the line break that LLaVA writes beside a mark is taken out
    here. What the assistant says stays a string, trimmed as LLaVA does.
    """
    messages: list[dict[str, Any]] = []
    for turn in row_turns(row):
        role, text = ROLES[turn["from"]], turn["value"].strip()
        if role == "assistant":
            messages.append({"role": role, "content": text})
            continue
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(IMAGE_MARK)):
            if number > 0:
                parts.append({"type": "image"})
            piece = piece.strip("\n")
            if piece:
                parts.append({"type": "text", "text": piece})
        messages.append({"role": role, "content": parts})
    return messages
