"""Reads datasets of columns, as parquet files and saved datasets hold them, without loading their pictures.

A dataset can hold 100 GB of pictures, so they stay where they are: they are counted and selected in Arrow, and only
turns are written anew, where they don't stand as LLaVA's do.
"""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.errors import UserError
from conversations.layouts import IDENTIFYING, PICTURE_COLUMNS, READ_COLUMNS, Row, read_row
from conversations.sources import Source


# What a row becomes that isn't in LLaVA's layout already. Turns are stored as text, since they may be malformed.
READ_FEATURES = datasets.Features(
    {
        "conversations": datasets.Value("string"),
        "problem": datasets.Value("string"),
        "unread": datasets.List(datasets.Value("string")),
    }
)
PICTURES = datasets.List(datasets.Image(decode=False))
# Stands for a picture in a column of its own, which isn't loaded.
_BESIDE = object()


def read_columns(dataset: datasets.Dataset) -> tuple[list[datasets.Dataset], Counter[str]]:
    """A dataset's pictures and turns, as datasets to be put side by side.

    Returns:
        These datasets, and the number of rows by name of a field that has content and that nothing reads.
    """
    features = undecoded_features(dataset.features)
    unread = _count_unread_columns(dataset)
    picture_features = {name: features[name] for name in PICTURE_COLUMNS if name in features}
    if _has_llava_turns(features):
        read = datasets.Features({**picture_features, "conversations": features["conversations"]})
        return [_select(dataset, read)], unread

    pictures = _select(dataset, datasets.Features(picture_features))
    counts = {name: _count_pictures(pictures.data[name]) for name in picture_features}
    has_pictures = any(any(column) for column in counts.values())
    turns = _read_turns(dataset, features, counts if has_pictures else {})
    unread += count_names(turns)

    turns = turns.remove_columns("unread")
    return ([pictures, turns] if has_pictures else [turns]), unread


def count_names(rows: datasets.Dataset) -> Counter[str]:
    """The number of rows by name in their `unread`."""
    names = pc.list_flatten(rows.data["unread"])
    return Counter({count["values"]: count["counts"] for count in names.value_counts().to_pylist()})


def _count_unread_columns(dataset: datasets.Dataset) -> Counter[str]:
    """The number of rows with content by column that no reader uses."""
    counts: Counter[str] = Counter()
    for name in dataset.column_names:
        if name in READ_COLUMNS or name in IDENTIFYING:
            continue
        num_rows = sum(int(_content_mask(chunk).sum()) for chunk in dataset.data[name].chunks)
        if num_rows:
            counts[name] = num_rows
    return counts


def _has_llava_turns(features: datasets.Features) -> bool:
    """Whether the turns of a dataset stand as LLaVA's do, so that there is nothing to read."""
    columns = READ_COLUMNS & features.keys()
    if columns - set(PICTURE_COLUMNS) != {"conversations"}:
        return False
    turns = features["conversations"]
    if not isinstance(turns, (datasets.List, datasets.LargeList)) or not isinstance(turns.feature, dict):
        return False
    return set(turns.feature) == {"from", "value"}


