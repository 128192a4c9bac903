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

    def about(self, image: Image.Image) -> list[Message]:
        """The prompt with another picture in the place of each of its own."""
        return [{**message, "content": _show(message["content"], image)} for message in self.prompt]

    @property
    def texts(self) -> list[tuple[str, list[str]]]:
        """The prompt without its pictures: role and texts of each message."""
        return [(message["role"], _texts(message["content"])) for message in self.prompt]


def _show(content: list[dict[str, Any]], image: Image.Image) -> list[dict[str, Any]]:
    return [{**part, "image": image} if part["type"] == "image" else part for part in content]


def _texts(content: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for part in content if part["type"] == "text"]


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
        name: The folder or Hub id.
        dtype: `"auto"` for the checkpoint's own, or torch's name of one.
        device_map: As in `from_pretrained`; `"auto"` spreads a model over the available devices.
        trust_remote_code: Run the code in the repository; not needed for NormLlava.

    Raises:
        DiagnosticsError: if the model has no image tokens.
        UserError: if the folder holds no model, not all of its weights, or needs a package that is missing.
        OSError: if a file is missing, or there is no such model on the Hub.
    """
    processor = load_processor(name, trust_remote_code)
    model = load_pretrained(
        AutoModelForImageTextToText, name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code
    )

    # Raise here, before a model that can't be measured is asked anything.
    image_token_id(model)
    find_decoder(model)

    return model.eval(), processor


def load_processor(name: str, trust_remote_code: bool = False) -> Any:
    """A model's processor, from a folder or the Hub; its tokenizer, if it takes no pictures.

    Raises:
        UserError: if the folder holds none, or one that needs a package that is missing.
        OSError: if there is no such model on the Hub.
    """
    return load_pretrained(AutoProcessor, name, trust_remote_code=trust_remote_code)


def load_pretrained(auto_class: Any, name: str, **options: Any) -> Any:
    """`auto_class.from_pretrained`, whose errors about what the folder holds become one line that names the folder.

    Raises:
        UserError: if the folder can't be loaded, or needs a package that is missing.
        OSError: if a file is missing, or there is no such model on the Hub.
    """
    try:
        return auto_class.from_pretrained(name, **options)
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name} can't be loaded: {reason}") from error


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
    return {"dtype": args.dtype, "device_map": args.device_map, "trust_remote_code": args.trust_remote_code}


def read_questions(args: argparse.Namespace) -> Questions:
    """[`load_questions`] with the command line's options.

    Raises:
        UserError: if there are none, or `--question` has no use.
    """
    if args.question is not None and find_pictures(Path(args.data)) is None:
        raise UserError(f"--question is not used, because {args.data} holds rows with their own: leave it out.")

    return load_questions(
        args.data,
        num_samples=args.num_samples,
        question=args.question or QUESTION,
        image_folder=args.image_folder,
        split=args.split,
    )


def load_questions(
    data: str | Path, num_samples: int, question: str = QUESTION, image_folder: str | None = None, split: str = "train"
) -> Questions:
    """What [`take_questions`] takes of rows as training reads them, or of pictures, all asked `question`.

    `data` may be a picture, or a folder of them; those in subfolders count too, hidden files don't. Data on the Hub is
    read as far as needed.

    Raises:
        UserError: if there is no such data, or nothing in it can be asked about.
    """
    paths = find_pictures(Path(data))
    rows: Iterable[Row]
    if paths is None:
        is_on_hub = not find_source(str(data)).is_local
        rows = load_rows(str(data), image_folder, split=split, streaming=is_on_hub)
    else:
        turns = [{"from": "human", "value": f"<image>\n{question}"}]
        rows = [{"images": [str(path)], "conversations": turns, "source": str(path)} for path in paths]
    return take_questions(rows, num_samples, str(data))


def find_pictures(data: Path) -> list[Path] | None:
    """The picture files that `--data` names, itself or in a folder; `None` if it names rows.

    A folder of rows may hold pictures too: beside a JSON file, or inside a dataset.
    """
    data = data.expanduser()
    if data.is_file():
        return [data] if is_picture(data) else None
    if not data.is_dir() or find_source(str(data)).kind != "dataset":
        return None
    for file in data.rglob("*"):
        if file.suffix in DATASET_SUFFIXES or file.name in METADATA_FILES:
            return None

    visible = [data / name for name in iglob("**", root_dir=data, recursive=True)]
    return sorted(path for path in visible if is_picture(path))


def is_picture(path: Path) -> bool:
    """Whether a file's name is that of a picture."""
    return path.suffix.lower() in PICTURE_SUFFIXES


def take_questions(rows: Iterable[Row], num_samples: int, data: str) -> Questions:
    """The first rows that have a new picture before their first answer, at most `num_samples`.

    Rows that can't be read, malformed or with a broken or missing picture, are skipped with a warning.

    Raises:
        DiagnosticsError: if none is left; the message names the rows as `data`.
    """
    taken: dict[str, Question] = {}  # by fingerprint of the picture
    unreadable: list[str] = []
    passed_over = 0
    for row in rows:
        if len(taken) == num_samples:
            break
        if not taken and len(unreadable) == MAX_UNREADABLE:
            break

        try:
            check_row(row, needs_answer=False)
            question = to_question(row)
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
    return Questions(list(taken.values()), passed_over, unreadable)


def to_question(row: Row) -> Question | None:
    """A row up to its first answer; `None` if there is no picture before it."""
    turns = row_turns(row)
    asked = list(itertools.takewhile(lambda turn: turn["from"] != "gpt", turns))
    answer = turns[len(asked)]["value"].strip() if len(asked) < len(turns) else ""

    prompt = to_messages({**row, "conversations": asked})
    places = [part for message in prompt for part in message["content"] if part["type"] == "image"]
    images = open_images(row)[: len(places)]
    if not images:
        return None

    for place, image in zip(places, images, strict=True):
        place["image"] = image
    return Question(row["source"], fingerprint(images), prompt, images[0], answer)


def questions_about(pictures: Iterable[Image.Image], question: str, num_samples: int) -> Questions:
    """The same question about each of the first different pictures in memory, turned as their EXIF says.

    Raises:
        TypeError: if one is no picture.
        DiagnosticsError: if there are none.
    """
    taken: dict[str, Question] = {}  # by fingerprint of the picture
    for number, picture in enumerate(pictures):
        if len(taken) == num_samples:
            break
        if not isinstance(picture, Image.Image):
            raise TypeError(f"entry {number} is no PIL picture: {type(picture).__name__}. Rows are given as a path.")

        image = to_rgb(picture)
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        prompt = [{"role": "user", "content": content}]
        asked = Question(f"picture {number}", fingerprint([image]), prompt, image)
        taken.setdefault(asked.picture, asked)

    if not taken:
        raise DiagnosticsError("There are no pictures to ask about.")
    return Questions(list(taken.values()), passed_over=0, unreadable=[])
