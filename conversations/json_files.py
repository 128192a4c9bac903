"""Reads JSON files of rows, each once, into datasets' cache folder."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from common.errors import UserError
from common.files import hash_files, sha256
from conversations.columns import PICTURES, READ_FEATURES
from conversations.layouts import READERS, Row, read_row
from conversations.sources import Source


def read_json_files(source: Source) -> datasets.Dataset:
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
                raise UserError(f"{name}, row {number} {problem}: {json.dumps(fields)[:60]}")
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
                raise UserError(f"line {number}: {error}. Give a list of rows, or a row on each line.") from None


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
