"""Files of rows for tests, good ones and helpers that check them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from PIL import Image as PILImage

from conversations.checks import BadRowList, StreamCheck
from conversations.measured import keep_good_rows, measure_rows


def turns(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": value} for number, value in enumerate(values)]


def write_json(folder: Path, rows: list[dict[str, Any]], name: str = "data.json") -> Path:
    (folder / "pictures").mkdir(exist_ok=True)
    PILImage.new("RGB", (8, 6), (1, 2, 3)).save(folder / "pictures" / "a.png")
    PILImage.new("L", (5, 5)).save(folder / "pictures" / "b.png")
    text = "\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows)
    (folder / name).write_text(text)
    return folder / name


def one_token(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    return [0], [0]


def check_rows(
    rows: Dataset,
    control_tokens: frozenset[str],
    tokenize: Any,
    bad_rows: Literal["error", "skip"],
    report_file: Path,
    num_proc: int | None = None,
) -> tuple[Dataset, str]:
    measured = measure_rows(rows, control_tokens, tokenize, bad_rows == "skip", num_proc)
    return keep_good_rows(rows, measured, bad_rows, report_file)


def check_stream(
    rows: Iterable[dict[str, Any]],
    control_tokens: frozenset[str],
    tokenize: Any,
    bad_rows: Literal["error", "skip"],
    report_file: Path,
    epochs: int = 1,
) -> Iterator[dict[str, Any]]:
    """The good rows of a stream, which is read that many times."""
    check = StreamCheck(control_tokens, tokenize, bad_rows, BadRowList(report_file))
    for _ in range(epochs):
        yield from (row for row in map(check, rows) if row is not None)


NO_TOKENS: frozenset[str] = frozenset()
GOOD_ROWS = [
    {"id": 1, "image": "a.png", "conversations": turns("<image>\nWhat?", "A dog.")},
    {"id": "two", "conversations": turns("Hello.", "Hello to you.")},
    {"id": 3, "image": ["a.png", "b.png"], "conversations": turns("<image> and\n<image>", "Two.", "Sure?", "Yes.")},
]
