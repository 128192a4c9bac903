"""The manifest's name, what it lists, and the hash it lists it by."""

import hashlib
from pathlib import Path


MANIFEST = "manifest.json"


def sha256(path: Path) -> str:
    """Hash of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def staged_files(folder: Path) -> list[Path]:
    """All files of a stage folder, the manifest left out."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
