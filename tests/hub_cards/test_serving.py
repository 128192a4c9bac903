"""What a release folder answers and refuses behind an inference endpoint."""

import base64
import importlib.util
import io
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import pipeline

from normllava.conversations.pictures import open_images


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def handler_module(release: Path) -> Any:
    """The release's handler.py, imported by its path, as an endpoint imports it."""
    spec: Any = importlib.util.spec_from_file_location("handler", release / "handler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def handler(handler_module: Any, release: Path) -> Any:
    """An endpoint's handler with the release's model."""
    return handler_module.EndpointHandler(str(release))


def encode_picture(mode: str = "RGB", size: tuple[int, int] = (30, 20)) -> str:
    """A PNG file in base64: a picture of Pillow's `mode` in a fixed colour."""
    colour = (200, 20, 90) if mode == "RGB" else 0
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def make_request(image: Any, text: str = "what is it?", **parameters: Any) -> dict[str, Any]:
    """A request to the endpoint: a question about a picture, and the request's parameters."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return {"inputs": [{"role": "user", "content": content}], "parameters": parameters}


def save_unusual_pictures(folder: Path) -> None:
    """Write pictures of four kinds: with 16 bits, transparent, with a palette, and in CMYK with a rotation."""
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(folder / "16bit.png")

    transparent = Image.new("RGBA", (8, 6), (0, 0, 0, 0))
    transparent.putpixel((2, 3), (0, 0, 0, 255))  # one black pixel
    transparent.save(folder / "transparent.png")
    transparent.convert("P").save(folder / "palette.gif", transparency=0)  # colour 0 of the palette is transparent

    orientation = 0x0112  # the number of an EXIF field
    exif = Image.Exif()
    exif[orientation] = 6  # rotated by a quarter turn
    Image.effect_noise((8, 6), 80).convert("CMYK").save(folder / "rotated.jpg", exif=exif)


def open_in_training(path: Path) -> Image.Image:
    """Open a picture file as training does."""
    (picture,) = open_images({"images": [str(path)], "source": "row"})  # "source" is for error messages
    return picture


def test_the_endpoint_reads_pictures_as_training_does(handler_module: Any, tmp_path: Path) -> None:
    save_unusual_pictures(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        training_picture = open_in_training(path)
        encoded = base64.b64encode(path.read_bytes()).decode()
        endpoint_picture = handler_module.read_image(encoded, "inputs[0].content[0]")
        assert endpoint_picture.tobytes() == training_picture.tobytes(), path.name


def test_the_space_reads_pictures_as_training_does(release: Path, tmp_path: Path) -> None:
    save_unusual_pictures(tmp_path)
    pixels_file = release.with_name("release-space") / "pixels.py"
    space_to_rgb: Any = runpy.run_path(str(pixels_file))["to_rgb"]
    for path in sorted(tmp_path.iterdir()):
        training_picture = open_in_training(path)
        with Image.open(path) as picture:
            space_picture = space_to_rgb(picture)
        assert space_picture.tobytes() == training_picture.tobytes(), path.name


def test_the_handler_answers_as_the_pipeline_does(handler: Any, release: Path) -> None:
    encoded = encode_picture()
    answer = handler(make_request(encoded, max_new_tokens=8))

    picture = Image.open(io.BytesIO(base64.b64decode(encoded)))
    messages = make_request(picture)["inputs"]
    ask = pipeline("image-text-to-text", model=str(release), trust_remote_code=True)
    (pipeline_answer,) = ask(text=messages, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert answer["generated_text"] == pipeline_answer["generated_text"].strip()


def test_the_handler_reads_a_picture_from_a_data_url(handler: Any) -> None:
    encoded = encode_picture()
    answer = handler(make_request(encoded, max_new_tokens=8))
    assert handler(make_request(f"data:image/png;base64,{encoded}", max_new_tokens=8)) == answer


def test_the_handler_answers_text_without_a_picture(handler: Any) -> None:
    request = {"inputs": [{"role": "user", "content": "hello"}], "parameters": {"max_new_tokens": 4}}
    assert isinstance(handler(request)["generated_text"], str)


def test_the_handler_ignores_penalties_of_the_generation_config(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model composed from Qwen2.5 has a repetition penalty in its generation config."""
    request = make_request(encode_picture(), max_new_tokens=32)
    answer = handler(request)
    for name, value in (("repetition_penalty", 9.0), ("num_beams", 3), ("no_repeat_ngram_size", 1)):
        monkeypatch.setattr(handler.model.generation_config, name, value)
    assert handler(request) == answer


def test_the_handler_reads_base64_in_lines(handler: Any) -> None:
    encoded = encode_picture()
    in_lines = base64.encodebytes(base64.b64decode(encoded)).decode()  # 76 characters a line
    assert "\n" in in_lines
    assert handler(make_request(in_lines, max_new_tokens=8)) == handler(make_request(encoded, max_new_tokens=8))


def ask(content: Any, role: str = "user") -> dict[str, Any]:
    """A request of one message."""
    return {"inputs": [{"role": role, "content": content}]}


# Requests that are refused, by what the error says.
REFUSED_REQUESTS: dict[str, dict[str, Any]] = {
    "inputs: a list of messages is needed": {"inputs": "What is it?"},
    "inputs: a list of messages": {},
    r"inputs\[0\].role: one of system, user, assistant": ask("Hi", role="developer"),
    r"inputs\[0\].role:": {"inputs": ["Hi"]},
    r"inputs\[0\].content: a text or a list": ask(None),
    r"inputs\[0\].content\[0\]: .* is needed": ask([{"type": "video"}]),
    r"inputs\[0\].content\[1\]: .* is needed": ask([{"type": "text", "text": "Hi"}, {"type": "text", "text": None}]),
    r"inputs\[0\].content\[0\]: .*\"image\": ": ask([{"type": "image", "url": "https://example.com/a.png"}]),
    r"content\[0\].image: not a base64 picture in PNG, .*; paths are refused": make_request(str(ROOT / "README.md")),
    r"content\[0\].image: not a base64 picture .*decompression bomb": make_request(
        encode_picture("1", size=(14_000, 14_000))
    ),
    "parameters.max_new_tokens: 5000 is not a number from 1 to 1024": make_request(
        encode_picture(), max_new_tokens=5000
    ),
    "parameters.temperature: None is not a number": make_request(encode_picture(), temperature=None),
    "only max_new_tokens and temperature": make_request(encode_picture(), top_p=0.5),
    "The total number of .* tokens": make_request(encode_picture(), "<|image_pad|>"),
}


@pytest.mark.parametrize(("message", "request_data"), REFUSED_REQUESTS.items())
def test_the_handler_refuses_a_request(request_data: dict[str, Any], message: str, handler: Any) -> None:
    with pytest.raises(ValueError, match=message):
        handler(request_data)
