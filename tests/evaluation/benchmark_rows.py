"""Made-up rows of the nine benchmarks, with the columns of the real ones, in folders that `datasets` finds by name.

Sources: the datasets' pages on the Hub, and what the harnesses' own code reads of a row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from PIL import Image as PILImage


NUM_ROWS = 12
LETTERS = "ABCD"
MMLU_ROWS = 2
PICTURE = PILImage.new("RGB", (40, 30))


def mmbench(number: int) -> dict[str, Any]:
    """Each question twice, the second time with its options turned around: both must be answered right.

    "A" is right for questions 0, 2 and 4, and when these are turned for 0 and 4.
    """
    index, turned = number // 2, number % 2
    options = [f"thing {index} {letter}" for letter in LETTERS][:: -1 if turned else 1]
    is_a = index % 4 == 0 or (index == 2 and not turned)
    return {
        "index": index + turned * 1_000_000, "question": f"Which thing is number {index}?", "hint": "nan",
        "answer": "A" if is_a else "B", **dict(zip(LETTERS, options, strict=True)),
        "category": f"kind {index % 2}", "image": PICTURE, "source": "made up", "L2-category": "all",
        "comment": "nan", "split": "dev",
    }  # fmt: skip


def mmstar(number: int) -> dict[str, Any]:
    """Groups of different sizes, so that the mean of their means is not the mean of all rows."""
    group = 0 if number < 8 else 1
    return {
        "index": number, "question": f"Question {number}?\nOptions: A: one, B: two, C: three, D: four",
        "image": PICTURE, "answer": "A" if number in (*range(6), 8) else "C",
        "category": ("math", "logical reasoning")[group], "l2_category": ("geometry", "diagram reasoning")[group],
        "meta_info": {"source": "made up", "split": "val", "image_path": f"{number}.jpg"},
    }  # fmt: skip


def pope(number: int) -> dict[str, Any]:
    return {
        "id": str(number), "question_id": str(number), "question": f"Is there a thing {number} in the image?",
        "answer": ("yes", "no")[number % 2], "image_source": f"{number}", "image": PICTURE,
        "category": ("adversarial", "popular", "random")[number % 3],
    }  # fmt: skip


def seedbench(number: int) -> dict[str, Any]:
    return {
        "data_id": f"{number}.png", "question_id": str(number), "question": f"What does part {number} show?",
        **{f"choice_{letter}": f"thing {letter}" for letter in LETTERS}, "answer": LETTERS[number % 4],
        "question_image_type": ("chart", "map", "web")[number % 3], "image": PICTURE,
    }  # fmt: skip


def ocrbench(number: int) -> dict[str, Any]:
    kinds = ("Regular Text Recognition", "Scene Text-centric VQA", "Key Information Extraction")
    return {
        "dataset": "IIIT5K", "question": "What is written in the image?",
        "question_type": kinds[number % 3], "answer": ["a" if number == 3 else f"{number}"], "image": PICTURE,
    }  # fmt: skip


def scienceqa(number: int) -> dict[str, Any]:
    return {
        "image": PICTURE, "question": f"Which one is number {number}?", "choices": ["one", "two", "three"],
        "answer": number % 3, "hint": "" if number % 2 else "Look closely.", "task": "closed choice",
        "grade": "grade2", "subject": "natural science", "topic": "physics", "category": "Magnets", "skill": "Look",
        "lecture": "", "solution": "",
    }  # fmt: skip


def ai2d(number: int) -> dict[str, Any]:
    return {
        "question": f"What is part {number}?", "options": ["root", "leaf", "stem", "flower"],
        "answer": str(number % 4), "image": PICTURE,
    }  # fmt: skip


def hellaswag(number: int) -> dict[str, Any]:
    return {
        "ind": number, "activity_label": "Cooking", "ctx_a": f"A cook takes {number} eggs.", "ctx_b": "the cook",
        "ctx": f"A cook takes {number} eggs. the cook", "endings": ["fries them.", "flies.", "sings.", "sleeps."],
        "source_id": f"made~{number}", "split": "val", "split_type": "indomain", "label": str(number % 4),
    }  # fmt: skip


def mmlu(number: int) -> dict[str, Any]:
    return {
        "question": f"What is {number} and {number}?", "subject": "made up", "choices": ["0", "1", "2", "3"],
        "answer": number % 4,
    }  # fmt: skip


# By repository: configuration, split, and what makes a row.
MakeRow = Callable[[int], dict[str, Any]]
PICTURES: dict[str, tuple[str, str, MakeRow]] = {
    "lmms-lab-encoder/MMBench": ("en", "dev", mmbench),
    "Lin-Chen/MMStar": ("default", "val", mmstar),
    "lmms-lab-encoder/POPE": ("default", "test", pope),
    "doolayer/SEED-Bench-2-Plus": ("default", "test", seedbench),
    "echo840/OCRBench": ("default", "test", ocrbench),
    "lmms-lab-encoder/ScienceQA": ("ScienceQA-IMG", "test", scienceqa),
    "lmms-lab-encoder/ai2d": ("default", "test", ai2d),
}


def write_all(folder: Path, mmlu_subjects: list[str]) -> None:
    """Write the rows of all nine below `folder`, from which the harnesses are then to be run."""
    for repository, (config, split, make) in PICTURES.items():
        write(folder / repository, [config], [split], make)
    write(folder / "Rowan/hellaswag", ["default"], ["train", "validation"], hellaswag)
    write(folder / "cais/mmlu", mmlu_subjects, ["test", "dev"], mmlu, MMLU_ROWS)


def write(folder: Path, configs: list[str], splits: list[str], make: MakeRow, count: int = NUM_ROWS) -> None:
    """One repository's parquet files, and the card that names their configurations and splits."""
    rows, card = Dataset.from_list([make(number) for number in range(count)]), []
    for config in configs:
        files = [{"split": split, "path": f"{config}/{split}.parquet"} for split in splits]
        card.append({"config_name": config, "data_files": files})
        for file in files:
            (folder / config).mkdir(parents=True, exist_ok=True)
            rows.to_parquet(folder / file["path"])
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(card)}\n---\n")
