"""Answer chat messages with base64 pictures on the Hub's Inference Endpoints.

A request looks like this:

    {
        "inputs": [{"role": "user", "content": ...}],
        "parameters": {"max_new_tokens": 256, "temperature": 0.0}
    }

The content of a message is a text, or a list of parts. A part is `{"type": "text", "text": ...}` or
`{"type": "image", "image": "data:image/png;base64,..."}`. A picture can't be given as a path or a URL, so that nobody
can read files or internal networks through the endpoint.
"""

import base64
import math
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


# An endpoint loads this file by its path. Without this line, Python would not find `pixels.py` in the same folder.
sys.path.insert(0, str(Path(__file__).parent))

from pixels import to_rgb


# The accepted formats of pictures. Pillow reads more formats, but to read EPS it starts another program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
ROLES = ("system", "user", "assistant")
PART_TYPES = ("text", "image")
PARAMETER_NAMES = ("max_new_tokens", "temperature")
# The largest `max_new_tokens` that a request may set, and the value for a request that sets none.
MAX_NEW_TOKENS = 1024
DEFAULT_NEW_TOKENS = 256
# Options of a greedy answer. They override the model's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


class EndpointHandler:
    """Answers requests with a folder's model. An endpoint makes one handler, and calls it for each request."""

    def __init__(self, path: str = "") -> None:
        """Load the model and the processor from the folder `path`."""
        device_map = "auto" if torch.cuda.is_available() else None
        # A plain Llava has no code of its own.
        has_code = (Path(path) / "modeling_normllava.py").exists()
        self.model = AutoModelForImageTextToText.from_pretrained(
            path,
            dtype="auto",
            device_map=device_map,
            trust_remote_code=has_code,
        ).eval()
        self.processor = AutoProcessor.from_pretrained(path, trust_remote_code=has_code)

    @torch.no_grad()
    def __call__(self, data: dict[str, Any]) -> dict[str, str]:
        """Answer one request, whose messages are one conversation.

        Raises:
            ValueError: if the request is refused. The message names the field and the reason.
        """
        options = read_parameters(data.get("parameters") or {})
        messages = read_messages(data.get("inputs"))
        inputs = self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        inputs = inputs.to(self.model.device, dtype=self.model.dtype)

        generated = self.model.generate(**inputs, **options)  # [1, num_prompt_tokens + num_answer_tokens]
        num_prompt_tokens = inputs["input_ids"].shape[1]
        answer = self.processor.decode(generated[0, num_prompt_tokens:], skip_special_tokens=True)
        return {"generated_text": answer.strip()}


def read_messages(inputs: Any) -> list[dict[str, Any]]:
    """A request's messages in the form that the processor reads.

    Raises:
        ValueError: if `inputs` isn't a list of messages, or a message is refused.
    """
    if not isinstance(inputs, list) or not inputs:
        raise ValueError('inputs: a list of messages is needed, such as [{"role": "user", "content": "What is it?"}]')
    return [read_message(message, f"inputs[{number}]") for number, message in enumerate(inputs)]


def read_parameters(parameters: Any) -> dict[str, Any]:
    """A request's parameters as options of `generate`.

    Raises:
        ValueError: if a parameter is unknown, or its value is not allowed.
    """
    if not isinstance(parameters, dict) or any(name not in PARAMETER_NAMES for name in parameters):
        raise ValueError("parameters: only max_new_tokens and temperature can be set")
    max_new_tokens = parameters.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if not isinstance(max_new_tokens, int) or not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
        raise ValueError(f"parameters.max_new_tokens: {max_new_tokens!r} is not a number from 1 to {MAX_NEW_TOKENS}")
    temperature = parameters.get("temperature", 0.0)
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ValueError(f"parameters.temperature: {temperature!r} is not a number from 0 up")

    if temperature > 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature}
    return {"max_new_tokens": max_new_tokens, **GREEDY}


def read_message(message: Any, field: str) -> dict[str, Any]:
    """A request's message in the form that the processor reads, with the pictures decoded.

    Args:
        message: The message.
        field: The message's place in the request, for errors.

    Raises:
        ValueError: if the message has no known role, a part is neither text nor a picture, or a picture can't be read.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{field}.role: one of {', '.join(ROLES)} is needed")
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"{field}.content: a text or a list of parts is needed")

    # Only these fields of a part are passed on. If a part had a field `url` or `path`, the processor would open it.
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        part_field = f"{field}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get(kind) if kind in PART_TYPES else None
        if not isinstance(value, str):
            expected = '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
            raise ValueError(f"{part_field}: {expected} is needed")
        if kind == "text":
            parts.append({"type": "text", "text": value})
        else:
            parts.append({"type": "image", "image": read_image(value, part_field)})
    return {"role": message["role"], "content": parts}


def read_image(value: str, field: str) -> Image.Image:
    """Decode a picture from base64, and convert it to RGB as in training.

    Args:
        value: The base64 text, with or without a prefix such as "data:image/png;base64,". It may be broken into lines.
        field: The picture's place in the request, for errors.

    Raises:
        ValueError: if the text is not base64, or not a picture in one of the accepted formats.
    """
    try:
        encoded = value.split(";base64,")[-1]  # without the prefix, if there is one
        content = base64.b64decode("".join(encoded.split()), validate=True)
        return to_rgb(Image.open(BytesIO(content), formats=FORMATS))
    except Exception as error:  # Pillow raises many kinds of errors for invalid pictures
        raise ValueError(
            f"{field}.image: not a base64 picture in {', '.join(FORMATS)} ({error}); paths are refused"
        ) from error
