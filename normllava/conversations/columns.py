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

from normllava.conversations.layouts import (
    IDENTIFYING_FIELDS,
    PICTURE_COLUMNS,
    READ_COLUMNS,
    Row,
    names_media,
    read_row,
)
from normllava.conversations.sources import Source
from normllava.errors import UserError
from normllava.files import hash_files


# The columns that `read_row` fills, except `images`. `conversations` holds the turns as JSON text, because malformed
# turns may have any type.
READ_FEATURES = datasets.Features(
    {
        "conversations": datasets.Value("string"),
        "problem": datasets.Value("string"),
        "unread": datasets.List(datasets.Value("string")),
    }
)
# The type of a column that holds a list of undecoded pictures in each row.
PICTURES = datasets.List(datasets.Image(decode=False))
# Stands for a picture of the columns `image` or `images` while a row's turns are read, so that no picture is loaded.
_PICTURE_IN_COLUMN = object()


def read_columns(dataset: datasets.Dataset) -> tuple[list[datasets.Dataset], Counter[str]]:
    """Read the pictures and turns of a dataset.

    Returns:
        - Datasets that each hold some columns of all rows. The caller puts these columns side by side.
        - For each field that nothing reads, the number of rows in which the field has content.
    """
    features = undecoded_features(dataset.features)
    unread = _count_unread_columns(dataset)
    picture_features = {name: features[name] for name in PICTURE_COLUMNS if name in features}
    if _has_llava_turns(features):
        used_features = picture_features | {"conversations": features["conversations"]}
        return [_select(dataset, datasets.Features(used_features))], unread

    pictures = _select(dataset, datasets.Features(picture_features))
    picture_counts = {}  # only of columns that hold a picture
    for name in picture_features:
        counts = _count_pictures(pictures.data[name])
        if any(counts):
            picture_counts[name] = counts

    turns = _read_turns(dataset, features, picture_counts)
    unread += count_unread_fields(turns)
    turns = turns.remove_columns("unread")
    if picture_counts:
        return [pictures, turns], unread
    return [turns], unread  # `turns` has a column with the pictures inside messages


def media_columns(features: datasets.Features) -> list[str]:
    """The columns that nothing reads and that hold pictures, videos or sounds, by their type or by their name."""
    columns = []
    for name, feature in features.items():
        if isinstance(feature, (datasets.List, datasets.LargeList)):
            feature = feature.feature
        is_media = isinstance(feature, (datasets.Image, datasets.Video, datasets.Audio))
        if names_media(name) or (is_media and name not in PICTURE_COLUMNS):
            columns.append(name)
    return columns


def find_media(dataset: datasets.Dataset) -> dict[str, np.ndarray]:
    """Which rows hold unread pictures, videos or sounds.

    Returns:
        For each of `media_columns`, a boolean for each row, `(num_rows,)`.
    """
    masks = {}
    for name in media_columns(dataset.features):
        chunk_masks = [_content_mask(chunk) for chunk in dataset.data[name].chunks]
        masks[name] = np.concatenate(chunk_masks) if chunk_masks else np.zeros(0, dtype=bool)
    return masks


def count_pictures(column_groups: list[datasets.Dataset]) -> np.ndarray:
    """The number of pictures in each row, `(num_rows,)`, of datasets that each hold some columns of all rows."""
    counts = np.zeros(len(column_groups[0]), dtype=int)
    for group in column_groups:
        for name in PICTURE_COLUMNS:
            if name in group.column_names:
                counts += np.array(_count_pictures(group.data[name]), dtype=int)
    return counts


def count_unread_fields(rows: datasets.Dataset) -> Counter[str]:
    """For each field that the column `unread` names, the number of rows that name the field."""
    names = pc.list_flatten(rows.data["unread"])
    counts: Counter[str] = Counter()
    for entry in names.value_counts().to_pylist():  # such as {"values": "caption", "counts": 2}
        counts[entry["values"]] = entry["counts"]
    return counts


def _count_unread_columns(dataset: datasets.Dataset) -> Counter[str]:
    """For each column that nothing reads, the number of rows in which the column has content."""
    counts: Counter[str] = Counter()
    for name in dataset.column_names:
        if name in READ_COLUMNS or name in IDENTIFYING_FIELDS:
            continue
        num_rows = 0
        for chunk in dataset.data[name].chunks:
            num_rows += int(_content_mask(chunk).sum())
        if num_rows > 0:
            counts[name] = num_rows
    return counts


