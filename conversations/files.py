"""File helpers: write atomically, read a record, hash, empty a folder."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError


# Files of a model's weights, whose fingerprint says which weights a figure is of.
WEIGHT_FILES = "model*.safetensors"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def folder_or_id(name: str) -> str:
    """A model's name. Raises `ValueError` for a missing folder, which `from_pretrained` would look for on the Hub."""
    path = Path(name)
    is_local = len(path.parts) > 2 or (path.parent != Path() and path.parent.is_dir())
    if is_local and not path.exists():
        raise ValueError(f"{name}: there is no such folder. It was not looked up on the Hub.")
    return name


def read_record(kind: Any, path: Path) -> Any:
    """Read a JSON file as a dataclass or a list of them, without fields that it doesn't have. Raises `ValueError` that
    names the file and what is wrong with it."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error}).") from error
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, of['loc']))}: {of['msg']}".removeprefix(": ") for of in error.errors())
        raise ValueError(f"{path}: {'; '.join(problems)}.") from error


def sha256(path: Path) -> str:
    """Hash of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, *patterns: str) -> dict[str, str]:
    """Hashes by name of the files in a folder that match a pattern."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.name: sha256(path) for path in sorted(found)}


def fingerprint(hashes: Mapping[str, str]) -> str:
    """One hash of several files, from their hashes by name."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def weights_fingerprint(folder: Path) -> str | None:
    """Fingerprint of the weights in a folder; `None` if there are none."""
    hashes = hash_files(folder, WEIGHT_FILES)
    return fingerprint(hashes) if hashes else None


def fresh_folder(path: Path) -> Path:
    """Create an empty folder; what was there is deleted."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
