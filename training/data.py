"""Rows of pictures and conversations, as LLaVA ships them, checked before training and opened when they are needed.

A row has `images` (paths, or what `datasets.Image(decode=False)` gives), `conversations` (LLaVA's turns with `from`
and `value`) and `source` (file or dataset and number, for messages to people).
"""

import hashlib
import json
import logging
import os
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, Image, IterableDataset, List, Value, load_dataset, load_from_disk
from PIL import Image as PILImage
from PIL import ImageOps


logger = logging.getLogger(__name__)

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


def find_problem(row: dict[str, Any], image_token: str = IMAGE_MARK, needs_answer: bool = True) -> str | None:
    """Why a row can't be trained on, or `None`. Looks at everything but the pixels.

    Args:
        row: A row of this module.
        image_token: What the processor's tokenizer reads as a picture; text must not hold it.
        needs_answer: Whether a row without an answer is a problem; it is where the row is to be trained on.
    """
    try:
        turns, images = row_turns(row), row_images(row)
    except json.JSONDecodeError:
        return "`conversations` is text that is not JSON"
    if not isinstance(turns, list) or not turns:
        return "`conversations` is empty or not a list of turns"
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or turn.get("from") not in ROLES or not isinstance(turn.get("value"), str):
            return f'turn {number} is not {{"from": one of {", ".join(ROLES)}, "value": text}}: {turn!r}'
        if image_token != IMAGE_MARK and image_token in turn["value"]:
            return f"turn {number} holds {image_token}, which this model's tokenizer reads as a picture"
    answers = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    if needs_answer and not any(answer.strip() for answer in answers):
        return "no assistant turn (`gpt`) with text, so there is nothing to learn"
    if any(IMAGE_MARK in answer for answer in answers):
        return f"an assistant turn holds {IMAGE_MARK}"
    marks = sum(turn["value"].count(IMAGE_MARK) for turn in turns)
    if marks != len(images):
        return f"{marks} {IMAGE_MARK} marks but {len(images)} images"
    for image in images:
        if isinstance(image, str) and not Path(image).is_file():
            return f"image file {image} is missing"
    return None


@dataclass(frozen=True)
class MeasuredRows:
    """What a look at every row found."""

    problems: list[str]
    """Why a row can't be trained on; empty for a good one."""
    lengths: list[int]
    """Tokens of each row."""
    checksums: list[int]
    """Of each row's conversation."""


def measure_rows(
    dataset: Dataset,
    image_token: str,
    tokenize: Callable[[dict[str, Any]], tuple[list[int], list[int]]],
    open_pictures: bool,
    num_proc: int | None = None,
) -> MeasuredRows:
    """Look at every row: at its text, at its pictures' files, and inside these only with `open_pictures`."""

    def measure(table: pa.Table) -> dict[str, list[Any]]:
        columns = {name: table[name].to_pylist() for name in ("conversations", "source")}
        images = _picture_references(table["images"], with_bytes=open_pictures)
        measured: dict[str, list[Any]] = {"problem": [], "length": [], "checksum": []}
        for turns, source, pictures in zip(columns["conversations"], columns["source"], images, strict=True):
            row = {"conversations": turns, "source": source, "images": pictures}
            problem, length = _measure_row(row, image_token, tokenize, open_pictures)
            measured["problem"].append(problem)
            measured["length"].append(length)
            measured["checksum"].append(zlib.crc32(json.dumps(turns).encode()))
        return measured

    # Not from the cache: files may have come or gone since. As Arrow, since pictures of hundreds of gigabytes would be
    # read otherwise.
    measured = dataset.with_format("arrow").map(
        measure,
        batched=True,
        num_proc=num_proc,
        remove_columns=dataset.column_names,
        load_from_cache_file=False,
        new_fingerprint=uuid.uuid4().hex,
        desc="Checking rows",
    )
    return MeasuredRows(
        *(measured.with_format("arrow")[name].to_pylist() for name in ("problem", "length", "checksum"))
    )


