"""Load rows from JSON or parquet files, a dataset on disk or on the Hub, or a stream of these.

Whatever their layout (conversations/layouts.py), rows come out with `images` or `image`, undecoded, `conversations` in
LLaVA's turns, `problem`, `image_folder` and `source`.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowException

from conversations.files import hash_files, sha256
from conversations.layouts import IDENTIFYING, PICTURE_COLUMNS, READ_COLUMNS, READERS, Row, read_row
from conversations.sources import Source, find_source


logger = logging.getLogger(__name__)

# Shards of a stream of rows that are on disk: as many readers can share them evenly.
NUM_SHARDS = 64
# What a row becomes that isn't in LLaVA's layout already. Turns are stored as text, since they may be malformed.
READ_FEATURES = datasets.Features(
    {
        "conversations": datasets.Value("string"),
        "problem": datasets.Value("string"),
        "unread": datasets.List(datasets.Value("string")),
    }
)
PICTURES = datasets.List(datasets.Image(decode=False))


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
        ValueError: if these are not rows, there are none, or there is no such file, folder, split or configuration.
    """
    source = find_source(name)
    if image_folder is not None:
        image_folder = os.path.expanduser(image_folder)
        if not Path(image_folder).is_dir():
            raise ValueError(f"The image folder {image_folder} does not exist.")
    folder = os.path.abspath(image_folder or source.folder)

    try:
        if streaming and source.kind in ("parquet", "dataset"):
            rows = _stream(source, folder, config, split)
        else:
            rows = _standardise(_open(source, config, split), source, folder)
        if next(iter(rows), None) is None:
            raise ValueError("there are no rows.")
    except (ArrowException, DatasetGenerationError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error.__cause__ or error}") from error
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
        return datasets.load_dataset(source.name, config, split=split, features=_common_features(source))
    if source.kind == "saved":
        rows = datasets.load_from_disk(source.name)
    elif source.kind == "parquet":
        files = [str(file) for file in source.files]
        rows = datasets.load_dataset("parquet", data_files=files, split="train", features=_common_features(source))
    else:
        rows = _read_json_files(source)

    splits = rows if isinstance(rows, datasets.DatasetDict) else {"train": rows}
    if config is not None or split not in splits:
        raise ValueError(f"it has the splits {', '.join(splits)} and no configurations, so no {config or split!r}.")
    return splits[split]


def _common_features(source: Source) -> datasets.Features | None:
    """Features that fit all parquet files of a source, where their types differ; else `None`.

    `datasets` takes the first file's types. What is all null or empty there, such as the pictures of a shard without
    any, has no type in that file, and the next one would not fit.
    """
    files = source.files or sorted(Path(source.name).rglob("*.parquet"))
    types: dict[str, pa.DataType] = {}
    is_alike = True
    for file in files:
        for field in pq.read_schema(file):
            before = types.get(field.name, field.type)
            try:
                types[field.name] = _merge_types(before, field.type)
            except TypeError:  # of another configuration or split: `datasets` says it if they are read together
                return None
            is_alike = is_alike and types[field.name] == before == field.type
    if is_alike:
        return None
    return datasets.Features.from_arrow_schema(pa.schema(list(types.items())))


