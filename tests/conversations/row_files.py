"""Files of rows for tests, good ones and helpers that check them."""

import json
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from PIL import Image as PILImage
from transformers import AutoProcessor

from conversations.measured import RowCheck, keep_good_rows, tokenize_rows
from conversations.tokens import RowTokenizer


def turns(*values: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": value} for number, value in enumerate(values)]


def write_json(folder: Path, rows: list[dict[str, Any]], name: str = "data.json") -> Path:
    (folder / "pictures").mkdir(exist_ok=True)
    PILImage.new("RGB", (8, 6), (1, 2, 3)).save(folder / "pictures" / "a.png")
    PILImage.new("L", (5, 5)).save(folder / "pictures" / "b.png")

    text = json.dumps(rows)
    if name.endswith("l"):
        text = "\n".join(json.dumps(row) for row in rows)
    (folder / name).write_text(text)
    return folder / name


def tokenizer_of(model: Path, **options: Any) -> RowTokenizer:
    processor = AutoProcessor.from_pretrained(model)
    return RowTokenizer(processor, processor.chat_template, **options)


def check_rows(
    rows: Dataset,
    check: RowCheck,
    report_file: Path,
    bad_rows: Literal["error", "skip"] = "error",
    num_proc: int | None = None,
) -> tuple[Dataset, str]:
    return keep_good_rows(rows, tokenize_rows(rows, check, num_proc), bad_rows, report_file)


GOOD_ROWS = [
    {"id": 1, "image": "a.png", "conversations": turns("<image>\nWhat?", "A dog.")},
    {"id": "two", "conversations": turns("Hello.", "Hello to you.")},
    {"id": 3, "image": ["a.png", "b.png"], "conversations": turns("<image> and\n<image>", "Two.", "Sure?", "Yes.")},
]