def _has_llava_turns(features: datasets.Features) -> bool:
    """Whether the dataset's column `conversations` has LLaVA's turns, and no other column has text to read."""
    if _text_columns(features) != ["conversations"]:
        return False
    turns = features["conversations"]
    if not isinstance(turns, (datasets.List, datasets.LargeList)):
        return False
    turn = turns.feature
    return isinstance(turn, dict) and set(turn) == {"from", "value"}


def _text_columns(features: datasets.Features) -> list[str]:
    """The columns that are read, except those of pictures."""
    return [name for name in features if name in READ_COLUMNS and name not in PICTURE_COLUMNS]


def _read_turns(
    dataset: datasets.Dataset, features: datasets.Features, picture_counts: dict[str, list[int]]
) -> datasets.Dataset:
    """Read the turns of a dataset in another layout than LLaVA's.

    Args:
        dataset: A dataset with columns of turns.
        features: The dataset's features, with pictures undecoded.
        picture_counts: For each picture column that holds a picture, the number of pictures in each row. The turns are
            read with these numbers in place of the pictures, which aren't loaded.

    Returns:
        The columns of `READ_FEATURES`. If no picture column holds a picture, there is also a column `images` with the
        pictures inside the messages, which are copied into datasets' cache folder.
    """
    text_features = datasets.Features({name: features[name] for name in _text_columns(features)})
    rows_to_read = _select(dataset, text_features)
    if picture_counts:
        read_features = READ_FEATURES
        count_columns = datasets.Dataset.from_dict(picture_counts)
        rows_to_read = datasets.concatenate_datasets([rows_to_read, count_columns], axis=1)
    else:
        read_features = datasets.Features({"images": PICTURES, **READ_FEATURES})

    # datasets' own fingerprint leaves out the code that `_read_fields` calls. With that fingerprint, the cache would
    # return turns as an earlier version of this package read them.
    code_hashes = hash_files(Path(__file__).parent, "*.py")
    fingerprint = Hasher.hash([rows_to_read._fingerprint, list(picture_counts), code_hashes])
    return rows_to_read.map(
        partial(_read_fields, picture_columns=list(picture_counts)),
        remove_columns=rows_to_read.column_names,
        features=read_features,
        cache_file_name=cache_file(f"turns-{fingerprint}"),
        new_fingerprint=fingerprint,
        desc="Reading the turns",
    )