def _merge_types(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds values of both: null fits all, and structs have the fields of both.

    Raises:
        TypeError: if there is none.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if _is_list(one) and _is_list(other):
        return pa.list_(_merge_types(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = _merge_types(fields.get(field.name, field.type), field.type)
        return pa.struct(list(fields.items()))
    raise TypeError(f"{one} and {other}")


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_)


def _read_json_files(source: Source) -> datasets.Dataset:
    """The rows of JSON files, read once for each content of the files and of this code."""
    code = hash_files(Path(__file__).parent, "*.py")
    contents = [sha256(file) for file in source.files]
    key = hashlib.sha256(json.dumps([contents, code]).encode()).hexdigest()
    return datasets.Dataset.from_generator(
        _read_json,
        features=datasets.Features({"images": PICTURES, **READ_FEATURES}),
        gen_kwargs={"names": [str(file) for file in source.files]},
        fingerprint=key,
    )


def _read_json(names: list[str]) -> Iterator[Row]:
    """The rows of JSON files in our layout."""
    for name in names:
        for number, fields in enumerate(_parse_json(Path(name))):
            if not isinstance(fields, dict):
                problem = 'is not a row like {"image": ..., "conversations": [...]}'
                raise ValueError(f"{name}, row {number} {problem}: {json.dumps(fields)[:60]}")
            row = read_row(fields)
            images = [{"bytes": None, "path": _path_of(image)} for image in row["images"]]
            yield {**row, "images": images, "conversations": json.dumps(row["conversations"])}


def _path_of(image: Any) -> str:
    """The path of a picture in a JSON row. What is none becomes text that names no file, so that the row's check
    reports it."""
    if isinstance(image, dict) and isinstance(image.get("path"), str):
        image = image["path"]
    path = image if isinstance(image, str) else f"{str(image)[:80]} (not a path)"
    return path.encode(errors="replace").decode()


def _parse_json(path: Path) -> Iterator[Any]:
    """The rows of a JSON list, of a mapping that holds one list, as in `{"data": [...]}`, or of JSON lines."""
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        yield from json.loads(text)
        return
    rows = _only_list(text)
    if rows is not None:
        yield from rows
        return
    for number, line in enumerate(text.split("\n"), 1):  # strings may contain Unicode line separators
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}. Give a list of rows, or a row on each line.") from None


def _only_list(text: str) -> list[Any] | None:
    """The list of a file that holds one mapping with one list of rows; `None` for JSON lines."""
    try:
        content = json.loads(text)
    except ValueError:  # a second line, or no JSON: said by whoever reads the lines
        return None
    if not isinstance(content, dict) or content.keys() & READERS.keys():
        return None
    for value in content.values():
        if isinstance(value, list) and value and isinstance(value[0], dict) and value[0].keys() & READERS.keys():
            return value
    return None


def _undecoded(feature: Any) -> Any:
    """A feature in which no picture is decoded, however deep it lies."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    return feature


def _undecoded_features(features: datasets.Features) -> datasets.Features:
    """Features of the same columns with undecoded pictures; `image` and `images` become pictures whatever they are."""
    undecoded = {name: _undecoded(feature) for name, feature in features.items()}
    picture = datasets.Image(decode=False)
    for column in PICTURE_COLUMNS:
        if column in features:
            is_list = isinstance(features[column], (datasets.List, datasets.LargeList))
            undecoded[column] = datasets.List(picture) if is_list else picture
    return datasets.Features(undecoded)


def _select(dataset: datasets.Dataset, features: datasets.Features) -> datasets.Dataset:
    """Some columns of a dataset, as these features. Pictures are never rewritten, as they can take 100 GB."""
    dataset = dataset.select_columns(list(features))
    # `Dataset.cast` rewrites all pictures of a list column; casting the table copies none.
    info = dataset.info.copy()
    info.features = features
    return datasets.Dataset(dataset.data.cast(features.arrow_schema), info=info, split=dataset.split)


def _require_turns(features: datasets.Features) -> None:
    if not READERS.keys() & features.keys():
        raise ValueError(
            f"no turns: the columns are {', '.join(features)}, and turns are read from {', '.join(READERS)}. Write "
            "one of these from your own; docs/data.md has an example of each."
        )


def _is_llava(features: datasets.Features) -> bool:
    """Whether the turns of a dataset stand as LLaVA's do, so that there is nothing to read."""
    if READERS.keys() & features.keys() != {"conversations"} or "system" in features:
        return False
    turns = features["conversations"]
    if not isinstance(turns, (datasets.List, datasets.LargeList)) or not isinstance(turns.feature, dict):
        return False
    return set(turns.feature) == {"from", "value"}


def _standardise(dataset: datasets.Dataset, source: Source, image_folder: str) -> datasets.Dataset:
    """A dataset with our columns, pictures undecoded; says what nothing reads."""
    if source.kind == "json":
        unread = _count_names(dataset)
        columns = [dataset.remove_columns("unread")]
    else:
        columns, unread = _read_columns(dataset)
    for field, count in unread.items():
        message = "%s: nothing reads `%s`, which has content in %d of %d rows"
        logger.warning(message, source.name, field, count, len(dataset))

    sources = [f"{source.name}, row {number}" for number in range(len(dataset))]
    names = datasets.Dataset.from_dict({"image_folder": [image_folder] * len(sources), "source": sources})
    return datasets.concatenate_datasets([*columns, names], axis=1)


def _read_columns(dataset: datasets.Dataset) -> tuple[list[datasets.Dataset], Counter[str]]:
    """A dataset's pictures and turns, and the number of rows by name of what nothing reads."""
    _require_turns(dataset.features)
    features = _undecoded_features(dataset.features)
    unread = _count_unread_columns(dataset)
    beside = datasets.Features({name: features[name] for name in PICTURE_COLUMNS if name in features})
    if _is_llava(features):
        llava = datasets.Features({**beside, "conversations": features["conversations"]})
        return [_select(dataset, llava)], unread

    pictures = _select(dataset, beside)
    counts = {name: _count_pictures(pictures.data[name]) for name in beside}
    has_pictures = any(any(column) for column in counts.values())
    turns = _read_turns(dataset, features, counts if has_pictures else {})
    unread += _count_names(turns)
    turns = turns.remove_columns("unread")
    return ([pictures, turns] if has_pictures else [turns]), unread


def _read_turns(
    dataset: datasets.Dataset, features: datasets.Features, counts: dict[str, list[int]]
) -> datasets.Dataset:
    """The turns of a dataset in another layout than LLaVA's, with its pictures if they are inside the messages.

    Args:
        features: The dataset's, with pictures undecoded.
        counts: The number of pictures in each row of the columns that hold some. These stand for the pictures, which
            needn't be loaded. If there are none, pictures inside the messages are copied into datasets' cache folder.
    """
    texts = [name for name in features if name in READ_COLUMNS and name not in PICTURE_COLUMNS]
    table = _select(dataset, datasets.Features({name: features[name] for name in texts}))
    if counts:
        table = datasets.concatenate_datasets([table, datasets.Dataset.from_dict(counts)], axis=1)
    return table.map(
        partial(_read_fields, counted=list(counts)),
        remove_columns=table.column_names,
        features=READ_FEATURES if counts else datasets.Features({"images": PICTURES, **READ_FEATURES}),
        desc="Reading the turns",
    )


def _read_fields(fields: Row, counted: list[str]) -> Row:
    """A row of a dataset, in which the pictures beside the turns stand as their number."""
    for name in counted:
        fields[name] = [_BESIDE] * fields[name]
    row = read_row(fields)
    # Malformed turns stay as they are, and may hold what JSON can't.
    row["conversations"] = json.dumps(row["conversations"], default=lambda value: str(value)[:80])
    if counted:
        inside = [image for image in row.pop("images") if image is not _BESIDE]
        if inside:
            row["problem"] = f"a message holds a picture, though pictures have a column ({' or '.join(counted)})"
    return row


# Stands for a picture that isn't loaded.
_BESIDE = object()


def _count_pictures(column: pa.ChunkedArray) -> list[int]:
    """The number of pictures in each row of a column of pictures, or of lists of pictures."""
    counts: list[int] = []
    for chunk in column.chunks:
        if not _is_list(chunk.type):
            counts += np.array(_content_mask(chunk), dtype=int).tolist()
            continue
        parents = np.array(pc.list_parent_indices(chunk), dtype=int)
        is_picture = np.array(_content_mask(chunk.flatten()), dtype=bool)
        counts += np.bincount(parents[is_picture], minlength=len(chunk)).tolist()
    return counts


def _content_mask(array: pa.Array) -> pa.Array:
    """Which entries of an array have content, as `has_content` says of the values, without loading them."""
    kind = array.type
    if pa.types.is_null(kind):
        return pa.array([False] * len(array))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        has_text = pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(array)), 0)
        return pc.fill_null(has_text, False)
    if pa.types.is_boolean(kind):
        return pc.fill_null(array, False)
    if pa.types.is_floating(kind):
        return pc.fill_null(pc.invert(pc.is_nan(array)), False)
    if _is_list(kind):
        parents = np.array(pc.list_parent_indices(array), dtype=int)
        filled = np.array(_content_mask(array.flatten()), dtype=bool)
        return pa.array(np.bincount(parents[filled], minlength=len(array)) > 0)
    if pa.types.is_struct(kind):
        masks = [np.array(_content_mask(field), dtype=bool) for field in array.flatten()]
        return pa.array(np.any(masks, axis=0) if masks else [False] * len(array))
    return pc.is_valid(array)


