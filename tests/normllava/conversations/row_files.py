"""What tests of rows share: good rows, functions that write rows and pictures, and functions that check rows."""

import json
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from PIL import Image as PILImage
from transformers import AutoProcessor

from normllava.conversations.checked_rows import RowCheck, keep_good_rows, tokenize_rows
from normllava.conversations.row_tokenizer import RowTokenizer


# The colour of all pixels of the picture a.png.
COLOUR = (1, 2, 3)


def turns(*texts: str) -> list[dict[str, str]]:
    """LLaVA's turns with these texts: a question, an answer, a question, and so on."""
    llava_turns = []
    for number, text in enumerate(texts):
        role = "human" if number % 2 == 0 else "gpt"
        llava_turns.append({"from": role, "value": text})
    return llava_turns


def write_pictures(folder: Path) -> Path:
    """Write the pictures a.png (8 x 6 pixels of `COLOUR`) and b.png (5 x 5, black), and return their folder."""
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    PILImage.new("RGB", (8, 6), COLOUR).save(pictures / "a.png")
    PILImage.new("L", (5, 5)).save(pictures / "b.png")
    return pictures


def write_json(folder: Path, rows: list[dict[str, Any]], name: str = "data.json") -> Path:
    """Write rows as a JSON list, or as JSON lines if the name ends with ".jsonl", and a folder "pictures" beside them.

    Returns:
        The file of rows.
    """
    write_pictures(folder)
    as_list = json.dumps(rows)
    as_lines = "\n".join(json.dumps(row) for row in rows)
    path = folder / name
    path.write_text(as_lines if name.endswith(".jsonl") else as_list)
    return path


def row_tokenizer(model_folder: Path, **options: Any) -> RowTokenizer:
    """A `RowTokenizer` with a model's processor and chat template, and with these further options."""
    processor = AutoProcessor.from_pretrained(model_folder)
    return RowTokenizer(processor, processor.chat_template, **options)


def check_rows(
    rows: Dataset,
    check: RowCheck,
    report_file: Path,
    bad_rows: Literal["error", "skip"] = "error",
    num_proc: int | None = None,
) -> tuple[Dataset, str]:
    """Check and tokenize rows as training does. The arguments are those of `tokenize_rows` and `keep_good_rows`.

    Returns:
        The good rows with their tokens, and the fingerprint of their content.
    """
    tokens = tokenize_rows(rows, check, num_proc)
    return keep_good_rows(rows, tokens, bad_rows, report_file)


# Rows that a model can be trained on, with 1, 0 and 2 pictures. The ids are numbers and a text, as in some datasets.
GOOD_ROWS = [
    {"id": 1, "image": "a.png", "conversations": turns("<image>\nWhat?", "A dog.")},
    {"id": "two", "conversations": turns("Hello.", "Hello to you.")},
    {"id": 3, "image": ["a.png", "b.png"], "conversations": turns("<image> and\n<image>", "Two.", "Sure?", "Yes.")},
]
