"""Makes the quickstart's data: scenes of four coloured digits, with captions and questions in LLaVA's layout.

    python examples/digits/scenes.py --output_dir runs/digits/data

The digits are scikit-learn's handwritten digits (UCI, 8 x 8 pixels). They are split before any scene is made, so no
test digit appears in training.
"""

import argparse
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
DIGIT_SIZE = CELL - 2  # pixels; a cell has two more, by which a digit can be moved at random
SCENES = {"train": 4000, "test": 250}  # number of scenes by split
TEXT_ROWS = 6000  # rows without pictures, on which pretrain.py trains the language model
QUESTIONS_PER_ROW = 3
QUESTIONS_PER_TEST_SCENE = 4
# The share of right answers that guessing gives, by kind of question.
CHANCE = {"digit": 1 / len(DIGITS), "colour": 1 / len(COLOURS), "both": 1 / (len(DIGITS) * len(COLOURS))}
CAPTION_REQUEST = "Describe the picture."
Row = dict[str, Any]
Turns = list[dict[str, str]]  # the turns of a conversation in LLaVA's layout


@dataclass(frozen=True)
class Cell:
    """A cell of a scene: one digit, with its place and colour."""

    place: str
    colour: str
    digit: int
    source: int
    """Index of the digit's picture in scikit-learn's data."""

    @property
    def words(self) -> str:
        """The colour and the digit, such as "red seven"."""
        return f"{self.colour} {DIGITS[self.digit]}"


Scene = tuple[Cell, ...]


class Question(NamedTuple):
    """A question about a scene, with its answer."""

    question: str
    answer: str
    kind: str
    """A key of `CHANCE`: what the question asks for."""


def write_data(output_dir: Path) -> None:
    """Write the pictures and all rows.

    `stage1.json` has captions, `stage2.json` has conversations, and `text.json` has the language model's texts.
    `test.json` has the test scenes with their questions, and `held_out.json` has the same questions in LLaVA's layout.
    """
    # The calls that take this generator share its random numbers, so another order of calls would give other data.
    rng = random.Random(0)
    train_scenes = make_scenes("train", rng, output_dir)
    test_scenes = make_scenes("test", rng, output_dir)

    captions = caption_rows(train_scenes)
    conversations = conversation_rows(train_scenes, rng)
    texts = text_rows(rng)
    test = question_rows(test_scenes, rng)

    files = {
        "stage1": captions,
        "stage2": conversations,
        "text": texts,
        "test": test,
        "held_out": held_out_rows(test),
    }
    for name, rows in files.items():
        path = output_dir / f"{name}.json"
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        logger.info("%s: %d rows", path, len(rows))


def make_scenes(split: str, rng: random.Random, output_dir: Path) -> list[Scene]:
    """Make the scenes of a split ("train" or "test"), and write their pictures."""
    folder = output_dir / "images" / split
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    sources = split_digits()[split]

    scenes = [make_random_scene(rng, sources, digits.target) for _ in range(SCENES[split])]
    for number, scene in enumerate(tqdm(scenes, desc=f"Drawing {split} scenes")):
        picture = render(scene, digits.images, rng)
        picture.save(output_dir / picture_path(split, number))
    return scenes


def picture_path(split: str, number: int) -> str:
    """The path of a scene's picture, relative to the output folder."""
    return f"images/{split}/{number:05}.png"


def split_digits() -> dict[str, list[int]]:
    """For each split, the indices of its digits' pictures in scikit-learn's data.

    Four fifths of the pictures are for training, and one fifth for testing. Each digit's share of the pictures is the
    same in both splits.
    """
    labels = load_digits().target
    indices = np.arange(len(labels))
    train, test = train_test_split(indices, test_size=0.2, random_state=0, stratify=labels)
    return {"train": train.tolist(), "test": test.tolist()}


def make_random_scene(rng: random.Random, sources: list[int], labels: np.ndarray) -> Scene:
    """A scene of four random digits in random colours.

    Args:
        rng: The generator of random numbers.
        sources: Indices of the pictures that the digits are chosen from, in scikit-learn's data.
        labels: The digit on each of scikit-learn's pictures.
    """
    chosen_sources = rng.choices(sources, k=len(PLACES))
    cells = []
    for place, source in zip(PLACES, chosen_sources, strict=True):
        colour = rng.choice(list(COLOURS))
        cells.append(Cell(place, colour, int(labels[source]), source))
    return tuple(cells)


