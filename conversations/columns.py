"""Reads datasets that are stored by column, in parquet files and saved datasets, without loading their pictures.

A dataset can hold 100 GB of pictures, so the pictures stay where they are: they are counted and selected in Arrow.
Only the turns are written anew, and only where they aren't in LLaVA's layout already.
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
from datasets.fingerprint import Hasher

from common.errors import UserError
from common.files import hash_files
from conversations.layouts import IDENTIFYING, PICTURE_COLUMNS, READ_COLUMNS, Row, read_row
from conversations.sources import Source


# The columns of rows that were read from another layout than LLaVA's. `conversations` holds the turns as JSON text,
# since malformed turns may have any type.
READ_FEATURES = datasets.Features(
    {
        "conversations": datasets.Value("string"),
        "problem": datasets.Value("string"),
        "unread": datasets.List(datasets.Value("string")),
    }
)
PICTURES = datasets.List(datasets.Image(decode=False))
# Takes the place of a picture that lies in a picture column, while its row's turns are read: the picture isn't loaded.
_PICTURE_IN_COLUMN = object()


def read_columns(dataset: datasets.Dataset) -> tuple[list[datasets.Dataset], Counter[str]]:
    """Read the pictures and turns of a dataset.

    Returns:
        Datasets of the same rows, whose columns are to be put side by side. Then the fields that nothing reads: by
        name of such a field, the number of rows in which it has content.
    """
    features = undecoded_features(dataset.features)
    unread = _count_unread_columns(dataset)
    picture_features = {name: features[name] for name in PICTURE_COLUMNS if name in features}
    if _has_llava_turns(features):
        kept = datasets.Features(picture_features | {"conversations": features["conversations"]})
        return [_select(dataset, kept)], unread

    pictures = _select(dataset, datasets.Features(picture_features))
    picture_counts = {}
    for name in picture_features:
        counts = _count_pictures(pictures.data[name])
        if any(counts):
            picture_counts[name] = counts

    turns = _read_turns(dataset, features, picture_counts)
    unread += count_names(turns)
    turns = turns.remove_columns("unread")
    if picture_counts:
        return [pictures, turns], unread
    return [turns], unread


def count_names(rows: datasets.Dataset) -> Counter[str]:
    """In how many rows the column `unread` lists a name, by name."""
    names = pc.list_flatten(rows.data["unread"])
    return Counter({entry["values"]: entry["counts"] for entry in names.value_counts().to_pylist()})


def _count_unread_columns(dataset: datasets.Dataset) -> Counter[str]:
    """In how many rows a column has content, by column; only columns that nothing reads."""
    counts: Counter[str] = Counter()
    for name in dataset.column_names:
        if name in READ_COLUMNS or name in IDENTIFYING:
            continue
        num_rows = sum(int(_content_mask(chunk).sum()) for chunk in dataset.data[name].chunks)
        if num_rows:
            counts[name] = num_rows
    return counts


def _has_llava_turns(features: datasets.Features) -> bool:
    """Whether the turns of a dataset are in LLaVA's layout already, so that its column can be used as it is."""
    text_columns = (READ_COLUMNS & features.keys()) - set(PICTURE_COLUMNS)
    if text_columns != {"conversations"}:
        return False
    turns = features["conversations"]
    if not isinstance(turns, (datasets.List, datasets.LargeList)) or not isinstance(turns.feature, dict):
        return False
    return set(turns.feature) == {"from", "value"}


def _read_turns(
    dataset: datasets.Dataset, features: datasets.Features, picture_counts: dict[str, list[int]]
) -> datasets.Dataset:
    """Read the turns of a dataset in another layout than LLaVA's.

    Args:
        dataset: A dataset with columns of turns.
        features: The dataset's features, with pictures undecoded.
        picture_counts: The number of pictures in each row, by name of a picture column. Only columns that hold a
            picture are listed. The turns are read with these numbers in place of the pictures, which aren't loaded.

    Returns:
        The columns of `READ_FEATURES`. If no picture column holds a picture, there is a column `images` too: it has
        the pictures that lie inside the messages, which are copied into datasets' cache folder.
    """
    text_columns = [name for name in features if name in READ_COLUMNS and name not in PICTURE_COLUMNS]
    table = _select(dataset, datasets.Features({name: features[name] for name in text_columns}))
    read_features = READ_FEATURES
    if picture_counts:
        table = datasets.concatenate_datasets([table, datasets.Dataset.from_dict(picture_counts)], axis=1)
    else:
        read_features = datasets.Features({"images": PICTURES, **READ_FEATURES})
    code_hashes = hash_files(Path(__file__).parent, "*.py")
    return table.map(
        partial(_read_fields, picture_columns=list(picture_counts)),
        remove_columns=table.column_names,
        features=read_features,
        # datasets' own fingerprint leaves out the code that the function calls, so turns that an earlier version of
        # this package read would be taken from the cache.
        new_fingerprint=Hasher.hash([table._fingerprint, list(picture_counts), code_hashes]),
        desc="Reading the turns",
    )


