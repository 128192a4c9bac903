"""What a release folder answers and refuses behind an inference endpoint and behind `hub_cards serve`."""

import base64
import importlib.util
import io
import runpy
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import uvicorn
from PIL import Image
from transformers import pipeline

from conversations.pictures import open_images
from hub_cards.__main__ import main as run_hub_cards
from local_server import find_free_port, make_messages, serve


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


@pytest.fixture(scope="module")
def client(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An OpenAI client that asks `hub_cards serve`, which serves the release in a process of its own."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "hub_cards", "serve", release]
    with serve(command, ROOT, log) as openai_client:
        yield openai_client


# The picture about which the server and the handler are asked.
PICTURE_URL = f"data:image/png;base64,{encode_picture()}"


@pytest.fixture(scope="module")
def handler_answer(handler: Any) -> str:
    """The endpoint's greedy answer about the picture, of at most four tokens."""
    return handler(make_request(encode_picture(), max_new_tokens=4))["generated_text"]


def test_chat_completions_answer_as_the_handler_does(client: Any, release: Path, handler_answer: str) -> None:
    completion = client.chat.completions.create(
        model=str(release), messages=make_messages(PICTURE_URL), max_tokens=4, temperature=0
    )
    assert completion.choices[0].message.content.strip() == handler_answer


def test_a_stream_of_chat_completions_answers_as_the_handler_does(
    client: Any, release: Path, handler_answer: str
) -> None:
    chunks = client.chat.completions.create(
        model=str(release), messages=make_messages(PICTURE_URL), max_tokens=4, temperature=0, stream=True
    )
    streamed = ""
    for chunk in chunks:
        text = chunk.choices[0].delta.content
        if text is not None:
            streamed += text

    # An answer that is cut off may end with an incomplete character. The handler decodes such a character as U+FFFD,
    # and a stream omits it.
    assert streamed.strip() == handler_answer.rstrip("\ufffd")


def test_the_responses_route_answers_as_the_handler_does(client: Any, release: Path, handler_answer: str) -> None:
    content = [{"type": "input_image", "image_url": PICTURE_URL}, {"type": "input_text", "text": "what is it?"}]
    response = client.responses.create(
        model=str(release), input=[{"role": "user", "content": content}], max_output_tokens=4, temperature=0
    )
    assert response.output_text.strip() == handler_answer


def test_the_server_names_its_model(client: Any, release: Path) -> None:
    assert [model.id for model in client.models.list()] == [str(release)]
    root = str(client.base_url).replace("/v1/", "/")  # `base_url` ends with "/v1/"
    assert client.get(root, cast_to=object)["model"] == str(release)


VIDEO_MESSAGES = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "/etc/passwd"}}]}]


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        pytest.param(
            {"extra_body": {"generation_config": '{"max_new_tokens": 1000000}'}},
            "generation_config: not accepted",
            id="generation config",
        ),
        pytest.param({"model": "me/other"}, "Server is pinned to .*; requested 'me/other'", id="another model"),
        pytest.param({"messages": make_messages(str(ROOT / "docs/picture.png"))}, "files are not read", id="path"),
        pytest.param({"messages": VIDEO_MESSAGES}, "only text, and pictures", id="video"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat_completions_refuse_a_request(
    client: Any, release: Path, request_fields: dict[str, Any], message: str, stream: bool
) -> None:
    arguments = {"model": str(release), "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    arguments.update(request_fields)
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**arguments, stream=stream)


def test_the_responses_route_reads_no_files(client: Any, release: Path) -> None:
    content = [{"type": "input_image", "image_url": "/etc/passwd"}, {"type": "input_text", "text": "what is it?"}]
    with pytest.raises(openai.BadRequestError, match="files are not read"):
        client.responses.create(model=str(release), input=[{"role": "user", "content": content}])


@pytest.mark.parametrize("route", ["/load_model", "/v1/completions", "/v1/audio/transcriptions"])
def test_routes_that_load_models_or_read_files_are_taken_out(client: Any, route: str) -> None:
    url = str(client.base_url).replace("/v1/", route)  # `base_url` ends with "/v1/"
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.post(url, body={"model": "me/other"}, cast_to=object)


def test_pages_of_other_sites_may_not_read_answers(client: Any) -> None:
    """A browser lets a page of another site read an answer only if the header below allows the site."""
    request = urllib.request.Request(f"{client.base_url}models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in urllib.request.urlopen(request).headers


def test_the_server_listens_on_the_loopback_interface_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # The options are recorded, and no server is started.
    server_options: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: server_options.update(options))
    monkeypatch.setattr("hub_cards.serve.build_app", lambda *args: None)
    port = find_free_port()
    run_hub_cards(["serve", "me/x", "--port", str(port)])
    assert server_options == {"host": "127.0.0.1", "port": port}


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken_socket:
        _, port = taken_socket.getsockname()
        with pytest.raises(SystemExit, match=rf"^error: --port {port} can't be used \(.*Address already in use"):
            run_hub_cards(["serve", "me/x", "--port", str(port)])
