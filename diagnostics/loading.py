"""Load any vision-language model with its processor, and pictures with questions as its inputs."""

import argparse
import hashlib
import itertools
import logging
import re
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
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import (
    IMAGE_MARK,
    BadRowError,
    Row,
    check_row,
    picture_path,
    row_images,
    row_turns,
    to_messages,
)
from diagnostics.parts import (
    ENCODERS,
    PROJECTORS,
    DiagnosticsError,
    NoVisualTokensError,
    decoder_layers,
    image_token_id,
)


logger = logging.getLogger(__name__)

QUESTION = "Describe this picture."
DATASET_SUFFIXES = (".arrow", ".parquet", ".tar")
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
        source: Where it comes from, for messages.
        picture: Fingerprint of the content of the prompt's pictures, independent of their paths; statistics are over
            these.
        images: The prompt's pictures, in RGB.
        prompt: Messages up to the first answer.
        conversation: All messages.
    """

    source: str
    picture: str
    images: list[Image.Image]
    prompt: list[Message]
    conversation: list[Message]


@dataclass(frozen=True)
class Questions:
    """Questions chosen from some data.

    Attributes:
        questions: In order; a picture is repeated only if there were too few.
        num_pictures: How many different pictures they show.
        passed_over: Number of skipped rows without a picture.
        unreadable: A line for each skipped row with an unreadable picture, with the reason.
    """

    questions: list[Question]
    num_pictures: int
    passed_over: int
    unreadable: list[str]


class ModelOptions(TypedDict, total=False):
    """Options of [`load_model`]."""

    dtype: str
    device_map: str | None
    load_in_4bit: bool
    trust_remote_code: bool


def load_processor(name: str, trust_remote_code: bool = False) -> Any:
    """A model's processor, as [`load_model`] loads it first, since it is fast.

    Raises:
        DiagnosticsError: if a package is missing that it needs.
        OSError, ValueError: if it can't be loaded.
    """
    try:
        return AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise DiagnosticsError(_missing_package(error)) from error


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
        device_map: As in `from_pretrained`; `"auto"` spreads a model over the available devices.
        load_in_4bit: Load the decoder in NF4, encoder and projector unquantized; needs the extra "qlora".
        trust_remote_code: Run the code in the repository; not needed for NormLlava.

    Raises:
        NoVisualTokensError: if the model has no visual tokens.
        DiagnosticsError: if a package is missing that its vision encoder or processor needs.
        OSError, ValueError: if it can't be loaded.
    """
    processor = load_processor(name, trust_remote_code)
    try:
        model = _load_weights(name, dtype, device_map, load_in_4bit, trust_remote_code)
    except ImportError as error:
        raise DiagnosticsError(_missing_package(error)) from error
    image_token_id(model)
    decoder_layers(model)
    return model.eval(), processor


def _load_weights(
    name: str, dtype: str, device_map: str | None, load_in_4bit: bool, trust_remote_code: bool
) -> PreTrainedModel:
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
        return AutoModelForImageTextToText.from_pretrained(
            name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code, **options
        )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise NoVisualTokensError(
            "This is not an image-text model: transformers has none with the config "
            f"{type(AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)).__name__}."
        ) from error


def _missing_package(error: ImportError) -> str:
    """transformers' error in one line: what needs which package, and how to install it."""
    needed = re.search(r"(\w+) requires the (\w+) library", str(error))
    if needed is None:
        return " ".join(str(error).split())
    package = needed[2].lower()
    return f"{needed[1]} needs the package {package}, which is not installed: run `pip install {package}`."


