"""Writes, empties, checks and hashes files and folders."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from normllava.errors import UserError


# The pattern of the files that hold a model's weights.
WEIGHT_FILES = "model*.safetensors"


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: another process reads either the whole old text or the whole new text."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def let_others_read(folder: Path) -> None:
    """Give the files of a folder the permissions that the user's umask gives to new files.

    safetensors writes files that only their owner can read, whatever the umask.
    """
    umask = os.umask(0)  # the umask can be read only by setting it
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def fresh_folder(path: Path) -> Path:
    """Create an empty folder. A folder that is there already is deleted with all that it holds."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def folder_or_id(name: str) -> str:
    """Check the name of a model, which is a folder or a Hub id, and return the name.

    Raises:
        UserError: if the name is a folder's and the folder doesn't exist. `from_pretrained` would look the name up on
            the Hub.
    """
    path = Path(name)
    num_parts = len(path.parts)
    is_too_long_for_id = num_parts > 2  # a Hub id is "name" or "owner/name"
    is_in_folder = num_parts == 2 and path.parent.is_dir()  # "runs/name", if there is a folder "runs"
    # "./name" and "name/" are folders. `Path` leaves out the "./" and the last "/".
    is_written_as_folder = name != str(path)
    is_folder = is_too_long_for_id or is_in_folder or is_written_as_folder
    if is_folder and not path.exists():
        raise UserError(f"{name}: there is no such folder. It was not looked up on the Hub.")
    return name


def sha256(path: Path) -> str:
    """The SHA-256 hash of a file in hexadecimal. The file is read in pieces, so it may be larger than the memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, *patterns: str) -> dict[str, str]:
    """The SHA-256 hash of each file in a folder that matches one of the patterns, by the file's name."""
    paths: set[Path] = set()
    for pattern in patterns:
        paths.update(folder.glob(pattern))
    return {path.name: sha256(path) for path in sorted(paths) if path.is_file()}


def fingerprint(hashes: Mapping[str, str]) -> str:
    """One hash for several files, made from the files' names and hashes as `hash_files` returns them."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def weights_fingerprint(folder: Path) -> str | None:
    """The fingerprint of the weights in a model's folder. Stored with a result, it says which weights gave the result.

    Returns:
        `None` if the folder holds no files of weights.
    """
    hashes = hash_files(folder, WEIGHT_FILES)
    if not hashes:
        return None
    return fingerprint(hashes)
