"""Any vision-language model with its processor, and pictures with questions as its inputs."""

import argparse
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedModel,
)

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from conversations.checks import row_problem
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import BadRowError, Row, row_turns, to_messages
from diagnostics.parts import ENCODERS, PROJECTORS, NoVisualTokensError, image_token_id


logger = logging.getLogger(__name__)

PICTURE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class Part(TypedDict, total=False):
    """A piece of a chat message: a text, or a picture."""

    type: Required[Literal["text", "image"]]
    text: str
    image: Image.Image


class Message(TypedDict):
    """A chat message."""

    role: str
    content: list[Part]


@dataclass(frozen=True)
class Question:
    """A picture with a question, as chat messages.

    Attributes:
        source: Where it comes from, for messages to people.
        images: The prompt's pictures, in RGB.
        prompt: Messages up to the first answer.
        conversation: All messages.
    """

    source: str
    images: list[Image.Image]
    prompt: list[Message]
    conversation: list[Message]


class ModelOptions(TypedDict, total=False):
    """Options of [`load_model`]."""

    dtype: str
    device_map: str | None
    load_in_4bit: bool
    trust_remote_code: bool


def load_model(
    name: str,
    dtype: str = "auto",
    device_map: str | None = None,
    load_in_4bit: bool = False,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """A model in eval mode and its processor, from a folder or the Hub.

    Args:
        name: Folder or Hub id.
        dtype: `"auto"` for the checkpoint's own, or torch's name of one.
        device_map: As in `from_pretrained`; `"auto"` spreads a model over what there is.
        load_in_4bit: Hold the decoder's weights in NF4, and the way to it as it is; needs the extra "qlora".
        trust_remote_code: Run the code in the repository; not needed for NormLlava.

    Raises:
        NoVisualTokensError: if the model has none.
        OSError, ValueError: if it can't be loaded.
    """
    options: dict[str, Any] = {}
    if load_in_4bit:
        compute_dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute_dtype,
            llm_int8_skip_modules=[rf"(.*\.)?{name}" for name in (*ENCODERS, *PROJECTORS, "lm_head")],
        )
    try:
        model = AutoModelForImageTextToText.from_pretrained(
            name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code, **options
        )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise NoVisualTokensError(
            "This is no model for pictures and text: transformers lists none with the config "
            f"{type(AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)).__name__}."
        ) from error
    image_token_id(model)
    return model.eval(), AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)


def add_arguments(parser: argparse.ArgumentParser, num_samples: int) -> None:
    """What every command that measures takes: which pictures, and how a model is loaded."""
    add = parser.add_argument
    add("--data", required=True, help="pictures and questions, or a folder of pictures")
    add("--image_folder", help="goes before the picture paths of a JSON file; its own folder by default")
    add("--split", default="train", help="of a dataset (default: train)")
    add("--question", default="Describe this picture.", help="asked about the pictures of a folder")
    add("--num_samples", type=int, default=num_samples, help=f"pictures to measure (default: {num_samples})")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the weights")
    add("--device_map", default="auto" if torch.cuda.is_available() else None, help="as in from_pretrained")
    add("--load_in_4bit", action="store_true", help="hold the weights in NF4")
    add("--trust_remote_code", action="store_true", help="run the code in the repository; not needed for NormLlava")


def model_options(args: argparse.Namespace) -> ModelOptions:
    """Options of [`load_model`] from the command line."""
    return {
        "dtype": args.dtype,
        "device_map": args.device_map,
        "load_in_4bit": args.load_in_4bit,
        "trust_remote_code": args.trust_remote_code,
    }


def read_questions(args: argparse.Namespace) -> tuple[list[Question], int]:
    """What [`load_questions`] does, from the command line; leaves it with the cause if there are none."""
    if args.num_samples < 1:
        raise SystemExit("--num_samples must be at least 1.")
    try:
        questions, passed_over = load_questions(
            args.data, args.num_samples, args.image_folder, args.split, args.question
        )
    except (ValueError, OSError) as error:
        raise SystemExit(f"--data: {error}") from error
    if passed_over:
        logger.info("%d rows of %s ask about no picture and were passed over", passed_over, args.data)
    return questions, passed_over


def load_questions(
    data: str, num_samples: int, image_folder: str | None = None, split: str = "train", question: str = ""
) -> tuple[list[Question], int]:
    """The first pictures with a question each.

    Args:
        data: Rows as training takes them (LLaVA's JSON or JSONL, a dataset on disk or on the Hub), or a folder of
            pictures.
        num_samples: How many at most.
        image_folder: Goes before the paths of a JSON file.
        split: Of a dataset.
        question: Asked about the pictures of a folder.

    Returns:
        What [`take_questions`] does.
    """
    folder = Path(data)
    if folder.is_dir() and not any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_SUFFIXES)
        turns = [{"from": "human", "value": f"<image>\n{question}"}]
        rows: Any = [{"images": [str(path)], "conversations": turns, "source": str(path)} for path in paths]
    else:
        rows = load_rows(data, image_folder, split=split)
    return take_questions(rows, num_samples, data)


def take_questions(rows: Iterable[Row], num_samples: int, data: str) -> tuple[list[Question], int]:
    """The first rows with a picture before their first answer, at most `num_samples`, and how many others were passed
    over on the way.

    Raises:
        NoVisualTokensError: if there is none; `data` is what the message calls the rows.
        BadRowError: if a row is malformed or a picture can't be read.
    """
    questions: list[Question] = []
    passed_over = 0
    for row in rows:
        if len(questions) == num_samples:
            break
        question = _to_question(row)
        if question.images:
            questions.append(question)
        else:
            passed_over += 1
    if not questions:
        raise NoVisualTokensError(
            f"{data} holds no pictures to ask about ({passed_over} rows without one before the first answer). Give "
            "rows with `image` or `images` and `conversations`, or a folder of pictures."
        )
    return questions, passed_over


def _to_question(row: Row) -> Question:
    problem = row_problem(row, needs_answer=False)
    if problem is not None:
        raise BadRowError(f"{row['source']}: {problem}.")
    turns = row_turns(row)
    images = open_images(row)
    first_answer = next((number for number, turn in enumerate(turns) if turn["from"] == "gpt"), len(turns))
    prompt, conversation = (
        _with_images(to_messages({**row, "conversations": part}), images) for part in (turns[:first_answer], turns)
    )
    asked_about = sum(part["type"] == "image" for message in prompt for part in message["content"])
    return Question(row["source"], images[:asked_about], prompt, conversation)


def _with_images(messages: list[dict[str, Any]], images: list[Image.Image]) -> list[Message]:
    """The messages with a picture in each of their image parts, and every content a list of parts."""
    remaining = iter(images)
    filled: list[Message] = []
    for message in messages:
        content = message["content"]
        parts: list[Part] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{"type": "image", "image": next(remaining)} if part["type"] == "image" else part for part in parts]
        filled.append({"role": message["role"], "content": parts})
    return filled
