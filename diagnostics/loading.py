"""Load any vision-language model with its processor, and pictures with questions."""

import argparse
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from common.errors import UserError
from conversations.loading import load_rows
from conversations.pictures import fingerprint, open_images
from conversations.pixels import to_rgb
from conversations.rows import BadRowError, Row, check_row, row_turns, to_messages
from conversations.sources import DATASET_SUFFIXES, METADATA_FILES, find_source
from diagnostics.parts import DiagnosticsError, find_decoder, image_token_id


logger = logging.getLogger(__name__)

# After so many rows that can't be read at the start, no more are tried.
MAX_UNREADABLE = 100
QUESTION = "Describe this picture."
# Pillow can't read HEIC, and says so for each file; without the suffix they would be passed over.
PICTURE_SUFFIXES = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
# A chat message: its role, and its content as a list of texts and pictures.
Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A picture with a question, as chat messages.

    Attributes:
        source: Where it comes from, for messages.
        picture: Fingerprint of the content of the prompt's pictures, independent of their paths.
        prompt: Messages up to the first answer, with pictures in RGB.
        image: The first picture.
        answer: The row's first answer; empty if it has none.
    """

    source: str
    picture: str
    prompt: list[Message]
    image: Image.Image
    answer: str = ""

    def about(self, image: Image.Image | None) -> list[Message]:
        """The prompt about another picture, or about none."""
        kept = [[part for part in of["content"] if image or part["type"] == "text"] for of in self.prompt]
        shown = [[part if part["type"] == "text" else part | {"image": image} for part in parts] for parts in kept]
        return [of | {"content": parts} for of, parts in zip(self.prompt, shown, strict=True)]


@dataclass(frozen=True)
class Questions:
    """Questions chosen from some data.

    Attributes:
        questions: In order, each about another picture.
        passed_over: Number of skipped rows without a picture.
        unreadable: A line for each skipped row that can't be read, with the reason.
    """

    questions: list[Question]
    passed_over: int
    unreadable: list[str]


def load_model(
    name: str, dtype: str = "auto", device_map: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its processor, from a folder or the Hub.

    Args:
        dtype: `"auto"` for the checkpoint's own, or torch's name of one.
        device_map: As in `from_pretrained`; `"auto"` spreads a model over the available devices.
        trust_remote_code: Run the code in the repository; not needed for NormLlava.

    Raises:
        DiagnosticsError: if the model has no visual tokens.
        OSError, ValueError, ImportError: if it can't be loaded, or needs a package that is missing.
    """
    processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    model = AutoModelForImageTextToText.from_pretrained(
        name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code
    )
    image_token_id(model)
    find_decoder(model)
    return model.eval(), processor


def add_arguments(parser: argparse.ArgumentParser, num_samples: int) -> None:
    """Options of every command that measures: the data, and how a model is loaded."""
    add = parser.add_argument
    add("--data", required=True, help="pictures and questions, or a folder of pictures")
    add("--image_folder", help="base folder of a JSON file's picture paths (default: the file's folder)")
    add("--split", default="train", help="split of a dataset (default: train)")
    add("--question", help=f"question for the pictures of a folder (default: {QUESTION})")
    add("--num_samples", type=int, default=num_samples, help=f"pictures to measure (default: {num_samples})")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="dtype of the weights")
    add("--device_map", default="auto" if torch.cuda.is_available() else None, help="of from_pretrained; auto on GPUs")
    add("--trust_remote_code", action="store_true", help="run the code in the repository; not needed for NormLlava")


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of [`load_model`] from the command line."""
    return {name: getattr(args, name) for name in ("dtype", "device_map", "trust_remote_code")}


def read_questions(args: argparse.Namespace) -> Questions:
    """[`load_questions`] with the command line's options. Raises `UserError` if there are none."""
    if args.question is not None and find_pictures(Path(args.data)) is None:
        raise UserError(f"--question is not used, because {args.data} holds rows with their own: leave it out.")
    try:
        return load_questions(args.data, args.num_samples, args.question or QUESTION, args.image_folder, args.split)
    except (ValueError, OSError) as error:
        raise UserError(f"--data: {error}") from error


