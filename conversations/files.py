"""Files: text that people give, read or refused; text that is written whole; hashes, empty folders, links followed."""

import hashlib
import os
import shutil
from functools import lru_cache
from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file that people give, without its byte order mark.

    Raises:
        OSError: if it is missing or can't be read.
        ValueError: if it is a folder, empty, or not UTF-8.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file in it.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8, see byte {error.start}; save it as UTF-8.") from error
    if "\0" in text[:4]:  # UTF-16 or UTF-32 without a mark is UTF-8 to the letter, if its text is English
        raise ValueError(f"{path} is not UTF-8, see the null bytes at its start; save it as UTF-8.")
    if not text or text.isspace():
        raise ValueError(f"{path} is empty.")
    return text


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
