"""Writes and reads the file of results: a line of JSON for each arm, written as soon as the arm is done."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


Figures = dict[str, Any]  # the name of each figure, such as "tokens_per_second", and its value


@dataclass(frozen=True)
class Arm:
    """A configuration that is measured, such as one trainer with its options."""

    name: str
    measure: Callable[[], Figures]
    settings: dict[str, Any] = field(default_factory=dict)
    """All settings that the figures depend on. They are written into the arm's line."""
    compared_with: str | None = None
    """Name of the arm that the table compares this arm with."""


@dataclass(frozen=True)
class Line:
    """A line of the file: an arm with its figures, or with the error that ended it."""

    part: str
    arm: str
    device: str
    """Name of the GPU, or the kind of CPU."""
    commit: str | None
    """Commit of this code; `None` if it is unknown."""
    packages: dict[str, str]
    """The versions of packages, by name."""
    settings: dict[str, Any]
    compared_with: str | None = None
    """Name of the arm that the table compares this arm with."""
    figures: Figures | None = None
    error: str | None = None


def append_line(path: Path, line: Line) -> None:
    """Write a line at the end of the file. If the last line was cut off, the new line doesn't continue it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    was_cut_off = text != "" and not text.endswith("\n")

    with path.open("a", encoding="utf-8") as file:
        if was_cut_off:
            file.write("\n")
        file.write(json.dumps(asdict(line)) + "\n")


def read_lines(path: Path) -> list[Line]:
    """All lines of the file; no lines if there is no file yet. Lines that were cut off are left out."""
    if not path.exists():
        return []

    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            fields = json.loads(text)
        except json.JSONDecodeError:  # cut off; the line's arm will be measured again
            continue
        lines.append(Line(**fields))
    return lines