def _read_turns(
    dataset: datasets.Dataset, features: datasets.Features, counts: dict[str, list[int]]
) -> datasets.Dataset:
    """The turns of a dataset in another layout than LLaVA's, with its pictures if they are inside the messages.

    Args:
        dataset: Has a column of turns.
        features: The dataset's, with pictures undecoded.
        counts: The number of pictures in each row of the columns that hold some. These stand for the pictures, which
            needn't be loaded. If there are none, pictures inside the messages are copied into datasets' cache folder.
    """
    texts = [name for name in features if name in READ_COLUMNS and name not in PICTURE_COLUMNS]
    table = _select(dataset, datasets.Features({name: features[name] for name in texts}))
    read_features = READ_FEATURES
    if counts:
        table = datasets.concatenate_datasets([table, datasets.Dataset.from_dict(counts)], axis=1)
    else:
        read_features = datasets.Features({"images": PICTURES, **READ_FEATURES})
    return table.map(
        partial(_read_fields, counted=list(counts)),
        remove_columns=table.column_names,
        features=read_features,
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


def _count_pictures(column: pa.ChunkedArray) -> list[int]:
    """The number of pictures in each row of a column of pictures, or of lists of pictures."""
    counts: list[int] = []
    for chunk in column.chunks:
        if _is_list(chunk.type):
            counts += _count_in_lists(chunk).tolist()
        else:
            counts += _content_mask(chunk).astype(int).tolist()
    return counts


def _count_in_lists(array: pa.Array) -> np.ndarray:
    """The number of entries with content in each list of an array of lists."""
    list_of_entry = np.array(pc.list_parent_indices(array), dtype=int)
    has_content = _content_mask(array.flatten())
    return np.bincount(list_of_entry[has_content], minlength=len(array))


def _content_mask(array: pa.Array) -> np.ndarray:
    """Which entries of an array have content, as `has_content` says of the values, without loading them."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array), dtype=bool)
    if _is_list(kind):
        return _count_in_lists(array) > 0
    if pa.types.is_struct(kind):
        masks = [_content_mask(field) for field in array.flatten()]
        return np.logical_or.reduce(masks) if masks else np.zeros(len(array), dtype=bool)

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        mask = pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(array)), 0)
    elif pa.types.is_boolean(kind):
        mask = array
    elif pa.types.is_floating(kind):
        mask = pc.invert(pc.is_nan(array))
    else:
        mask = pc.is_valid(array)
    return np.array(pc.fill_null(mask, False), dtype=bool)


def undecoded_features(features: datasets.Features) -> datasets.Features:
    """Features of the same columns with undecoded pictures; `image` and `images` become pictures whatever they are."""
    undecoded = {name: _undecoded(feature) for name, feature in features.items()}
    picture = datasets.Image(decode=False)
    for column in PICTURE_COLUMNS:
        if column in features:
            is_list = isinstance(features[column], (datasets.List, datasets.LargeList))
            undecoded[column] = datasets.List(picture) if is_list else picture
    return datasets.Features(undecoded)


def _undecoded(feature: Any) -> Any:
    """A feature in which no picture is decoded, however deep it lies."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    return feature


def _select(dataset: datasets.Dataset, features: datasets.Features) -> datasets.Dataset:
    """Some columns of a dataset, as these features. Pictures are never rewritten, as they can take 100 GB."""
    dataset = dataset.select_columns(list(features))
    # `Dataset.cast` rewrites all pictures of a list column; casting the table copies none.
    info = dataset.info.copy()
    info.features = features
    return datasets.Dataset(dataset.data.cast(features.arrow_schema), info=info, split=dataset.split)


class _TypesDifferError(Exception):
    """Two files have types in a column that no one type fits."""


def common_features(source: Source) -> datasets.Features | None:
    """Features that fit all parquet files of a source, where their types differ; else `None`.

    `datasets` takes the first file's types. What is all null or empty there, such as the pictures of a shard without
    any, has no type in that file, and the next one would not fit.

    Raises:
        UserError: if a file is no parquet file.
    """
    types: dict[str, pa.DataType] = {}
    do_differ = False
    for file in source.files or sorted(Path(source.name).rglob("*.parquet")):
        for field in _read_schema(file):
            known = types.setdefault(field.name, field.type)
            if field.type == known:
                continue
            do_differ = True
            try:
                types[field.name] = _merge_types(known, field.type)
            except _TypesDifferError:
                # Files of different configurations or splits; if they are read together, `datasets` reports it.
                return None

    if not do_differ:
        return None
    return datasets.Features.from_arrow_schema(pa.schema(list(types.items())))


def _read_schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except pa.ArrowException as error:
        raise UserError(f"{file}: {error}") from error


def _merge_types(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds values of both: null fits all, and structs have the fields of both.

    Raises:
        _TypesDifferError: if there is none.
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
    raise _TypesDifferError


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
