"""File helpers: open a user's text file, write atomically, hash, empty a folder, resolve links."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TextIO


# Files of a model's weights, whose fingerprint says which weights a figure is of.
WEIGHT_FILES = "model*.safetensors"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a user's text file as UTF-8, without its byte order mark.

    Raises:
        OSError: if it is missing or can't be read.
        ValueError: if it is a folder, or if the part that is read is not UTF-8.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it.")
    with path.open(encoding="utf-8-sig") as file:
        try:
            if "\0" in file.read(4):  # ASCII text in UTF-16 or UTF-32 without a mark is valid UTF-8
                raise ValueError(f"{path} is not UTF-8, see the null bytes at its start; save it as UTF-8.")
            file.seek(0)
            yield file
        except UnicodeDecodeError as error:
            read = file.buffer.tell()  # type: ignore[attr-defined]
            byte = read - len(error.object) + error.start
            raise ValueError(f"{path} is not UTF-8, see byte {byte}; save it as UTF-8.") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    aside = path.with_suffix(".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


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
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


@lru_cache(maxsize=10_000)
def real_folder(folder: str) -> str:
    """A folder's path with links resolved, cached because many files share it."""
    return os.path.realpath(folder)


def real_file(path: str) -> str:
    """A file's path with links resolved, those of its folders too."""
    folder, name = os.path.split(path)
    return os.path.realpath(path) if os.path.islink(path) else os.path.join(real_folder(folder), name)


def lies_in(path: str, folder: str) -> bool:
    """Whether a path is the folder or inside it; both absolute, without `..`."""
    return path == folder or path.startswith(os.path.join(folder, ""))
