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
from conversations.layouts import IDENTIFYING, PICTURE_COLUMNS, READ_COLUMNS, READERS, Row, read_row
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
# Stands for a picture that isn't loaded.
_BESIDE = object()


def read_columns(dataset: datasets.Dataset) -> tuple[list[datasets.Dataset], Counter[str]]:
    """A dataset's pictures and turns, and the number of rows by name of what nothing reads."""
    require_turns(dataset.features)
    features = undecoded_features(dataset.features)
    unread = _count_unread_columns(dataset)
    beside = datasets.Features({name: features[name] for name in PICTURE_COLUMNS if name in features})
    if _is_llava(features):
        llava = datasets.Features({**beside, "conversations": features["conversations"]})
        return [_select(dataset, llava)], unread

    pictures = _select(dataset, beside)
    counts = {name: _count_pictures(pictures.data[name]) for name in beside}
    has_pictures = any(any(column) for column in counts.values())
    turns = _read_turns(dataset, features, counts if has_pictures else {})
    unread += count_names(turns)
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


def count_names(rows: datasets.Dataset) -> Counter[str]:
    """The number of rows by name in their `unread`."""
    names = pc.list_flatten(rows.data["unread"])
    return Counter({count["values"]: count["counts"] for count in names.value_counts().to_pylist()})


def require_turns(features: datasets.Features) -> None:
    """Refuse a dataset that has no column of turns.

    Raises:
        UserError: if it has none; names its columns.
    """
    if not READERS.keys() & features.keys():
        raise UserError(
            f"no turns: the columns are {', '.join(features)}, and turns are read from {', '.join(READERS)}. Write "
            "one of these from your own; docs/data.md has an example of each."
        )


def _is_llava(features: datasets.Features) -> bool:
    """Whether the turns of a dataset stand as LLaVA's do, so that there is nothing to read."""
    columns = READ_COLUMNS & features.keys()
    if columns - set(PICTURE_COLUMNS) != {"conversations"}:
        return False
    turns = features["conversations"]
    if not isinstance(turns, (datasets.List, datasets.LargeList)) or not isinstance(turns.feature, dict):
        return False
    return set(turns.feature) == {"from", "value"}


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


def common_features(source: Source) -> datasets.Features | None:
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
