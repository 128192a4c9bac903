"""Answer chat messages with base64 pictures on the Hub's Inference Endpoints.

A request is `{"inputs": [messages], "parameters": {"max_new_tokens": 256, "temperature": 0.0}}`; a message's content
is text or a list of `{"type": "text", "text": ...}` and `{"type": "image", "image": "data:image/png;base64,..."}`.
Paths and URLs are refused, so that nobody can read files or internal networks through the endpoint.
"""

import base64
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


# An endpoint loads this file by its path, so Python doesn't look for `pixels.py` in this file's folder by itself.
sys.path.insert(0, str(Path(__file__).parent))

from pixels import to_rgb


# Pillow reads more formats, and for one of them, EPS, it starts a program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_NEW_TOKENS = 1024
# Options of a greedy answer. They override the model's generation config, which may set penalties.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


class EndpointHandler:
    """Loads the model in `path` and answers requests."""

    def __init__(self, path: str = "") -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            path,
            dtype="auto",
            device_map="auto" if torch.cuda.is_available() else None,
            trust_remote_code=True,
        ).eval()
        self.processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)

    @torch.no_grad()
    def __call__(self, data: dict[str, Any]) -> dict[str, str]:
        """Answer one conversation.

        Raises:
            ValueError: for a request that is refused; it names the field and the reason.
        """
        options = read_parameters(data.get("parameters") or {})
        messages = [read_message(message) for message in data["inputs"]]
        inputs = self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        ).to(self.model.device, dtype=self.model.dtype)

        generated = self.model.generate(**inputs, **options)
        answer = self.processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return {"generated_text": answer.strip()}


def read_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """A request's parameters as options of `generate`.

    Raises:
        ValueError: if a parameter can't be set, or can't have this value.
    """
    max_new_tokens = parameters.get("max_new_tokens", 256)
    temperature = float(parameters.get("temperature", 0.0))
    has_unknown = any(name not in ("max_new_tokens", "temperature") for name in parameters)
    if has_unknown or not isinstance(max_new_tokens, int) or not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
        raise ValueError(f"parameters: only max_new_tokens, from 1 to {MAX_NEW_TOKENS}, and temperature can be set")

    if temperature > 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature}
    return {"max_new_tokens": max_new_tokens, **GREEDY}


def read_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its pictures decoded.

    Raises:
        ValueError: for a part that is neither text nor a picture.
    """
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]

    # Only these fields of a part are handed on. The processor would open a `url` or a `path`.
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "text", "text": str(part["text"])})
        elif part["type"] == "image":
            parts.append({"type": "image", "image": read_image(part["image"])})
        else:
            raise ValueError(f"inputs: only text and base64 pictures are accepted, not {part['type']}")
    return {"role": message["role"], "content": parts}


def read_image(value: str) -> Image.Image:
    """A picture from base64, with or without `data:image/...;base64,` before it, in RGB as in training.

    Raises:
        ValueError: if the text is no such picture.
    """
    try:
        encoded = value.removeprefix("data:").split(";base64,")[-1]
        content = base64.b64decode(encoded, validate=True)
        return to_rgb(Image.open(BytesIO(content), formats=FORMATS))
    except Exception as error:  # Pillow raises many kinds of errors for invalid pictures
        raise ValueError(
            f"inputs: not a base64 picture in {', '.join(FORMATS)} ({error}); paths are refused"
        ) from error
