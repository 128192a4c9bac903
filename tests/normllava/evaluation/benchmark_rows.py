"""Made-up rows of the nine benchmarks. Their folders have the names of the real datasets, so `datasets` loads them.

The columns are real, as on the datasets' pages and in the harnesses' code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from PIL import Image as PILImage


NUM_ROWS = 12
NUM_MMLU_ROWS = 2  # in each of the 57 subjects
LETTERS = "ABCD"
PICTURE = PILImage.new("RGB", (40, 30))


# Each function makes one row. Rows are numbered from 0. The docstrings say in which rows the answer "A" is right.


def mmbench(number: int) -> dict[str, Any]:
    """Each question has two rows, the second with the options in reversed order. A model has to be right in both.

    The answer "A" is right in both rows of questions 0 and 4, and only in the first row of question 2.
    """
    question = number // 2
    index = question
    options = [f"thing {question} {letter}" for letter in LETTERS]
    is_second_row = number % 2 == 1
    if is_second_row:
        index += 1_000_000  # as MMBench numbers the repetition of a question
        options.reverse()

    is_a_right = number in (0, 1, 4, 8, 9)
    return {
        "index": index, "question": f"Which thing is number {question}?", "hint": "nan",
        "A": options[0], "B": options[1], "C": options[2], "D": options[3], "answer": "A" if is_a_right else "B",
        "category": f"kind {question % 2}", "image": PICTURE, "source": "made up", "L2-category": "all",
        "comment": "nan", "split": "dev",
    }  # fmt: skip


def mmstar(number: int) -> dict[str, Any]:
    """The first 8 rows are of one category, the last 4 of another.

    The answer "A" is right in 6 rows of the first category and in 1 row of the second. The categories differ in size,
    so that the mean of their means is not the mean of all rows.
    """
    if number < 8:
        category = "math"
        finer_category = "geometry"
    else:
        category = "logical reasoning"
        finer_category = "diagram reasoning"
    is_a_right = number in (0, 1, 2, 3, 4, 5, 8)
    return {
        "index": number, "question": f"Question {number}?\nOptions: A: one, B: two, C: three, D: four",
        "image": PICTURE, "answer": "A" if is_a_right else "C", "category": category, "l2_category": finer_category,
        "meta_info": {"source": "made up", "split": "val", "image_path": f"{number}.jpg"},
    }  # fmt: skip


def pope(number: int) -> dict[str, Any]:
    """The answer "A" is never right: answers are yes or no."""
    return {
        "id": str(number), "question_id": str(number), "question": f"Is there a thing {number} in the image?",
        "answer": ("yes", "no")[number % 2], "image_source": f"{number}", "image": PICTURE,
        "category": ("adversarial", "popular", "random")[number % 3],
    }  # fmt: skip


def seedbench(number: int) -> dict[str, Any]:
    """The answer "A" is right in rows 0, 4 and 8."""
    return {
        "data_id": f"{number}.png", "question_id": str(number), "question": f"What does part {number} show?",
        "choice_A": "thing A", "choice_B": "thing B", "choice_C": "thing C", "choice_D": "thing D",
        "answer": LETTERS[number % 4], "question_image_type": ("chart", "map", "web")[number % 3], "image": PICTURE,
    }  # fmt: skip


def ocrbench(number: int) -> dict[str, Any]:
    """The answer "A" is right in row 3, whose right answer is "a": OCRBench ignores case."""
    kinds = ("Regular Text Recognition", "Scene Text-centric VQA", "Key Information Extraction")
    return {
        "dataset": "IIIT5K", "question": "What is written in the image?",
        "question_type": kinds[number % 3], "answer": ["a" if number == 3 else f"{number}"], "image": PICTURE,
    }  # fmt: skip


def scienceqa(number: int) -> dict[str, Any]:
    """The answer "A" is right in rows 0, 3, 6 and 9."""
    return {
        "image": PICTURE, "question": f"Which one is number {number}?", "choices": ["one", "two", "three"],
        "answer": number % 3, "hint": "" if number % 2 else "Look closely.", "task": "closed choice",
        "grade": "grade2", "subject": "natural science", "topic": "physics", "category": "Magnets", "skill": "Look",
        "lecture": "", "solution": "",
    }  # fmt: skip


def ai2d(number: int) -> dict[str, Any]:
    """The answer "A" is right in rows 0, 4 and 8."""
    return {
        "question": f"What is part {number}?", "options": ["root", "leaf", "stem", "flower"],
        "answer": str(number % 4), "image": PICTURE,
    }  # fmt: skip


def hellaswag(number: int) -> dict[str, Any]:
    """The model's answer is the ending that it finds likeliest, so "A" is no answer."""
    return {
        "ind": number, "activity_label": "Cooking", "ctx_a": f"A cook takes {number} eggs.", "ctx_b": "the cook",
        "ctx": f"A cook takes {number} eggs. the cook", "endings": ["fries them.", "flies.", "sings.", "sleeps."],
        "source_id": f"made~{number}", "split": "val", "split_type": "indomain", "label": str(number % 4),
    }  # fmt: skip


def mmlu(number: int) -> dict[str, Any]:
    """The answer "A" is right in the first of a subject's two rows."""
    return {
        "question": f"What is {number} and {number}?", "subject": "made up", "choices": ["0", "1", "2", "3"],
        "answer": number % 4,
    }  # fmt: skip


MakeRow = Callable[[int], dict[str, Any]]

# The benchmarks with pictures, by repository: configuration, split, and the function that makes their rows.
WITH_PICTURES: dict[str, tuple[str, str, MakeRow]] = {
    "lmms-lab-encoder/MMBench": ("en", "dev", mmbench),
    "Lin-Chen/MMStar": ("default", "val", mmstar),
    "lmms-lab-encoder/POPE": ("default", "test", pope),
    "doolayer/SEED-Bench-2-Plus": ("default", "test", seedbench),
    "echo840/OCRBench": ("default", "test", ocrbench),
    "lmms-lab-encoder/ScienceQA": ("ScienceQA-IMG", "test", scienceqa),
    "lmms-lab-encoder/ai2d": ("default", "test", ai2d),
}


def write_all(folder: Path, mmlu_subjects: list[str]) -> None:
    """Write the rows of all nine benchmarks below a folder. Harnesses that are run in this folder find them."""
    for repository, (config, split, make_row) in WITH_PICTURES.items():
        write_repository(folder / repository, [config], [split], make_row)
    write_repository(folder / "Rowan/hellaswag", ["default"], ["train", "validation"], hellaswag)
    write_repository(folder / "cais/mmlu", mmlu_subjects, ["test", "dev"], mmlu, NUM_MMLU_ROWS)


def write_repository(
    folder: Path, configs: list[str], splits: list[str], make_row: MakeRow, count: int = NUM_ROWS
) -> None:
    """Write one dataset: a parquet file for each split of each configuration, and the card that lists the files.

    All files hold the same rows.
    """
    rows = Dataset.from_list([make_row(number) for number in range(count)])
    card_configs = []
    for config in configs:
        (folder / config).mkdir(parents=True)
        data_files = []
        for split in splits:
            path = f"{config}/{split}.parquet"
            rows.to_parquet(folder / path)
            data_files.append({"split": split, "path": path})
        card_configs.append({"config_name": config, "data_files": data_files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(card_configs)}\n---\n")
