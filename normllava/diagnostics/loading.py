"""Loads any vision-language model with its processor, and chooses pictures with questions from data."""

import argparse
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
from normllava.conversations.loading import load_rows
from normllava.conversations.pictures import fingerprint, open_images
from normllava.conversations.pixels import to_rgb
from normllava.conversations.rows import BadRowError, Row, check_row, row_turns, to_messages
from normllava.conversations.sources import find_source, holds_dataset_files
from normllava.errors import UserError, errors_named_after
from normllava.inputs import Message
from normllava.parts import DiagnosticsError, complete_processor, find_decoder, image_token_id


logger = logging.getLogger(__name__)

# If this many rows can't be read before the first question is found, the search for questions ends.
MAX_UNREADABLE = 100
# The question about pictures that come without rows, if the user gives no other question.
QUESTION = "Describe this picture."
# Suffixes of picture files. Pillow can't read HEIC (`.heic`, `.heif`). The two suffixes are listed so that a HEIC file
# is reported as unreadable and not ignored in silence.
PICTURE_SUFFIXES = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Question:
    """A question about one or several pictures, as chat messages.

    Attributes:
        source: Name of the question in messages: the file and the row, or the picture's file.
        fingerprint: Fingerprint of the content of the prompt's pictures, which doesn't depend on their paths.
        prompt: Chat messages up to the first answer, with their pictures in RGB.
        answer: The first answer of the row that the question is from; empty if there is none.
    """

    source: str
    fingerprint: str
    prompt: list[Message]
    answer: str = ""

    @property
    def roles_and_texts(self) -> list[tuple[str, list[str]]]:
        """The role and the texts of each message of the prompt, without pictures."""
        return [(message["role"], _find_texts(message["content"])) for message in self.prompt]


def _find_texts(content: list[dict[str, Any]]) -> list[str]:
    """The texts in the content of a message."""
    return [part["text"] for part in content if part["type"] == "text"]


@dataclass(frozen=True)
class Questions:
    """Questions chosen from some data.

    Attributes:
        questions: The questions in the order of the data, each about a different picture.
        passed_over: Number of rows that were skipped because they have no picture before the first answer.
        unreadable: A line for each row that was skipped because it can't be read, with the reason.
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
        dtype: Name of a torch dtype, or `"auto"` for the dtype that the checkpoint was saved in.
        device_map: As in `from_pretrained`; `"auto"` spreads a model over the available devices.
        trust_remote_code: Run the code in the repository; not needed for NormLlava.

    Raises:
        DiagnosticsError: if the model has no image tokens.
        UserError: if the folder holds no model or lacks weights, or if the model needs a package that is missing.
        OSError: if a file is missing, or there is no such model on the Hub.
    """
    processor = load_processor(name, trust_remote_code)
    model = load_pretrained(
        AutoModelForImageTextToText, name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code
    )

    # Called only for the errors that these functions raise if a model can't be measured.
    image_token_id(model)
    find_decoder(model)

    complete_processor(processor, model)
    return model.eval(), processor


def load_processor(name: str, trust_remote_code: bool = False) -> Any:
    """A model's processor, from a folder or the Hub; for a model that takes no pictures, its tokenizer.

    Raises:
        UserError: if the folder holds no processor, or if the processor needs a package that is missing.
        OSError: if there is no such model on the Hub.
    """
    return load_pretrained(AutoProcessor, name, trust_remote_code=trust_remote_code)


def load_pretrained(auto_class: Any, name: str, **options: Any) -> Any:
    """What `auto_class.from_pretrained` returns. An error about a folder's content is one line that names the folder.

    Raises:
        UserError: if the folder can't be loaded, or if the model needs a package that is missing.
        OSError: if a file is missing, or there is no such model on the Hub.
    """
    with errors_named_after(name):
        return auto_class.from_pretrained(name, **options)


def add_arguments(parser: argparse.ArgumentParser, num_samples: int) -> None:
    """Add the options that are the same in all commands that measure models: the data, and how a model is loaded.

    Args:
        parser: The command's parser.
        num_samples: Default of `--num_samples`.
    """
    add = parser.add_argument
    add("--data", required=True, help="pictures and questions, or a folder of pictures")
    add("--image_folder", help="base folder of a JSON file's picture paths (default: the file's folder)")
    add("--split", default="train", help="split of a dataset (default: train)")
    add("--config", help="configuration of a dataset that has several")
    add("--question", help=f"question for the pictures of a folder (default: {QUESTION})")
    add("--num_samples", type=int, default=num_samples, help=f"pictures to measure (default: {num_samples})")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="dtype of the weights")
    add(
        "--device_map",
        default="auto" if torch.cuda.is_available() else None,
        help="device_map of from_pretrained (default: auto on GPUs)",
    )
    add("--trust_remote_code", action="store_true", help="run the code in the repository; not needed for NormLlava")


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of [`load_model`] from the command line's options."""
    return {"dtype": args.dtype, "device_map": args.device_map, "trust_remote_code": args.trust_remote_code}


def read_questions(args: argparse.Namespace) -> Questions:
    """The questions that the command line's options choose.

    Raises:
        UserError: if there are no questions, or if `--question` is given for data that has questions.
    """
    if args.question is not None and find_pictures(Path(args.data)) is None:  # the data is rows
        raise UserError(
            f"--question is not used, because {args.data} holds rows with questions of their own: leave it out."
        )

    return load_questions(
        args.data,
        num_samples=args.num_samples,
        question=args.question or QUESTION,
        image_folder=args.image_folder,
        split=args.split,
        config=args.config,
    )


