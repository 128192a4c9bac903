"""Text files that are written whole."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file anew, all of it or nothing."""
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
