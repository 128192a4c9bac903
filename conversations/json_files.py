"""Reads JSON files of rows, each once, into datasets' cache folder."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from common.errors import UserError
from common.files import hash_files, sha256
from conversations.columns import PICTURES, READ_FEATURES
from conversations.layouts import READERS, Row, read_row
from conversations.sources import Source


def read_json_files(source: Source) -> datasets.Dataset:
    """The rows of JSON files, read once for each content of the files and of this code.

    Raises:
        UserError: if a file is not UTF-8 or not JSON, a row is no mapping, or there are no rows.
    """
    code = hash_files(Path(__file__).parent, "*.py")
    contents = [sha256(file) for file in source.files]
    key = hashlib.sha256(json.dumps([contents, code]).encode()).hexdigest()
    try:
        return datasets.Dataset.from_generator(
            _read_rows,
            features=datasets.Features({"images": PICTURES, **READ_FEATURES}),
            gen_kwargs={"names": [str(file) for file in source.files]},
            fingerprint=key,
        )
    except DatasetGenerationError as error:
        # `datasets` wraps what `_read_rows` raises.
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _read_rows(names: list[str]) -> Iterator[Row]:
    """The rows of JSON files in our layout."""
    count = 0
    for name in names:
        for number, fields in enumerate(_parse_file(Path(name))):
            if not isinstance(fields, dict):
                problem = 'is not a row like {"image": ..., "conversations": [...]}'
                raise UserError(f"{name}: row {number} {problem}: {json.dumps(fields)[:60]}")

            row = read_row(fields)
            row["images"] = [{"bytes": None, "path": _image_path(image)} for image in row["images"]]
            row["conversations"] = json.dumps(row["conversations"])
            yield row
            count += 1

    if count == 0:
        raise UserError(f"{', '.join(names)}: there are no rows.")


def _image_path(image: Any) -> str:
    """The path of a picture in a JSON row.

    What is none becomes text that names no file, so that the row's check reports it.
    """
    if isinstance(image, dict) and isinstance(image.get("path"), str):
        image = image["path"]
    path = image if isinstance(image, str) else f"{str(image)[:80]} (not a path)"
    return path.encode(errors="replace").decode()  # Arrow holds no half of a surrogate pair


def _parse_file(path: Path) -> Iterable[Any]:
    """The rows of a JSON list, of a mapping that holds one list, as in `{"data": [...]}`, or of JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}. Save it as UTF-8.") from None

    if text.lstrip().startswith("["):
        return _parse_list(path, text)
    rows = _find_list(text)
    return _parse_lines(path, text) if rows is None else rows


def _parse_list(path: Path, text: str) -> list[Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}.") from None


def _find_list(text: str) -> list[Any] | None:
    """The first list of rows in a file of one mapping; `None` if there is none, as in JSON lines."""
    try:
        content = json.loads(text)
    except ValueError:  # a second line, or no JSON, which reading the lines reports
        return None
    if not isinstance(content, dict) or content.keys() & READERS.keys():
        return None

    for value in content.values():
        if isinstance(value, list) and value and isinstance(value[0], dict) and value[0].keys() & READERS.keys():
            return value
    return None


def _parse_lines(path: Path, text: str) -> Iterator[Any]:
    """The rows of JSON lines. Strings may contain Unicode's other line separators."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            advice = "Give a list of rows, or a row on each line."
            raise UserError(f"{path}: line {number}: {error}. {advice}") from None