def load_questions(
    data: str | Path,
    num_samples: int,
    question: str = QUESTION,
    image_folder: str | None = None,
    split: str = "train",
    config: str | None = None,
) -> Questions:
    """Choose questions from rows in any form that training reads, or ask `question` about each of some pictures.

    Args:
        data: Rows, a picture, or a folder of pictures. Pictures in subfolders count, hidden files don't. Rows on the
            Hub are streamed, so that only the rows that are needed are downloaded.
        num_samples: The largest number of questions.
        question: What is asked about pictures without rows.
        image_folder: Base folder of the picture paths in a JSON file; by default the file's folder.
        split: Split of a dataset.
        config: Configuration of a dataset that has several.

    Raises:
        UserError: if there is no such data, or if it has no pictures to ask about.
    """
    paths = find_pictures(Path(data))
    rows: Iterable[Row]
    if paths is None:  # the data is rows
        is_on_hub = not find_source(str(data)).is_local
        rows = load_rows(str(data), image_folder, config, split, streaming=is_on_hub)
    else:
        conversation = [{"from": "human", "value": f"<image>\n{question}"}]
        rows = [{"images": [str(path)], "conversations": conversation, "source": str(path)} for path in paths]
    return take_questions(rows, num_samples, str(data))


def find_pictures(data: Path) -> list[Path] | None:
    """The picture files that `--data` names: one picture, or the pictures of a folder; `None` if it names rows.

    A folder with rows names the rows, even if there are pictures beside them.
    """
    data = data.expanduser()
    if data.is_file():
        return [data] if is_picture(data) else None

    # A path that doesn't exist is the Hub id of a dataset.
    if not data.is_dir():
        return None

    # For `find_source`, a folder is a "dataset" unless it has a JSON file of rows or was written by `save_to_disk`.
    if find_source(str(data)).kind != "dataset":
        return None
    if holds_dataset_files(data):
        return None

    names = iglob("**", root_dir=data, recursive=True)  # without hidden files, which `rglob` would include
    paths = [data / name for name in names]
    return sorted(path for path in paths if is_picture(path))


def is_picture(path: Path) -> bool:
    """Whether a file has the suffix of a picture."""
    return path.suffix.lower() in PICTURE_SUFFIXES


def take_questions(rows: Iterable[Row], num_samples: int, data: str) -> Questions:
    """The questions of the first rows that have a picture before their first answer, each about a different picture.

    Malformed rows, and rows with a broken or missing picture, are skipped with a warning.

    Args:
        rows: The rows to choose from.
        num_samples: The largest number of questions.
        data: Name of the rows in messages.

    Raises:
        DiagnosticsError: if no row can be asked about.
    """
    taken: dict[str, Question] = {}  # by fingerprint of the prompt's pictures
    unreadable: list[str] = []
    passed_over = 0
    num_repeated = 0
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
        elif question.fingerprint in taken:
            num_repeated += 1
        else:
            taken[question.fingerprint] = question

    if num_repeated:
        logger.info(
            "%s: %d rows show the same pictures as a row before, and each picture is asked about once.",
            data,
            num_repeated,
        )

    if not taken:
        about_unreadable = ""
        if unreadable:
            about_unreadable = f" Rows that can't be read: {len(unreadable)}, the first: {unreadable[0]}"
        raise DiagnosticsError(
            f"{data} has no pictures to ask about ({passed_over} rows without one before the first answer). Give "
            f"rows with `image` or `images` and `conversations`, or a folder of pictures.{about_unreadable}"
        )
    return Questions(list(taken.values()), passed_over, unreadable)


def to_question(row: Row) -> Question | None:
    """The question of a row up to its first answer; `None` if there is no picture before the first answer."""
    turns_before_answer = []
    answer = ""
    for turn in row_turns(row):
        if turn["from"] == "gpt":  # the model's turn, an answer
            answer = turn["value"].strip()
            break
        turns_before_answer.append(turn)

    prompt = to_messages({**row, "conversations": turns_before_answer})
    image_parts = []
    for message in prompt:
        image_parts += [part for part in message["content"] if part["type"] == "image"]

    # A row's pictures are in the order of its turns. Pictures after the first answer are left out.
    images = open_images(row)[: len(image_parts)]
    if not images:
        return None

    # `image_parts` are the dictionaries that `prompt` holds, so this puts the pictures into the prompt.
    for part, image in zip(image_parts, images, strict=True):
        part["image"] = image
    return Question(
        source=row["source"],
        fingerprint=fingerprint(images),
        prompt=prompt,
        answer=answer,
    )


def questions_about(pictures: Iterable[Image.Image], question: str, num_samples: int) -> Questions:
    """The same question about each of the first `num_samples` different pictures.

    The pictures are given in memory. In the questions they are in RGB, and oriented as their EXIF data says.

    Raises:
        TypeError: if an entry of `pictures` is no picture.
        DiagnosticsError: if there are no pictures.
    """
    taken: dict[str, Question] = {}  # by fingerprint of the picture
    for number, picture in enumerate(pictures):
        if len(taken) == num_samples:
            break
        if not isinstance(picture, Image.Image):
            raise TypeError(f"entry {number} is no PIL picture: {type(picture).__name__}. Rows are given as a path.")

        image = to_rgb(picture)
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        question_about_image = Question(
            source=f"picture {number}",
            fingerprint=fingerprint([image]),
            prompt=[{"role": "user", "content": content}],
        )
        taken.setdefault(question_about_image.fingerprint, question_about_image)

    if not taken:
        raise DiagnosticsError("There are no pictures to ask about.")
    return Questions(list(taken.values()), passed_over=0, unreadable=[])
