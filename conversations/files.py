"""Files: text that people give, opened or refused; text written whole; hashes, empty folders, links followed."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TextIO


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The text of a file that people give, without its byte order mark, to be read in the `with` block.

    Raises:
        OSError: if it is missing or can't be read.
        ValueError: if it is a folder or, as far as it is read, not UTF-8.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it.")
    with path.open(encoding="utf-8-sig") as file:
        try:
            if "\0" in file.read(4):  # UTF-16 or UTF-32 without a mark is UTF-8 to the letter, if its text is English
                raise ValueError(f"{path} is not UTF-8, see the null bytes at its start; save it as UTF-8.")
            file.seek(0)
            yield file
        except UnicodeDecodeError as error:
            read = file.buffer.tell()  # type: ignore[attr-defined]
            byte = read - len(error.object) + error.start
            raise ValueError(f"{path} is not UTF-8, see byte {byte}; save it as UTF-8.") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file anew, all of it or nothing."""
    aside = path.with_suffix(".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def sha256(path: Path) -> str:
    """Hash of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fresh_folder(path: Path) -> Path:
    """An empty folder, whatever was there."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


@lru_cache(maxsize=10_000)
def real_folder(folder: str) -> str:
    """A folder's path with its links followed, looked up once however many files it holds."""
    return os.path.realpath(folder)


def real_file(path: str) -> str:
    """A file's path with its links and its folders' followed."""
    folder, name = os.path.split(path)
    return os.path.realpath(path) if os.path.islink(path) else os.path.join(real_folder(folder), name)


def lies_in(path: str, folder: str) -> bool:
    """Whether a path is a folder's or begins with it; both absolute, without `..`."""
    return path == folder or path.startswith(os.path.join(folder, ""))