def _read_fields(fields: Row, picture_columns: list[str]) -> Row:
    """Read a row's fields, among which each picture column holds its number of pictures in place of the pictures."""
    for name in picture_columns:
        num_pictures = fields[name]
        fields[name] = [_PICTURE_IN_COLUMN] * num_pictures

    row = read_row(fields)
    # Malformed turns are kept as they are. They may hold values that JSON can't, such as bytes.
    row["conversations"] = json.dumps(row["conversations"], default=lambda value: str(value)[:80])
    if picture_columns:
        images = row.pop("images")
        if any(image is not _PICTURE_IN_COLUMN for image in images):
            columns = " or ".join(picture_columns)
            row["problem"] = f"a message holds a picture, though pictures have a column ({columns})"
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
    """Whether each entry of an array has content.

    It has the same rules as `has_content`, but doesn't turn the entries into Python values.
    """
    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array), dtype=bool)
    if _is_list(kind):
        return _count_in_lists(array) > 0
    if pa.types.is_struct(kind):
        mask = np.zeros(len(array), dtype=bool)
        for field in array.flatten():
            mask |= _content_mask(field)
        return mask

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        stripped = pc.utf8_trim_whitespace(array)
        entry_has_content = pc.greater(pc.utf8_length(stripped), 0)
    elif pa.types.is_boolean(kind):
        entry_has_content = array
    elif pa.types.is_floating(kind):
        entry_has_content = pc.invert(pc.is_nan(array))
    else:
        entry_has_content = pc.is_valid(array)
    return np.array(pc.fill_null(entry_has_content, False), dtype=bool)


def undecoded_features(features: datasets.Features) -> datasets.Features:
    """The same features, with pictures undecoded. `image` and `images` become pictures, whatever type they had."""
    undecoded = {name: _undecoded(feature) for name, feature in features.items()}
    picture = datasets.Image(decode=False)
    for column in PICTURE_COLUMNS:
        if column in features:
            is_list = isinstance(features[column], (datasets.List, datasets.LargeList))
            undecoded[column] = datasets.List(picture) if is_list else picture
    return datasets.Features(undecoded)


def _undecoded(feature: Any) -> Any:
    """The same feature, with pictures undecoded at any depth inside lists and dicts."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    return feature


def _select(dataset: datasets.Dataset, features: datasets.Features) -> datasets.Dataset:
    """The columns of a dataset that `features` names, cast to these features.

    Pictures are never written anew, since they can take 100 GB.
    """
    dataset = dataset.select_columns(list(features))
    info = dataset.info.copy()
    info.features = features
    # `Dataset.cast` would write all pictures of a list column anew; casting the Arrow table copies no picture.
    table = dataset.data.cast(features.arrow_schema)
    return datasets.Dataset(table, info=info, split=dataset.split)


class _TypesDifferError(Exception):
    """Two files have types in the same column that no single type fits."""


def common_features(source: Source) -> datasets.Features | None:
    """Features that fit all parquet files of a source.

    `datasets` takes the types of the first file. A column that is all null or empty in the first file, such as the
    pictures of a shard of text, has no type there, so the next file would not fit.

    Returns:
        `None` if all files have the same types, or if no features fit them all.

    Raises:
        UserError: if a file is not a parquet file.
    """
    types: dict[str, pa.DataType] = {}
    types_differ = False
    for file in source.files or sorted(Path(source.name).rglob("*.parquet")):
        for field in _read_schema(file):
            known = types.setdefault(field.name, field.type)
            if field.type == known:
                continue
            types_differ = True
            try:
                types[field.name] = _merge_types(known, field.type)
            except _TypesDifferError:
                # The files may belong to different configurations or splits, which aren't read together. If they are
                # read together, `datasets` reports that their types don't fit.
                return None

    if not types_differ:
        return None
    return datasets.Features.from_arrow_schema(pa.schema(list(types.items())))


def _read_schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except pa.ArrowException as error:
        raise UserError(f"{file}: {error}") from error


def _merge_types(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds the values of both types: null fits every type, and structs get the fields of both.

    Raises:
        _TypesDifferError: if there is no such type.
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
