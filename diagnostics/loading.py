"""Load any vision-language model with its processor, and pictures with questions as its inputs."""

import argparse
import hashlib
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
)

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, check_row, row_images, row_turns, to_messages
from diagnostics.parts import (
    NoVisualTokensError,
    decoder_layers,
    image_token_id,
)


logger = logging.getLogger(__name__)

# After so many rows that can't be read at the start, no more are tried.
MAX_UNREADABLE = 100
QUESTION = "Describe this picture."
DATASET_SUFFIXES = (".arrow", ".parquet", ".tar")
PICTURE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
# A chat message: its role, and its content as a list of texts and pictures.
Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A picture with a question, as chat messages.

    Attributes:
        source: Where it comes from, for messages.
        picture: Fingerprint of the content of the prompt's pictures, independent of their paths.
        images: The prompt's pictures, in RGB.
        prompt: Messages up to the first answer.
    """

    source: str
    picture: str
    images: list[Image.Image]
    prompt: list[Message]

    @property
    def text(self) -> str:
        """The words of the last message."""
        return " ".join(part["text"] for part in self.prompt[-1]["content"] if part["type"] == "text").strip()


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
    name: str,
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its processor, from a folder or the Hub.

    Args:
        name: Folder or Hub id.
        dtype: `"auto"` for the checkpoint's own, or torch's name of one.
        device_map: As in `from_pretrained`; `"auto"` spreads a model over the available devices.
        trust_remote_code: Run the code in the repository; not needed for NormLlava.

    Raises:
        NoVisualTokensError: if the model has no visual tokens.
        OSError, ValueError, ImportError: if it can't be loaded, or needs a package that is missing.
    """
    processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    try:
        model = AutoModelForImageTextToText.from_pretrained(
            name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code
        )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = type(AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)).__name__
        raise NoVisualTokensError(
            f"This is not an image-text model: transformers has none with the config {kind}."
        ) from error
    image_token_id(model)
    decoder_layers(model)
    return model.eval(), processor


def add_arguments(parser: argparse.ArgumentParser, num_samples: int) -> None:
    """Options of every command that measures: the data, and how a model is loaded."""
    add = parser.add_argument
    add("--data", required=True, help="pictures and questions, or a folder of pictures")
    add("--image_folder", help="base folder of a JSON file's picture paths (default: the file's folder)")
    add("--split", help="split of a dataset (default: train)")
    add("--question", help=f"question for the pictures of a folder (default: {QUESTION})")
    add("--num_samples", type=int, default=num_samples, help=f"pictures to measure (default: {num_samples})")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="dtype of the weights")
    add("--device_map", default="auto" if torch.cuda.is_available() else None, help="as in from_pretrained")
    add("--trust_remote_code", action="store_true", help="run the code in the repository; not needed for NormLlava")


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of [`load_model`] from the command line."""
    return {name: getattr(args, name) for name in ("dtype", "device_map", "trust_remote_code")}


def read_questions(args: argparse.Namespace) -> Questions:
    """[`load_questions`] with the command line's options; exits with the reason if there are none, or if an option is
    not for such data."""
    if args.num_samples < 1:
        raise SystemExit("--num_samples must be at least 1.")
    is_of_pictures = _is_of_pictures(Path(args.data))
    split = "train" if args.split is None else args.split
    question = QUESTION if args.question is None else args.question
    try:
        chosen = load_questions(args.data, args.num_samples, args.image_folder, split, question)
    except (ValueError, OSError) as error:
        raise SystemExit(f"--data: {error}") from error
    for name in ("image_folder", "split") if is_of_pictures else ("question",):
        if getattr(args, name) is not None:
            kind = "a folder of pictures" if is_of_pictures else "rows with their own questions"
            raise SystemExit(f"--{name} is not used, because {args.data} holds {kind}: leave it out.")
    if chosen.passed_over:
        logger.info("%d rows of %s have no picture and were skipped", chosen.passed_over, args.data)
    if len(chosen.questions) < args.num_samples:
        logger.info("%s has %d different pictures, fewer than --num_samples", args.data, len(chosen.questions))
    return chosen


def load_questions(
    data: str, num_samples: int, image_folder: str | None = None, split: str = "train", question: str = ""
) -> Questions:
    """What [`take_questions`] takes of rows as training reads them, or of a folder of pictures, all asked `question`.

    Pictures in subfolders count too, hidden files don't.
    """
    if not _is_of_pictures(Path(data)):
        return take_questions(load_rows(data, image_folder, split=split), num_samples, data)
    paths = sorted(
        path
        for path in Path(data).rglob("*")
        if path.suffix.lower() in PICTURE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(data).parts)
    )
    return take_questions([picture_row(str(path), question, str(path)) for path in paths], num_samples, data)


def picture_row(image: Any, question: str, source: str) -> Any:
    """The row that asks a question about a picture."""
    turns = [{"from": "human", "value": f"<image>\n{question}"}]
    return {"images": [image], "conversations": turns, "source": source}


def _is_of_pictures(path: Path) -> bool:
    """Whether `--data` is a folder of pictures, and not a dataset, which may hold some too."""
    return path.is_dir() and not any(file.suffix in DATASET_SUFFIXES for file in path.rglob("*"))


def take_questions(rows: Iterable[Row], num_samples: int, data: str) -> Questions:
    """The first rows that have a new picture before their first answer, at most `num_samples`.

    Rows that can't be read, malformed or with a broken or missing picture, are skipped with a warning. Raises
    `NoVisualTokensError`, which names the rows as `data`, if none is left.
    """
    taken: dict[str, Question] = {}  # by fingerprint of the picture
    seen: set[int] = set()  # hashes of the pictures' paths or bytes, so that none is opened twice
    unreadable: list[str] = []
    passed_over = 0
    for row in rows:
        if len(taken) == num_samples or (not taken and len(unreadable) == MAX_UNREADABLE):
            break
        try:
            check_row(row, needs_answer=False)
            files = hash(repr(row_images(row)))
            question = None if files in seen else _to_question(row)
        except BadRowError as error:
            logger.warning("skipped: %s", error)
            unreadable.append(str(error))
            continue
        if question is not None and question.images:
            seen.add(files)
            taken.setdefault(question.picture, question)
        passed_over += question is not None and not question.images
    if not taken:
        reason = f" None can be read; the first: {unreadable[0]}" if unreadable else ""
        raise NoVisualTokensError(
            f"{data} has no pictures to ask about ({passed_over} rows without one before the first answer). Give "
            f"rows with `image` or `images` and `conversations`, or a folder of pictures.{reason}"
        )
    return Questions([*taken.values()], passed_over, unreadable)


def _to_question(row: Row) -> Question:
    before_answer = list(itertools.takewhile(lambda turn: turn["from"] != "gpt", row_turns(row)))
    remaining, prompt = iter(open_images(row)), []
    for message in to_messages({**row, "conversations": before_answer}):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{"type": "image", "image": next(remaining)} if part["type"] == "image" else part for part in parts]
        prompt.append({"role": message["role"], "content": parts})
    images = [part["image"] for message in prompt for part in message["content"] if part["type"] == "image"]
    return Question(row["source"], fingerprint_pictures(images), images, prompt)


def fingerprint_pictures(images: Iterable[Image.Image]) -> str:
    """Hash of the pictures' pixels, independent of file names."""
    seen = hashlib.sha256()
    for image in images:
        rgb = image.convert("RGB")
        seen.update(repr(rgb.size).encode() + rgb.tobytes())
    return seen.hexdigest()[:16]