def load_questions(
    data: str | Path, num_samples: int, question: str = QUESTION, image_folder: str | None = None, split: str = "train"
) -> Questions:
    """What [`take_questions`] takes of rows as training reads them, or of pictures, all asked `question`.

    `data` may be a picture, or a folder of them; those in subfolders count too, hidden files don't. Data on the Hub is
    read as far as needed.
    """
    paths = find_pictures(Path(data))
    if paths is None:
        on_the_hub = not find_source(str(data)).is_local
        return take_questions(
            load_rows(str(data), image_folder, split=split, streaming=on_the_hub), num_samples, str(data)
        )
    turns = [{"from": "human", "value": f"<image>\n{question}"}]
    rows = ({"images": [str(path)], "conversations": turns, "source": str(path)} for path in paths)
    return take_questions(rows, num_samples, str(data))


def find_pictures(data: Path) -> list[Path] | None:
    """The picture files that `--data` names, itself or in a folder; `None` if it names rows.

    A folder of rows may hold pictures too: beside a JSON file, or inside a dataset.
    """
    data = data.expanduser()
    if data.is_file():
        return [data] if data.suffix.lower() in PICTURE_SUFFIXES else None
    if not data.is_dir() or find_source(str(data)).kind != "dataset":
        return None
    if any(file.suffix in DATASET_SUFFIXES or file.name in METADATA_FILES for file in data.rglob("*")):
        return None

    visible = (data / name for name in iglob("**", root_dir=data, recursive=True))
    return sorted(path for path in visible if path.suffix.lower() in PICTURE_SUFFIXES)


def take_questions(rows: Iterable[Row], num_samples: int, data: str) -> Questions:
    """The first rows that have a new picture before their first answer, at most `num_samples`.

    Rows that can't be read, malformed or with a broken or missing picture, are skipped with a warning. Raises
    `DiagnosticsError`, which names the rows as `data`, if none is left.
    """
    taken: dict[str, Question] = {}  # by fingerprint of the picture
    unreadable: list[str] = []
    passed_over = 0
    for row in rows:
        if len(taken) == num_samples or (not taken and len(unreadable) == MAX_UNREADABLE):
            break
        try:
            check_row(row, needs_answer=False)
            question = _to_question(row)
        except BadRowError as error:
            logger.warning("skipped: %s", error)
            unreadable.append(str(error))
            continue
        if question is None:
            passed_over += 1
        else:
            taken.setdefault(question.picture, question)
    if not taken:
        reason = f" None can be read; the first: {unreadable[0]}" if unreadable else ""
        raise DiagnosticsError(
            f"{data} has no pictures to ask about ({passed_over} rows without one before the first answer). Give "
            f"rows with `image` or `images` and `conversations`, or a folder of pictures.{reason}"
        )
    return Questions([*taken.values()], passed_over, unreadable)


def ask_about(pictures: Iterable[Image.Image], question: str, num_samples: int) -> Questions:
    """The same question about each of the first different pictures in memory, turned as their EXIF says."""
    taken: dict[str, Question] = {}
    for number, picture in enumerate(pictures):
        if len(taken) == num_samples:
            break
        if not isinstance(picture, Image.Image):
            raise TypeError(f"entry {number} is no PIL picture: {type(picture).__name__}. Rows are given as a path.")
        image = to_rgb(picture)
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        asked = Question(f"picture {number}", fingerprint([image]), [{"role": "user", "content": content}], image)
        taken.setdefault(asked.picture, asked)
    if not taken:
        raise DiagnosticsError("There are no pictures to ask about.")
    return Questions([*taken.values()], 0, [])


def _to_question(row: Row) -> Question | None:
    """`None` if there is no picture before the first answer."""
    turns = row_turns(row)
    before_answer = list(itertools.takewhile(lambda turn: turn["from"] != "gpt", turns))
    messages = to_messages({**row, "conversations": before_answer})
    parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
    images = open_images(row)[: len(parts)]
    for part, image in zip(parts, images, strict=True):
        part["image"] = image
    answer = "".join(turn["value"].strip() for turn in turns[len(before_answer) :][:1])
    return Question(row["source"], fingerprint(images), messages, images[0], answer) if images else None