def render(scene: Scene, digit_images: np.ndarray, rng: random.Random) -> Image.Image:
    """The picture of a scene, 32 x 32 pixels, on a black background.

    Each digit is enlarged from 8 x 8 to 14 x 14 pixels, and moved at random within its cell.

    Args:
        scene: The scene.
        digit_images: Scikit-learn's pictures, `(num_pictures, 8, 8)`, with values from 0 to 16.
        rng: The generator of random numbers.
    """
    canvas = np.zeros((2 * CELL, 2 * CELL, 3), dtype=np.float32)
    for index, cell in enumerate(scene):
        row, column = divmod(index, 2)  # the order of PLACES: the two cells of the upper row, then the lower row
        top = CELL * row + rng.randint(0, CELL - DIGIT_SIZE)
        left = CELL * column + rng.randint(0, CELL - DIGIT_SIZE)

        grey = (digit_images[cell.source] / 16 * 255).astype(np.uint8)  # [8, 8]
        enlarged = Image.fromarray(grey).resize((DIGIT_SIZE, DIGIT_SIZE))
        brightness = np.asarray(enlarged, dtype=np.float32)[..., None] / 255  # [14, 14, 1]
        colour = np.array(COLOURS[cell.colour])  # [3]
        canvas[top : top + DIGIT_SIZE, left : left + DIGIT_SIZE] = brightness * colour
    return Image.fromarray(canvas.astype(np.uint8))


def caption_rows(scenes: Sequence[Scene]) -> list[Row]:
    """The rows of stage 1: each picture with its caption."""
    rows = []
    for number, scene in enumerate(scenes):
        turns = make_picture_turns(CAPTION_REQUEST, make_caption(scene))
        rows.append({"id": f"caption-{number}", "image": picture_path("train", number), "conversations": turns})
    return rows


def conversation_rows(scenes: Sequence[Scene], rng: random.Random) -> list[Row]:
    """The rows of stage 2: conversations about each picture, then conversations about descriptions of some scenes."""
    rows: list[Row] = []
    for number, scene in enumerate(scenes):
        turns = make_conversation("<image>", scene, rng)
        rows.append({"id": f"image-{number}", "image": picture_path("train", number), "conversations": turns})

    # As in LLaVA-NeXT's data, some rows have no picture: here one row for every five rows with a picture.
    num_text_rows = len(scenes) // 5
    for number, scene in enumerate(scenes[:num_text_rows]):
        description = describe(scene, rng)
        turns = make_conversation(description, scene, rng)
        rows.append({"id": f"text-{number}", "conversations": turns})
    return rows


def text_rows(rng: random.Random) -> list[Row]:
    """The rows that train the language model: new scenes, each with a description, a caption and a conversation."""
    labels = load_digits().target
    sources = split_digits()["train"]
    rows = []
    for number in range(TEXT_ROWS):
        scene = make_random_scene(rng, sources, labels)
        description = describe(scene, rng)
        rows.append({
            "id": number,
            "description": description,
            "caption": make_caption(scene),
            "conversations": make_conversation(description, scene, rng),
        })  # fmt: skip
    return rows


def question_rows(scenes: Sequence[Scene], rng: random.Random) -> list[Row]:
    """The rows of the test. Each has a scene as a picture and in words, and questions with their answers and kinds."""
    rows = []
    for number, scene in enumerate(scenes):
        description = describe(scene, rng)
        chosen = rng.sample(make_questions(scene), QUESTIONS_PER_TEST_SCENE)
        rows.append({
            "image": picture_path("test", number),
            "description": description,
            "questions": [question._asdict() for question in chosen],
        })  # fmt: skip
    return rows


def held_out_rows(test: Sequence[Row]) -> list[Row]:
    """The test's questions in LLaVA's layout, one row for each question about a picture."""
    rows = []
    for test_row in test:
        for question in test_row["questions"]:
            turns = make_picture_turns(question["question"], question["answer"])
            rows.append({"image": test_row["image"], "conversations": turns})
    return rows


def describe(scene: Scene, rng: random.Random) -> str:
    """A scene in words, with its digits in random order. The language model reads these words instead of a picture."""
    cells = rng.sample(scene, len(scene))
    return "scene: " + ", ".join(f"{cell.place} {cell.words}" for cell in cells) + "."


def make_caption(scene: Scene) -> str:
    """A scene's caption, in which the digits are always in the order of `PLACES`."""
    return "picture: " + ", ".join(f"{cell.place} {cell.words}" for cell in scene)


def make_questions(scene: Scene) -> list[Question]:
    """All twelve questions about a scene."""
    questions = []
    for cell in scene:
        questions.append(Question(f"which digit is {cell.place}?", DIGITS[cell.digit], "digit"))
        questions.append(Question(f"what colour is {cell.place}?", cell.colour, "colour"))
        questions.append(Question(f"what is {cell.place}?", cell.words, "both"))
    return questions


def make_conversation(opening: str, scene: Scene, rng: random.Random) -> Turns:
    """A few random questions about a scene, with their answers.

    `opening` stands before the first question: LLaVA's mark of a picture, or a description of the scene.
    """
    turns = []
    for question in rng.sample(make_questions(scene), QUESTIONS_PER_ROW):
        turns.append({"from": "human", "value": question.question})
        turns.append({"from": "gpt", "value": question.answer})
    turns[0]["value"] = f"{opening}\n{turns[0]['value']}"
    return turns


def make_picture_turns(question: str, answer: str) -> Turns:
    """A question about a picture, and its answer."""
    return [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder that the data are written to")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Write the data into the folder that the command line names."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_data(build_parser().parse_args(argv).output_dir)


if __name__ == "__main__":
    main()
