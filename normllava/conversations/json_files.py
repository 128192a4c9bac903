"""Reads JSON files of rows into datasets' cache folder, where the next run finds the rows."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from normllava.conversations.columns import PICTURES, READ_FEATURES
from normllava.conversations.layouts import TURN_COLUMNS, Row, read_row
from normllava.conversations.sources import Source
from normllava.errors import UserError
from normllava.files import hash_files, sha256


def read_json_files(source: Source) -> datasets.Dataset:
    """Read the rows of JSON files, or take them from the cache if neither the files nor this package have changed.

    Raises:
        UserError: if a file is not UTF-8 or not JSON, a row is not a mapping, or there are no rows.
    """
    code_hashes = hash_files(Path(__file__).parent, "*.py")
    content_hashes = [sha256(file) for file in source.files]
    all_hashes = json.dumps([content_hashes, code_hashes])
    fingerprint = hashlib.sha256(all_hashes.encode()).hexdigest()
    try:
        return datasets.Dataset.from_generator(
            _read_rows,
            features=datasets.Features({"images": PICTURES, **READ_FEATURES}),
            gen_kwargs={"paths": [str(file) for file in source.files]},
            fingerprint=fingerprint,
        )
    except DatasetGenerationError as error:
        # `datasets` wraps an error that `_read_rows` raises into an error of its own.
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _read_rows(paths: list[str]) -> Iterator[Row]:
    """The rows of JSON files, each read by `read_row`, with the turns as JSON text."""
    num_rows = 0
    for path in paths:
        for number, fields in enumerate(_parse_file(Path(path))):
            if not isinstance(fields, dict):
                problem = 'is not a row like {"image": ..., "conversations": [...]}'
                beginning = json.dumps(fields)[:60]
                raise UserError(f"{path}: row {number} {problem}: {beginning}")

            row = read_row(fields)
            row["images"] = [{"bytes": None, "path": _image_path(image)} for image in row["images"]]
            row["conversations"] = json.dumps(row["conversations"])
            yield row
            num_rows += 1

    if num_rows == 0:
        raise UserError(f"{', '.join(paths)}: there are no rows.")


def _image_path(image: Any) -> str:
    """The path of a picture in a JSON row.

    A value that is not a path becomes a text that names no file, so that `check_row` reports the row.
    """
    path = image.get("path") if isinstance(image, dict) else image
    if not isinstance(path, str):
        path = f"{str(image)[:80]} (not a path)"
    # JSON can hold half of a surrogate pair, which Arrow can't store. Here the half becomes "?".
    return path.encode(errors="replace").decode()


def _parse_file(path: Path) -> Iterable[Any]:
    """The rows of a file: a JSON list, a mapping that holds a list of rows as in `{"data": [...]}`, or JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # UTF-8, with or without a byte-order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}. Save it as UTF-8.") from None

    if text.lstrip().startswith("["):
        return _parse_list(path, text)
    rows = _find_list(path, text)
    if rows is not None:
        return rows
    return _parse_lines(path, text)


def _parse_list(path: Path, text: str) -> list[Any]:
    """The entries of a text that is one JSON list."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}.") from None


def _find_list(path: Path, text: str) -> list[Any] | None:
    """The list of rows in a text that is one JSON mapping; `None` if there is no such list.

    Raises:
        UserError: if there are several.
    """
    try:
        content = json.loads(text)
    except ValueError:  # JSON lines of several rows, or a torn file, which `_parse_lines` reports
        return None
    if not isinstance(content, dict):
        return None
    if _is_row(content):  # a file of JSON lines with a single row, whose list of turns is no list of rows
        return None

    lists = {}
    for name, value in content.items():
        if isinstance(value, list) and value and _is_row(value[0]):
            lists[name] = value
    if len(lists) > 1:
        raise UserError(f"{path} has rows in {', '.join(lists)}: put each list into a file of its own.")
    return next(iter(lists.values()), None)


def _is_row(content: Any) -> bool:
    """Whether a JSON value is a row: a mapping with a field that holds turns."""
    return isinstance(content, dict) and any(name in TURN_COLUMNS for name in content)


def _parse_lines(path: Path, text: str) -> Iterator[Any]:
    """The rows of JSON lines."""
    # `splitlines` would also split at Unicode's other line separators, which JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            advice = "Give a list of rows, or a row on each line."
            raise UserError(f"{path}: line {number}: {error}. {advice}") from None
