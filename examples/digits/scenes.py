"""Data of the quickstart: scenes of four handwritten digits in colour, captions and questions in LLaVA's layout.

    python examples/digits/scenes.py --output_dir runs/digits/data

The digits are those of scikit-learn (UCI, 8 x 8 pixels). They are split before any scene is made, so no test digit
appears in training.
"""

import argparse
import json
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm


logger = logging.getLogger(__name__)

PLACES = ("northwest", "northeast", "southwest", "southeast")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {"red": (255, 60, 60), "green": (60, 220, 60), "blue": (80, 110, 255), "yellow": (240, 220, 50)}
CELL = 16  # pixels; a scene is two cells wide and high
SCENES = {"train": 4000, "test": 250}
TEXT_ROWS = 6000
QUESTIONS_PER_ROW = 3
QUESTIONS_PER_TEST_SCENE = 4
CHANCE = {"digit": 1 / len(DIGITS), "colour": 1 / len(COLOURS), "both": 1 / (len(DIGITS) * len(COLOURS))}
CAPTION_REQUEST = "Describe the picture."


@dataclass(frozen=True)
class Cell:
    """One digit of a scene: where it stands, its colour, what it is, and which of scikit-learn's pictures it is."""

    place: str
    colour: str
    digit: int
    source: int


Scene = tuple[Cell, ...]


def split_digits() -> dict[str, list[int]]:
    """Numbers of scikit-learn's pictures, four fifths for training and one for testing, stratified by digit."""
    train, test = train_test_split(np.arange(1797), test_size=0.2, random_state=0, stratify=load_digits().target)
    return {"train": train.tolist(), "test": test.tolist()}


def draw_scene(rng: random.Random, sources: list[int], labels: np.ndarray) -> Scene:
    """Four random digits in random colours."""
    chosen = rng.choices(sources, k=len(PLACES))
    return tuple(
        Cell(place, rng.choice(list(COLOURS)), int(labels[source]), source)
        for place, source in zip(PLACES, chosen, strict=True)
    )


def render(scene: Scene, digits: np.ndarray, rng: random.Random) -> Image.Image:
    """The picture of a scene, 32 x 32 pixels: each digit doubled in size, moved by up to two pixels, on black."""
    canvas = np.zeros((2 * CELL, 2 * CELL, 3), dtype=np.float32)
    for index, cell in enumerate(scene):
        ink = Image.fromarray((digits[cell.source] / 16 * 255).astype(np.uint8)).resize((CELL - 2, CELL - 2))
        top, left = CELL * (index // 2) + rng.randint(0, 2), CELL * (index % 2) + rng.randint(0, 2)
        shade = np.asarray(ink, dtype=np.float32)[..., None] / 255  # [14, 14, 1]
        canvas[top : top + CELL - 2, left : left + CELL - 2] = shade * np.array(COLOURS[cell.colour])
    return Image.fromarray(canvas.astype(np.uint8))


def describe(scene: Scene, rng: random.Random) -> str:
    """The scene in words, in random order: what the language model reads instead of a picture."""
    cells = rng.sample(scene, len(scene))
    return "scene: " + ", ".join(f"{cell.place} {cell.colour} {DIGITS[cell.digit]}" for cell in cells) + "."


def caption(scene: Scene) -> str:
    """The scene as a caption, always in the same order."""
    return "picture: " + ", ".join(f"{cell.place} {cell.colour} {DIGITS[cell.digit]}" for cell in scene)


def questions(scene: Scene) -> list[tuple[str, str, str]]:
    """The twelve questions that can be asked of a scene: question, answer, kind of answer."""
    found = []
    for cell in scene:
        found.append((f"which digit is {cell.place}?", DIGITS[cell.digit], "digit"))
        found.append((f"what colour is {cell.place}?", cell.colour, "colour"))
        found.append((f"what is {cell.place}?", f"{cell.colour} {DIGITS[cell.digit]}", "both"))
    return found


def conversation(opening: str, scene: Scene, rng: random.Random) -> list[dict[str, str]]:
    """Some questions and answers in LLaVA's turns; `opening` (a mark or a description) stands before the first."""
    turns = []
    for question, answer, _ in rng.sample(questions(scene), QUESTIONS_PER_ROW):
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    turns[0]["value"] = f"{opening}\n{turns[0]['value']}"
    return turns


def ask(question: str, answer: str) -> list[dict[str, str]]:
    """A question about a picture and its answer in LLaVA's turns."""
    return [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]


def write_data(output_dir: Path) -> None:
    """Write pictures, `stage1.json`, `stage2.json`, `text.json` (for the language model), `test.json`, and the test's
    questions about pictures in LLaVA's layout, `held_out.json`."""
    rng = random.Random(0)
    digits, sources = load_digits(), split_digits()
    scenes: dict[str, list[Scene]] = {}
    for split, count in SCENES.items():
        folder = output_dir / "images" / split
        folder.mkdir(parents=True, exist_ok=True)
        scenes[split] = [draw_scene(rng, sources[split], digits.target) for _ in range(count)]
        for number, scene in enumerate(tqdm(scenes[split], desc=f"Drawing {split} scenes")):
            render(scene, digits.images, rng).save(folder / f"{number:05}.png")

    image = [f"images/train/{number:05}.png" for number in range(SCENES["train"])]
    stage1 = [
        {"id": f"caption-{number}", "image": image[number], "conversations": ask(CAPTION_REQUEST, caption(scene))}
        for number, scene in enumerate(scenes["train"])
    ]
    stage2: list[dict[str, Any]] = [
        {"id": f"image-{number}", "image": image[number], "conversations": conversation("<image>", scene, rng)}
        for number, scene in enumerate(scenes["train"])
    ]
    # LLaVA-NeXT's data mixes in rows without pictures; here they are a sixth.
    for number, scene in enumerate(scenes["train"][: SCENES["train"] // 5]):
        stage2.append({"id": f"text-{number}", "conversations": conversation(describe(scene, rng), scene, rng)})
    text = []
    for number in range(TEXT_ROWS):
        scene = draw_scene(rng, sources["train"], digits.target)
        description = describe(scene, rng)
        turns = conversation(description, scene, rng)
        text.append({"id": number, "description": description, "caption": caption(scene), "conversations": turns})
    test: list[dict[str, Any]] = [
        {
            "image": f"images/test/{number:05}.png",
            "description": describe(scene, rng),
            "questions": [
                {"question": question, "answer": answer, "kind": kind}
                for question, answer, kind in rng.sample(questions(scene), QUESTIONS_PER_TEST_SCENE)
            ],
        }
        for number, scene in enumerate(scenes["test"])
    ]
    held_out = [
        {"image": scene["image"], "conversations": ask(question["question"], question["answer"])}
        for scene in test
        for question in scene["questions"]
    ]
    files = {"stage1": stage1, "stage2": stage2, "text": text, "test": test, "held_out": held_out}
    for name, rows in files.items():
        (output_dir / f"{name}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        logger.info("%s: %d rows", output_dir / f"{name}.json", len(rows))


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    write_data(parser.parse_args().output_dir)


if __name__ == "__main__":
    main()
