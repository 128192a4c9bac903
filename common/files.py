"""Files and folders: written whole, emptied, looked for, hashed."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from common.errors import UserError


# Files of a model's weights. Their fingerprint tells which weights a figure belongs to.
WEIGHT_FILES = "model*.safetensors"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: whoever reads it meanwhile gets the old text or the new one."""
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def fresh_folder(path: Path) -> Path:
    """Create an empty folder, in place of one that is there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def folder_or_id(name: str) -> str:
    """The name of a model, in a folder or on the Hub.

    Raises:
        UserError: for a missing folder, which `from_pretrained` would look for on the Hub.
    """
    path = Path(name)
    # "owner/name" is a folder's name only where there is a folder "owner".
    is_local = len(path.parts) > 2 or (path.parent != Path() and path.parent.is_dir())
    if is_local and not path.exists():
        raise UserError(f"{name}: there is no such folder. It was not looked up on the Hub.")
    return name


def sha256(path: Path) -> str:
    """Hash of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, *patterns: str) -> dict[str, str]:
    """Hashes by name of the files in a folder that match a pattern."""
    paths: set[Path] = set()
    for pattern in patterns:
        paths |= set(folder.glob(pattern))
    return {path.name: sha256(path) for path in sorted(paths) if path.is_file()}


def fingerprint(hashes: Mapping[str, str]) -> str:
    """One hash of several files, from their hashes by name."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def weights_fingerprint(folder: Path) -> str | None:
    """Fingerprint of the weights in a folder; `None` if there are none."""
    hashes = hash_files(folder, WEIGHT_FILES)
    return fingerprint(hashes) if hashes else None
