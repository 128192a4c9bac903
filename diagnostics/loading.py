"""Any vision-language model with its processor, and pictures with questions as its inputs."""

import argparse
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
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from conversations.checks import row_problem
from conversations.pictures import open_images
from conversations.rows import BadRowError, load_rows, row_turns, to_messages
from diagnostics.capture import PROJECTORS, NoVisualTokensError, image_token_id


logger = logging.getLogger(__name__)

# What families call their vision encoder, as `PreTrainedModel.get_encoder` knows them.
ENCODERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower")
PICTURE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


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
    prompt: list[dict[str, Any]]
    conversation: list[dict[str, Any]]


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


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of [`load_model`] from the command line."""
    return {name: getattr(args, name) for name in ("dtype", "device_map", "load_in_4bit", "trust_remote_code")}


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


def take_questions(rows: Iterable[dict[str, Any]], num_samples: int, data: str) -> tuple[list[Question], int]:
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


def _to_question(row: dict[str, Any]) -> Question:
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


def _with_images(messages: list[dict[str, Any]], images: list[Image.Image]) -> list[dict[str, Any]]:
    """The messages with a picture in each of their image parts, and every content a list of parts."""
    remaining = iter(images)
    filled = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{**part, "image": next(remaining)} if part["type"] == "image" else part for part in parts]
        filled.append({**message, "content": parts})
    return filled


def prepare_inputs(
    model: PreTrainedModel, processor: Any, question: Question, answered: bool = False
) -> dict[str, Any]:
    """What the processor makes of a question, on the model's device and in its dtype; one sample, unpadded.

    Args:
        model, processor: As [`load_model`] returns them.
        question: The question.
        answered: Take the whole conversation, not the prompt alone.
    """
    messages = question.conversation if answered else question.prompt
    if getattr(processor, "chat_template", None):
        inputs = processor.apply_chat_template(
            messages,
            add_generation_prompt=not answered,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        mark = getattr(processor, "image_token", "<image>")
        parts = [part for message in messages for part in message["content"]]
        text = "\n".join(part["text"] if part["type"] == "text" else mark for part in parts)
        images = [part["image"] for part in parts if part["type"] == "image"]
        inputs = processor(images=images, text=text, return_tensors="pt")
    return dict(inputs.to(model.device, dtype=model.dtype))


def seen_picture(inputs: dict[str, Any], question: Question) -> Image.Image:
    """A question's first picture as the vision encoder gets it, cropped and scaled; colours stretched to their range.

    Where the processor cuts a picture into patches or tiles, the whole picture as it was given.
    """
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.ndim < 4 or pixels.shape[-3] != 3 or pixels[..., 0, 0, 0].numel() != 1:
        return question.images[0]
    pixels = pixels.reshape(pixels.shape[-3:]).float().cpu()
    low, high = pixels.amin(), pixels.amax()
    levels = (255 * (pixels - low) / (high - low).clamp(min=1e-6)).to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def answer_inputs(model: PreTrainedModel, processor: Any, question: Question) -> tuple[dict[str, Any], int]:
    """Inputs of a whole conversation, and the position that its first answer begins at; of a question without one, the
    position past its first visual token."""
    inputs = prepare_inputs(model, processor, question, answered=True)
    if question.conversation != question.prompt:
        return inputs, prepare_inputs(model, processor, question)["input_ids"].shape[1]
    visual = (inputs["input_ids"][0] == image_token_id(model)).nonzero()
    return inputs, int(visual[0, 0]) + 1


def find_tokenizer(processor: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, which may be one itself."""
    return getattr(processor, "tokenizer", processor)


def special_ids(processor: Any) -> set[int]:
    """Ids that a processor's tokenizer marks as special, also those without a role: Llama 3 delimits turns by such."""
    tokenizer = find_tokenizer(processor)
    marked = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return marked | set(tokenizer.all_special_ids)