def _count_unread_columns(dataset: datasets.Dataset) -> Counter[str]:
    """The number of rows with content by column that no reader uses."""
    counts: Counter[str] = Counter()
    for name in dataset.column_names:
        if name not in READ_COLUMNS and name not in IDENTIFYING:
            for chunk in dataset.data[name].chunks:
                counts[name] += pc.sum(_content_mask(chunk)).as_py() or 0
    return +counts


def _count_names(rows: datasets.Dataset) -> Counter[str]:
    """The number of rows by name in their `unread`."""
    names = pc.list_flatten(rows.data["unread"])
    return Counter({count["values"]: count["counts"] for count in names.value_counts().to_pylist()})


def _stream(source: Source, image_folder: str, config: str | None, split: str) -> datasets.IterableDataset:
    """A stream of a dataset's rows with our columns, pictures undecoded."""
    options: dict[str, Any] = {"streaming": True, "features": _common_features(source)}
    if source.kind == "parquet":
        files = [str(file) for file in source.files]
        rows = datasets.load_dataset("parquet", data_files=files, split="train", **options)
    else:
        rows = datasets.load_dataset(source.name, config, split=split, **options)
    stored = rows.features or rows._resolve_features().features
    _require_turns(stored)
    read = partial(_read_streamed, name=source.name, image_folder=image_folder)
    return rows.cast(_undecoded_features(stored)).map(read, remove_columns=list(stored))


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