def keep_good_rows(
    dataset: Dataset, measured: MeasuredRows, bad_rows: Literal["error", "skip"], report_file: Path | None
) -> tuple[Dataset, str]:
    """The dataset without its bad rows and with a column `length`, in tokens; and a fingerprint of what it says.

    Bad rows go to `report_file`, a line of JSON each; `None` for a process that should not write it.

    Raises:
        BadRowError: with `"error"`, if there is a bad row; with `"skip"`, if there is no other.
    """
    bad = [number for number, problem in enumerate(measured.problems) if problem]
    good = [number for number, problem in enumerate(measured.problems) if not problem]
    if bad:
        sources = dataset.select_columns("source")
        examples = [{"source": sources[number]["source"], "problem": measured.problems[number]} for number in bad]
        if bad_rows == "error" or not good:
            first = examples[0]
            raise BadRowError(
                f"{first['source']}: {first['problem']}. {len(bad)} of {len(dataset)} rows are bad; mend the data, or "
                "leave them out with --bad_rows skip."
            )
        if report_file is not None:
            report_file.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(example) + "\n" for example in examples]
            report_file.write_text("".join(lines), encoding="utf-8")
            logger.warning("Left out %d of %d rows; listed with reasons in %s", len(bad), len(dataset), report_file)
    dataset = dataset.add_column("length", measured.lengths)
    content = [(measured.lengths[number], measured.checksums[number]) for number in good]
    fingerprint = hashlib.sha256(np.array(content, dtype=np.int64).tobytes()).hexdigest()
    return (dataset.select(good) if bad else dataset), fingerprint


def check_stream(
    dataset: IterableDataset,
    image_token: str,
    tokenize: Callable[[dict[str, Any]], tuple[list[int], list[int]]],
    bad_rows: Literal["error", "skip"],
    report_file: Path,
) -> IterableDataset:
    """The same for data that is read as it comes: rows are looked at, and get their `length`, when they are reached.

    Bad rows are added to `report_file` as they are met, by each process that meets them.
    """

    def is_good(row: dict[str, Any]) -> bool:
        if row["problem"] and bad_rows == "error":
            raise BadRowError(f"{row['source']}: {row['problem']}.")
        if row["problem"]:
            report_file.parent.mkdir(parents=True, exist_ok=True)
            with report_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"source": row["source"], "problem": row["problem"]}) + "\n")
        return not row["problem"]

    def measure(row: dict[str, Any]) -> dict[str, Any]:
        problem, length = _measure_row(row, image_token, tokenize, open_pictures=bad_rows == "skip")
        return {"problem": problem, "length": length}

    return dataset.map(measure).filter(is_good).remove_columns("problem")


def _measure_row(
    row: dict[str, Any],
    image_token: str,
    tokenize: Callable[[dict[str, Any]], tuple[list[int], list[int]]],
    open_pictures: bool,
) -> tuple[str, int]:
    """Why a row can't be trained on, or nothing; and its length in tokens."""
    problem = find_problem(row, image_token)
    if problem is not None:
        return problem, 0
    try:
        if open_pictures:
            open_images(row)
        return "", len(tokenize(row)[0])
    except BadRowError as error:
        return str(error).removeprefix(f"{row['source']}: "), 0


def _picture_references(column: pa.ChunkedArray, with_bytes: bool) -> list[Any]:
    """A column of pictures as Python values, the bytes of encoded ones left where they are unless asked for."""
    if with_bytes:
        return column.to_pylist()
    references: list[Any] = []
    for chunk in column.chunks:
        kind = chunk.type.value_type if pa.types.is_list(chunk.type) else chunk.type
        if not pa.types.is_struct(kind):  # paths
            references += chunk.to_pylist()
            continue
        pictures = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
        leaves = [
            {"bytes": None, "path": path} if there else None
            for path, there in zip(pictures.field("path").to_pylist(), pictures.is_valid().to_pylist(), strict=True)
        ]
        if pa.types.is_list(chunk.type):
            remaining = iter(leaves)
            counts = chunk.value_lengths().fill_null(0).to_pylist()
            references += [[next(remaining) for _ in range(count)] for count in counts]
        else:
            references += leaves
    return references


def open_images(row: dict[str, Any]) -> list[PILImage.Image]:
    """The row's pictures, decoded, in RGB, as people see them.

    The camera's orientation is applied, 16-bit grey is scaled to 8, transparency is dropped, and an animation gives
    its first frame. The content decides the format, not the file's name.

    Raises:
        BadRowError: if one can't be read.
    """
    return [_open_image(image, row["source"]) for image in row_images(row)]


def _open_image(image: str | dict[str, Any], source: str) -> PILImage.Image:
    if isinstance(image, str):
        file: Any = image
    else:
        file = BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"]
    try:
        with PILImage.open(file) as opened:
            if opened.mode.startswith("I;16"):  # converted as it is, everything above 255 would be white
                return PILImage.fromarray((np.asarray(opened) >> 8).astype(np.uint8)).convert("RGB")
            if opened.mode in ("I", "F"):
                raise OSError(f"pixels of mode {opened.mode} have no known range")
            return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # Pillow's decoders raise errors of many types on broken files
        name = image if isinstance(image, str) else image["path"]
        raise BadRowError(f"{source}: image {name} can't be read ({error}).") from error


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
