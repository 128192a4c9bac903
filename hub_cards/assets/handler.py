"""Inference Endpoints: chat messages with base64 pictures in, text out.

A request is `{"inputs": [messages], "parameters": {"max_new_tokens": 256, "temperature": 0.0}}`; a message's content
is text or a list of `{"type": "text", "text": ...}` and `{"type": "image", "image": "data:image/png;base64,..."}`.
Only pictures in the request are opened: paths and URLs are refused, so that nobody can read files or internal networks
through it.
"""

import base64
import re
from io import BytesIO
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # of the other formats, EPS starts a program
MAX_IMAGES, MAX_BYTES, MAX_PIXELS = 8, 10_000_000, 40_000_000
MAX_RATIO = 100  # of its sides: resizing the shorter one to a fixed length scales the longer one too
MAX_CHARACTERS, MAX_NEW_TOKENS = 50_000, 1024
MIN_TEMPERATURE = 0.01  # logits are divided by the temperature
# Overrides the model's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
PARAMETERS = {"max_new_tokens": 256, "temperature": 0.0}


class EndpointHandler:
    """Loads the model in `path` and answers requests."""

    def __init__(self, path: str = "") -> None:
        device_map = "auto" if torch.cuda.is_available() else None
        self.model = AutoModelForImageTextToText.from_pretrained(
            path, dtype="auto", device_map=device_map, trust_remote_code=True
        ).eval()
        self.processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)

    @torch.no_grad()
    def __call__(self, data: dict[str, Any]) -> dict[str, str]:
        """Answer one conversation. Raises `ValueError`, with field and reason, for a request that is refused."""
        messages = read_messages(data.get("inputs"))
        parameters = read_parameters(data.get("parameters") or {})
        try:
            inputs = self.processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            ).to(self.model.device, dtype=self.model.dtype)
        except (ValueError, StopIteration, TemplateError) as error:  # an image token in a text, a bad order of roles
            raise ValueError(f"inputs: {str(error) or 'the numbers of pictures and image tokens differ'}") from error
        asked = inputs["input_ids"].shape[1]
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)  # Mamba has none
        if limit is not None and asked + parameters["max_new_tokens"] > limit:
            raise ValueError(
                f"inputs: {asked} tokens and {parameters['max_new_tokens']} new ones are more than the model's {limit}"
            )
        temperature = parameters.pop("temperature")
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else GREEDY
        generated = self.model.generate(**inputs, **parameters, **sampling)
        answer = self.processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return {"generated_text": answer.strip()}


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Chat messages with decoded pictures."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("inputs: must be a list of chat messages")
    read, images, characters = [], 0, 0
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"inputs[{number}]: a message needs a role (system, user or assistant) and content")
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            raise ValueError(f"inputs[{number}].content: must be text or a list of parts")
        filled = []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                characters += len(part["text"])
                if re.search("[\ud800-\udfff]", part["text"]):  # possible in JSON, but a tokenizer can't read it
                    raise ValueError(f"inputs[{number}].content: half a surrogate pair in the text")
                filled.append({"type": "text", "text": part["text"]})
            elif kind == "image":
                images += 1
                if images > MAX_IMAGES:
                    raise ValueError(f"inputs: more than {MAX_IMAGES} pictures")
                filled.append({"type": "image", "image": read_image(part.get("image"), f"inputs[{number}]")})
            else:
                raise ValueError(f"inputs[{number}].content: a part must be text, or an image in base64")
        read.append({"role": message["role"], "content": filled})
    if characters > MAX_CHARACTERS:
        raise ValueError(f"inputs: more than {MAX_CHARACTERS} characters of text")
    return read


def read_image(value: Any, place: str) -> Image.Image:
    """A picture from base64, with or without `data:image/...;base64,` before it."""
    if not isinstance(value, str):
        raise ValueError(f"{place}: `image` is not base64 text")
    if len(value) > MAX_BYTES * 4 // 3 + 64:
        raise ValueError(f"{place}: the picture has more than {MAX_BYTES} bytes")
    head, separator, body = value.partition(",")
    if separator and not (head.startswith("data:image/") and head.endswith(";base64")):
        raise ValueError(f"{place}: only pictures in base64 are accepted, no URLs or paths")
    try:
        content = base64.b64decode(body if separator else value, validate=True)
    except ValueError as error:
        raise ValueError(f"{place}: not valid base64 ({error}); URLs and paths are not accepted") from error
    return open_image(content, place)


def open_image(content: bytes, place: str) -> Image.Image:
    """A picture from the bytes of its file, in RGB and upright, read as in training."""
    try:
        picture = Image.open(BytesIO(content), formats=FORMATS)
        width, height = picture.size
        fits = width * height <= MAX_PIXELS and max(width, height) <= MAX_RATIO * min(width, height)
        if fits and picture.mode not in ("I", "F"):
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I;16"):  # unscaled, everything above 255 would become white
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return upright.convert("RGB")
    except Exception as error:  # invalid pictures fail in many ways
        raise ValueError(f"{place}: not a picture in {', '.join(FORMATS)} ({type(error).__name__})") from error
    if fits:
        raise ValueError(f"{place}: pixels of mode {picture.mode} have no known range")
    raise ValueError(
        f"{place}: the picture has {width} x {height} pixels, more than {MAX_PIXELS} in total or an aspect ratio over "
        f"{MAX_RATIO}"
    )


def read_parameters(given: Any) -> dict[str, Any]:
    """Parameters within their limits."""
    if not isinstance(given, dict) or set(given) - set(PARAMETERS):
        raise ValueError(f"parameters: only {', '.join(PARAMETERS)} can be set")
    parameters = PARAMETERS | given
    tokens, temperature = parameters["max_new_tokens"], parameters["temperature"]
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_NEW_TOKENS:
        raise ValueError(f"parameters.max_new_tokens: must be an integer from 1 to {MAX_NEW_TOKENS}")
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not (temperature == 0 or MIN_TEMPERATURE <= temperature <= 2):
        raise ValueError(f"parameters.temperature: must be 0, or a number from {MIN_TEMPERATURE} to 2")
    return parameters
