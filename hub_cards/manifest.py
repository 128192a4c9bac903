"""The manifest's name, and what it lists."""

from pathlib import Path


MANIFEST = "manifest.json"


def staged_files(folder: Path) -> list[Path]:
    """All files of a stage folder except the manifest."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
