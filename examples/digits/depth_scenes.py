"""Data of the depth study: the quickstart's scenes with harder questions, split once more for validation.

python examples/digits/depth_scenes.py --output_dir runs/depth/data
"""

import argparse
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import accumulate, permutations
from pathlib import Path

from scenes import (
    CAPTION_REQUEST,
    DIGITS,
    PLACES,
    Cell,
    Scene,
    caption,
    describe,
    draw_scene,
    render,
    split_digits,
)
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm


logger = logging.getLogger(__name__)

TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
NUMBERS = (
    *DIGITS,
    *TEENS,
    *(f"{ten} {digit}".removesuffix(" zero") for ten in ("twenty", "thirty") for digit in DIGITS),
)
ORDER = ", ".join(PLACES)
THRESHOLD = 4
QUESTIONS_PER_ROW = 4
LONG_ROWS = 6  # one row in so many has a text between picture and question
SENTENCES = 12
ADJECTIVES = ("old", "quiet", "small", "heavy", "bright", "early", "narrow", "gentle")
NOUNS = ("river", "window", "garden", "teacher", "letter", "market", "winter", "horse", "road", "kitchen")
VERBS = ("follows", "remembers", "crosses", "leaves", "hears", "keeps", "finds", "carries")


@dataclass(frozen=True)
class Sizes:
    """How many scenes of each kind there are."""

    train: int = 4000
    validation: int = 200
    test: int = 300
    text: int = 16000


@dataclass(frozen=True)
class Asked:
    """A question about a scene."""

    question: str
    answer: str
    kind: str


def ask_digit(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Which digit a cell has."""
    cell = rng.choice(scene)
    return f"which digit is {cell.place}?", DIGITS[cell.digit]


def ask_colour(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Which colour a cell has."""
    cell = rng.choice(scene)
    return f"what colour is {cell.place}?", cell.colour


def ask_both(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Colour and digit of a cell."""
    cell = rng.choice(scene)
    return f"what is {cell.place}?", f"{cell.colour} {DIGITS[cell.digit]}"


def ask_compare(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Whether a digit is larger than another; yes and no equally often, but in scenes of four equal digits."""
    pairs: dict[bool, list[tuple[Cell, Cell]]] = {True: [], False: []}
    for one, other in permutations(scene, 2):
        pairs[one.digit > other.digit].append((one, other))
    larger = rng.random() < 0.5 and bool(pairs[True])
    one, other = rng.choice(pairs[larger])
    return f"is {one.place} larger than {other.place}?", "yes" if larger else "no"


def ask_count(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """How many digits are above four, as running counts in the order of the places."""
    running = accumulate(int(cell.digit > THRESHOLD) for cell in scene)
    return f"count above {DIGITS[THRESHOLD]}: {ORDER}.", " ".join(NUMBERS[number] for number in running)


def ask_sum(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """The sum of the digits, as running sums in the order of the places."""
    return f"add up {ORDER}.", " ".join(NUMBERS[total] for total in accumulate(cell.digit for cell in scene))


def ask_long(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Colour and digit of a cell, behind a text that has nothing to do with it."""
    question, answer = ask_both(scene, rng)
    sentences = (
        f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}."
        for _ in range(SENTENCES)
    )
    return f"{' '.join(sentences)}\n{question}", answer


SHORT: dict[str, Callable[[Scene, random.Random], tuple[str, str]]] = {
    "digit": ask_digit,
    "colour": ask_colour,
    "both": ask_both,
    "compare": ask_compare,
    "count": ask_count,
    "sum": ask_sum,
}
KINDS = (*SHORT, "long")


def ask(kind: str, scene: Scene, rng: random.Random) -> Asked:
    """A question of a kind about a scene."""
    return Asked(*(SHORT | {"long": ask_long})[kind](scene, rng), kind)


def conversation(opening: str, scene: Scene, rng: random.Random) -> list[dict[str, str]]:
    """Questions of different kinds in LLaVA's turns, or a long one; `opening` stands before the first."""
    kinds = ["long"] if rng.randrange(LONG_ROWS) == 0 else rng.sample(list(SHORT), QUESTIONS_PER_ROW)
    turns = []
    for asked in (ask(kind, scene, rng) for kind in kinds):
        turns += [{"from": "human", "value": asked.question}, {"from": "gpt", "value": asked.answer}]
    turns[0]["value"] = f"{opening}\n{turns[0]['value']}"
    return turns


def split_three_ways() -> dict[str, list[int]]:
    """The quickstart's split of scikit-learn's pictures, with its test pictures cut in two, each digit in both."""
    split = split_digits()
    labels = load_digits().target[split["test"]]
    validation, test = train_test_split(split["test"], test_size=0.5, random_state=0, stratify=labels)
    return {"train": split["train"], "validation": validation, "test": test}


def write_data(output_dir: Path, sizes: Sizes = Sizes()) -> None:
    """Write pictures, `stage1.json`, `stage2.json`, `text.json`, and last `validation.json` and `test.json`."""
    rng = random.Random(0)
    digits, sources = load_digits(), split_three_ways()
    scenes: dict[str, list[Scene]] = {}
    for split in sources:
        folder = output_dir / "images" / split
        folder.mkdir(parents=True, exist_ok=True)
        scenes[split] = [draw_scene(rng, sources[split], digits.target) for _ in range(getattr(sizes, split))]
        for number, scene in enumerate(tqdm(scenes[split], desc=f"Drawing {split} scenes")):
            render(scene, digits.images, rng).save(folder / f"{number:05}.png")

    image = [f"images/train/{number:05}.png" for number in range(sizes.train)]
    request = {"from": "human", "value": f"<image>\n{CAPTION_REQUEST}"}
    stage1 = [
        {"image": name, "conversations": [request, {"from": "gpt", "value": caption(scene)}]}
        for name, scene in zip(image, scenes["train"], strict=True)
    ]
    stage2: list[dict[str, object]] = [
        {"image": name, "conversations": conversation("<image>", scene, rng)}
        for name, scene in zip(image, scenes["train"], strict=True)
    ]
    # A sixth of the rows without pictures, as in the quickstart.
    stage2 += [
        {"conversations": conversation(describe(scene, rng), scene, rng)}
        for scene in scenes["train"][: sizes.train // 5]
    ]
    text = []
    for _ in range(sizes.text):
        scene = draw_scene(rng, sources["train"], digits.target)
        description = describe(scene, rng)
        turns = conversation(description, scene, rng)
        text.append({"description": description, "caption": caption(scene), "conversations": turns})
    files: dict[str, list] = {"stage1": stage1, "stage2": stage2, "text": text}
    for split in ("validation", "test"):
        files[split] = [
            {
                "image": f"images/{split}/{number:05}.png",
                "description": describe(scene, rng),
                "digits": [cell.digit for cell in scene],
                "questions": [vars(ask(kind, scene, rng)) for kind in KINDS],
            }
            for number, scene in enumerate(scenes[split])
        ]
    for name, rows in files.items():
        (output_dir / f"{name}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        logger.info("%s: %d rows", output_dir / f"{name}.json", len(rows))


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="scenes")
    args = vars(parser.parse_args())
    write_data(args.pop("output_dir"), Sizes(**args))


if __name__ == "__main__":
    main()
