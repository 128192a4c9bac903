"""Logs what a run does before its first step, which takes minutes with a large model or much data."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


logger = logging.getLogger(__name__)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Log what begins, and how long it took."""
    started = time.monotonic()
    logger.info("%s ...", what)
    yield
    logger.info("    done in %.1f s", time.monotonic() - started)


def with_size(name: str, pattern: str = "*") -> str:
    """A name, with its size if it is a local file, or a folder with files that match the pattern."""
    path = Path(name)
    files: Iterable[Path] = path.rglob(pattern) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    if not size:
        return name
    return f"{name} ({size / 1e9:,.1f} GB)" if size >= 1e8 else f"{name} ({size / 1e6:,.1f} MB)"