def cache_file(name: str) -> str:
    """The path of a file in datasets' cache folder. By default a saved dataset's own folder would be written to."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "normllava"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"{name}.arrow")


def _read_fields(fields: Row, picture_columns: list[str]) -> Row:
    """Read a row in which each picture column holds the number of its pictures in place of the pictures."""
    for name in picture_columns:
        num_pictures = fields[name]
        fields[name] = [_PICTURE_IN_COLUMN] * num_pictures

    row = read_row(fields)
    # Malformed turns may hold values that JSON can't, such as bytes. The beginning of such a value is kept as text.
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
    """The number of entries with content in each list of an array of lists: int64 of shape `(num_lists,)`."""
    # For each entry of all lists: the number of its list, and whether the entry has content.
    list_numbers = np.array(pc.list_parent_indices(array), dtype=int)
    entry_has_content = _content_mask(array.flatten())
    return np.bincount(list_numbers[entry_has_content], minlength=len(array))


def _content_mask(array: pa.Array) -> np.ndarray:
    """Whether each entry of an array has content: boolean, of shape `(num_entries,)`.

    The rules are those of `has_content` in layouts.py, but the entries aren't turned into Python values.
    """
    arrow_type = array.type
    if pa.types.is_null(arrow_type):
        return np.zeros(len(array), dtype=bool)
    if _is_list(arrow_type):
        return _count_in_lists(array) > 0
    if pa.types.is_struct(arrow_type):
        mask = np.zeros(len(array), dtype=bool)
        for field_values in array.flatten():  # one array for each field of the struct
            mask |= _content_mask(field_values)
        return mask

    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        stripped = pc.utf8_trim_whitespace(array)
        entry_has_content = pc.greater(pc.utf8_length(stripped), 0)
    elif pa.types.is_boolean(arrow_type):
        entry_has_content = array
    elif pa.types.is_floating(arrow_type):
        entry_has_content = pc.invert(pc.is_nan(array))
    else:
        entry_has_content = pc.is_valid(array)
    return np.array(pc.fill_null(entry_has_content, False), dtype=bool)


def undecoded_features(features: datasets.Features) -> datasets.Features:
    """The same features, with pictures, videos and sounds undecoded.

    `image` and `images` become pictures, or lists of pictures.

    Raises:
        UserError: if `image` or `images` holds something that has no picture.
    """
    undecoded = {name: _undecode(feature) for name, feature in features.items()}
    picture = datasets.Image(decode=False)
    for column in PICTURE_COLUMNS:
        if column in features:
            feature = features[column]
            is_list = isinstance(feature, (datasets.List, datasets.LargeList))
            _require_picture(column, feature.feature if is_list else feature)
            undecoded[column] = datasets.List(picture) if is_list else picture
    return datasets.Features(undecoded)


def _require_picture(column: str, feature: Any) -> None:
    """Refuse a type that the cast to pictures would turn into rows without pictures.

    Raises:
        UserError: for mappings with neither a path nor bytes, and for lists.
    """
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        raise UserError(f"The column {column} holds lists of lists: give one list of pictures a row.")
    if isinstance(feature, dict) and not {"path", "bytes"} & feature.keys():
        raise UserError(
            f"The column {column} holds mappings with {', '.join(feature)}: a picture is a path, or a mapping with "
            "path or bytes."
        )


def _undecode(feature: Any) -> Any:
    """The same feature, with pictures, videos and sounds undecoded at any depth inside lists and dicts."""
    if isinstance(feature, (datasets.Image, datasets.Video, datasets.Audio)):
        return type(feature)(decode=False)
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return type(feature)(_undecode(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecode(inner) for name, inner in feature.items()}
    return feature


def _select(dataset: datasets.Dataset, features: datasets.Features) -> datasets.Dataset:
    """The columns of a dataset that `features` names, cast to these features."""
    dataset = dataset.select_columns(list(features))
    info = dataset.info.copy()
    info.features = features
    # `Dataset.cast` would write all pictures of a list column anew, which can take 100 GB. Casting the Arrow table
    # copies no picture.
    table = dataset.data.cast(features.arrow_schema)
    return datasets.Dataset(table, info=info, split=dataset.split)


class _TypesDifferError(Exception):
    """Two files have types in the same column that no single type fits."""


def common_features(source: Source) -> datasets.Features | None:
    """Find features that fit all parquet files of a source, if the types of the files differ.

    By itself, `datasets` takes the types of the first file for all files. If a column of the first file is all null or
    empty, such as the pictures' column in a shard without pictures, the column has no type in this file, and the next
    file doesn't fit.

    Returns:
        The features. `None` if all files have the same types, or if no features fit them all: then `datasets` decides.

    Raises:
        UserError: if a file is not a parquet file.
    """
    types: dict[str, pa.DataType] = {}
    types_differ = False
    for file in parquet_files(source):
        for field in _read_schema(file):
            type_so_far = types.setdefault(field.name, field.type)
            if field.type == type_so_far:
                continue
            types_differ = True
            try:
                types[field.name] = _merge_types(type_so_far, field.type)
            except _TypesDifferError:
                # The files may belong to different configurations or splits, which aren't read together. If they are
                # read together, `datasets` reports that their types don't fit.
                return None

    if not types_differ:
        return None
    return datasets.Features.from_arrow_schema(pa.schema(list(types.items())))


def parquet_files(source: Source) -> list[Path]:
    """The parquet files of a source on this disk. For a Hub id the list is empty."""
    return source.files or sorted(Path(source.name).rglob("*.parquet"))


def _read_schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except pa.ArrowException as error:
        raise UserError(f"{file}: {error}") from error


def _merge_types(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds the values of both types: null fits every type, and structs get the fields of both.

    Raises:
        _TypesDifferError: if no type holds both.
    """
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if _is_list(first) and _is_list(second):
        return pa.list_(_merge_types(first.value_type, second.value_type))
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        fields = {field.name: field.type for field in first}
        for field in second:
            if field.name in fields:
                fields[field.name] = _merge_types(fields[field.name], field.type)
            else:
                fields[field.name] = field.type
        return pa.struct(list(fields.items()))
    raise _TypesDifferError


def _is_list(arrow_type: pa.DataType) -> bool:
    return pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