def count_layers_and_heads(name: str, trust_remote_code: bool = False) -> tuple[int, int]:
    """How many layers a model's decoder has, and how many attention heads each, from its config alone.

    Args:
        name: Folder or Hub id.
        trust_remote_code: As for [`load_model`].

    Raises:
        OSError, ValueError: if it has no config that can be loaded.
        DiagnosticsError: if the config doesn't say.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    layers, heads = (getattr(config, field, None) for field in ("num_hidden_layers", "num_attention_heads"))
    if not isinstance(layers, int) or not isinstance(heads, int):
        raise DiagnosticsError(
            f"{type(config).__name__} doesn't say how many layers and heads its decoder has: num_hidden_layers and "
            f"num_attention_heads are {layers} and {heads}."
        )
    return layers, heads


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
    add("--load_in_4bit", action="store_true", help="load the decoder in NF4")
    add("--trust_remote_code", action="store_true", help="run the code in the repository; not needed for NormLlava")


def model_options(args: argparse.Namespace) -> ModelOptions:
    """Options of [`load_model`] from the command line."""
    return {
        "dtype": args.dtype,
        "device_map": args.device_map,
        "load_in_4bit": args.load_in_4bit,
        "trust_remote_code": args.trust_remote_code,
    }


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
    if chosen.num_pictures < len(chosen.questions):
        logger.info(
            "%d questions on %d different pictures: %s has no more",
            len(chosen.questions),
            chosen.num_pictures,
            args.data,
        )
    return chosen


def load_questions(
    data: str, num_samples: int, image_folder: str | None = None, split: str = "train", question: str = ""
) -> Questions:
    """The first different pictures with a question each.

    Args:
        data: Rows as training takes them (LLaVA's JSON or JSONL, a dataset on disk or on the Hub), or a folder of
            pictures, those in its subfolders too; hidden files are left out.
        num_samples: How many at most.
        image_folder: Base folder of a JSON file's picture paths.
        split: Of a dataset.
        question: Asked about the pictures of a folder.

    Returns:
        The result of [`take_questions`].
    """
    folder = Path(data)
    if _is_of_pictures(folder):
        turns = [{"from": "human", "value": f"<image>\n{question}"}]
        rows: Any = [
            {"images": [str(path)], "conversations": turns, "source": str(path)} for path in _find_pictures(folder)
        ]
    else:
        rows = load_rows(data, image_folder, split=split)
    return take_questions(rows, num_samples, data)


def _is_of_pictures(path: Path) -> bool:
    """Whether `--data` is a folder of pictures, and not a dataset, which may hold some too."""
    return path.is_dir() and not any(file.suffix in DATASET_SUFFIXES for file in path.rglob("*"))


def _find_pictures(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in PICTURE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def take_questions(rows: Iterable[Row], num_samples: int, data: str) -> Questions:
    """The first rows that have a new picture before their first answer, at most `num_samples`.

    Rows with a picture that was taken already are used, in order, only if there are too few. Rows with unreadable
    pictures are skipped with a warning.

    Args:
        rows: With `source`.
        num_samples: How many at most.
        data: Name of the rows in messages.

    Raises:
        NoVisualTokensError: if there is none.
        BadRowError: if a row is malformed.
    """
    taken: dict[str, Question] = {}
    seen: set[tuple[str, ...]] = set()
    reserve: list[Row] = []
    passed_over = 0
    unreadable: list[str] = []
    for row in rows:
        if len(taken) == num_samples:
            break
        check_row(row, needs_answer=False)
        files = _files(row)
        if not files:
            passed_over += 1
        elif files in seen:
            reserve = [*reserve, row][:num_samples]
        else:
            try:
                question = _to_question(row)
            except BadRowError as error:
                logger.warning("skipped: %s", error)
                unreadable.append(str(error))
                continue
            seen.add(files)
            if question.picture in taken:
                reserve = [*reserve, row][:num_samples]
            else:
                taken[question.picture] = question
    if not taken:
        reason = f" None can be read; the first: {unreadable[0]}" if unreadable else ""
        raise NoVisualTokensError(
            f"{data} has no pictures to ask about ({passed_over} rows without one before the first answer). Give "
            f"rows with `image` or `images` and `conversations`, or a folder of pictures.{reason}"
        )
    again = [_to_question(row) for row in reserve[: num_samples - len(taken)]]
    return Questions([*taken.values(), *again], len(taken), passed_over, unreadable)


def _files(row: Row) -> tuple[str, ...]:
    """Identifies the prompt's pictures without opening them: by their paths, or a hash of the bytes."""
    marks = sum(turn["value"].count(IMAGE_MARK) for turn in _prompt_turns(row))
    files = []
    for image in row_images(row)[:marks]:
        path = picture_path(row, image)
        files.append(
            hashlib.sha256(image["bytes"]).hexdigest() if path is None and isinstance(image, dict) else str(path)
        )
    return tuple(files)


def _prompt_turns(row: Row) -> list[dict[str, str]]:
    """The turns before the first answer."""
    return list(itertools.takewhile(lambda turn: turn["from"] != "gpt", row_turns(row)))


def _to_question(row: Row) -> Question:
    images = open_images(row)
    prompt, conversation = (
        _with_images(to_messages({**row, "conversations": part}), images)
        for part in (_prompt_turns(row), row_turns(row))
    )
    asked_about = sum(part["type"] == "image" for message in prompt for part in message["content"])
    images = images[:asked_about]
    return Question(row["source"], fingerprint_pictures(images), images, prompt, conversation)


def fingerprint_pictures(images: Iterable[Image.Image]) -> str:
    """Hash of the pictures' pixels, independent of file names."""
    seen = hashlib.sha256()
    for image in images:
        rgb = image.convert("RGB")
        seen.update(repr(rgb.size).encode() + rgb.tobytes())
    return seen.hexdigest()[:16]


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
