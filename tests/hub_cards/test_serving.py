"""A release folder answers in each way that it is served: endpoint handler, pipeline, `transformers serve`."""

import base64
import importlib.util
import io
import runpy
import socket
import subprocess
import sys
import time
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


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def handler_module(release: Path) -> Any:
    """The release's handler.py, imported by its path as an endpoint does."""
    spec: Any = importlib.util.spec_from_file_location("handler", release / "handler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def handler(handler_module: Any, release: Path) -> Any:
    """An endpoint's handler with the release's model."""
    return handler_module.EndpointHandler(str(release))


def encode_picture(size: tuple[int, int] = (30, 20)) -> str:
    """A picture as a PNG file in base64."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 20, 90)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def make_request(image: Any, text: str = "what is it?", **parameters: Any) -> dict[str, Any]:
    """A request to the endpoint."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return {"inputs": [{"role": "user", "content": content}], "parameters": parameters}


def save_unusual_pictures(folder: Path) -> None:
    """Write pictures whose pixels can be read in different ways."""
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(folder / "16bit.png")

    transparent = Image.new("RGBA", (8, 6), (0, 0, 0, 0))
    transparent.putpixel((2, 3), (0, 0, 0, 255))
    transparent.save(folder / "transparent.png")
    transparent.convert("P").save(folder / "palette.gif", transparency=0)

    orientation = 0x0112  # the number of an EXIF field
    rotated = Image.Exif()
    rotated[orientation] = 6
    Image.effect_noise((8, 6), 80).convert("CMYK").save(folder / "rotated.jpg", exif=rotated)


def test_endpoint_and_space_read_pictures_as_training_does(handler_module: Any, release: Path, tmp_path: Path) -> None:
    save_unusual_pictures(tmp_path)
    space_pixels: Any = runpy.run_path(str(release.with_name("release-space") / "pixels.py"))
    for path in sorted(tmp_path.iterdir()):
        (in_training,) = open_images({"images": [str(path)], "source": "row"})
        in_endpoint = handler_module.read_image(base64.b64encode(path.read_bytes()).decode())
        assert in_endpoint.tobytes() == in_training.tobytes(), path.name
        with Image.open(path) as picture:
            in_space = space_pixels["to_rgb"](picture)
        assert in_space.tobytes() == in_training.tobytes(), path.name


def test_the_handler_answers_as_the_pipeline_does(handler: Any, release: Path) -> None:
    encoded = encode_picture()
    answer = handler(make_request(encoded, max_new_tokens=8))

    picture = Image.open(io.BytesIO(base64.b64decode(encoded)))
    messages = make_request(picture)["inputs"]
    ask = pipeline("image-text-to-text", model=str(release), trust_remote_code=True)
    (pipeline_answer,) = ask(text=messages, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert answer["generated_text"] == pipeline_answer["generated_text"].strip()


def test_the_handler_takes_data_urls_and_text_alone(handler: Any) -> None:
    encoded = encode_picture()
    answer = handler(make_request(encoded, max_new_tokens=8))
    assert handler(make_request(f"data:image/png;base64,{encoded}", max_new_tokens=8)) == answer

    text_alone = {"inputs": [{"role": "user", "content": "hello"}], "parameters": {"max_new_tokens": 4}}
    assert isinstance(handler(text_alone)["generated_text"], str)


def test_at_temperature_0_no_penalty_changes_the_answer(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model composed from Qwen2.5 has a repetition penalty in its generation config."""
    greedy = handler(make_request(encode_picture(), max_new_tokens=32))
    for name, value in (("repetition_penalty", 9.0), ("num_beams", 3), ("no_repeat_ngram_size", 1)):
        monkeypatch.setattr(handler.model.generation_config, name, value)
    assert handler(make_request(encode_picture(), max_new_tokens=32)) == greedy


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inputs": [{"role": "user", "content": [{"type": "video"}]}]}, "only text and base64 pictures .* not video"),
        (make_request(str(ROOT / "README.md")), "not a base64 picture in PNG, .*; paths are refused"),
        (make_request(encode_picture((20_000, 20_000))), "not a base64 picture .*decompression bomb"),
        (make_request(encode_picture(), max_new_tokens=5000), "only max_new_tokens, from 1 to 1024"),
        (make_request(encode_picture(), "<|image_pad|>"), "The total number of .* tokens"),
    ],
)
def test_the_handler_refuses(data: dict[str, Any], message: str, handler: Any) -> None:
    with pytest.raises(ValueError, match=message):
        handler(data)


@pytest.fixture(scope="module")
def client(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The OpenAI client of `hub_cards serve`, which runs in a process of its own."""
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    with log.open("w") as file:
        command = [sys.executable, "-m", "hub_cards", "serve", str(release), "--port", str(port)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        wait_until_healthy(server, port, log)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait, for at most two minutes, until the server answers."""
    for _ in range(120):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(1)


def make_chat(url: str) -> list[dict[str, Any]]:
    """A question about a picture, in the form of OpenAI's chat completions."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    return [{"role": "user", "content": content}]


def test_transformers_serve_answers_the_openai_client(client: Any, release: Path, handler: Any) -> None:
    url = f"data:image/png;base64,{encode_picture()}"
    options = {"model": str(release), "max_tokens": 4, "temperature": 0}
    expected = handler(make_request(encode_picture(), max_new_tokens=4))["generated_text"]

    answer = client.chat.completions.create(messages=make_chat(url), **options)
    assert answer.choices[0].message.content.strip() == expected

    chunks = client.chat.completions.create(messages=make_chat(url), stream=True, **options)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    # An answer may end with half a character, which a stream holds back.
    assert streamed.strip() == expected.rstrip("\ufffd")

    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what is it?"}]
    response = client.responses.create(
        model=str(release), input=[{"role": "user", "content": content}], max_output_tokens=4, temperature=0
    )
    assert response.output_text.strip() == expected


def test_transformers_serve_names_its_model(client: Any, release: Path) -> None:
    assert [model.id for model in client.models.list()] == [str(release)]
    root = str(client.base_url).replace("/v1/", "/")
    assert client.get(root, cast_to=object)["model"] == str(release)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_body": {"generation_config": '{"max_new_tokens": 1000000}'}}, "generation_config: not accepted"),
        ({"model": "me/other"}, "Server is pinned to .*; requested 'me/other'"),
        ({"messages": make_chat(str(ROOT / "docs/picture.png"))}, "files are not read"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "/etc/passwd"}}]}]},
         "only text, and pictures"),
    ],
)  # fmt: skip
def test_transformers_serve_refuses(client: Any, release: Path, fields: dict[str, Any], message: str) -> None:
    arguments = {"model": str(release), "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    arguments.update(fields)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**arguments, stream=stream)


def test_the_responses_route_reads_no_files(client: Any, release: Path) -> None:
    content = [{"type": "input_image", "image_url": "/etc/passwd"}, {"type": "input_text", "text": "what is it?"}]
    with pytest.raises(openai.BadRequestError, match="files are not read"):
        client.responses.create(model=str(release), input=[{"role": "user", "content": content}])


@pytest.mark.parametrize("route", ["/load_model", "/v1/completions", "/v1/audio/transcriptions"])
def test_routes_that_load_models_or_read_files_are_taken_out(client: Any, route: str) -> None:
    url = str(client.base_url).replace("/v1/", route)
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.post(url, body={"model": "me/other"}, cast_to=object)


def test_pages_of_other_sites_may_not_read_answers(client: Any) -> None:
    request = urllib.request.Request(f"{client.base_url}models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in urllib.request.urlopen(request).headers


def test_only_the_loopback_interface_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server_options: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: server_options.update(options))
    monkeypatch.setattr("hub_cards.serve.build_app", lambda *args: None)
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    run_hub_cards(["serve", "me/x", "--port", str(port)])
    assert server_options == {"host": "127.0.0.1", "port": port}


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken_socket:
        port = taken_socket.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"^error: --port {port} can't be used \(.*Address already in use"):
            run_hub_cards(["serve", "me/x", "--port", str(port)])
