"""The release folder asked in each way that it is served: endpoint handler, pipeline, transformers serve."""

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
from hub_cards.__main__ import main as command_line


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def handler_file(release: Path) -> Any:
    """The release's handler.py, imported by its path as an endpoint does."""
    spec: Any = importlib.util.spec_from_file_location("handler", release / "handler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def handler(handler_file: Any, release: Path) -> Any:
    return handler_file.EndpointHandler(str(release))


def png(size: tuple[int, int] = (30, 20)) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 20, 90)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def request(image: Any, text: Any = "what is it?", **parameters: Any) -> dict[str, Any]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return {"inputs": [{"role": "user", "content": content}], "parameters": parameters}


def test_pixels_are_those_of_training(handler_file: Any, release: Path, tmp_path: Path) -> None:
    """Endpoint and Space have a copy of the rule by which training reads a picture."""
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    turned = Image.Exif()
    turned[0x0112] = 6
    writing = Image.new("RGBA", (8, 6), (0, 0, 0, 0))
    writing.putpixel((2, 3), (0, 0, 0, 255))
    Image.fromarray(ramp).save(tmp_path / "16bit.png")
    writing.save(tmp_path / "writing.png")
    writing.convert("P").save(tmp_path / "palette.gif", transparency=0)
    Image.effect_noise((8, 6), 80).convert("CMYK").save(tmp_path / "turned.jpg", exif=turned)

    space: Any = runpy.run_path(str(release.with_name("release-space") / "pixels.py"))
    for path in sorted(tmp_path.iterdir()):
        (trained,) = open_images({"images": [str(path)], "source": "row"})
        served = handler_file.read_image(base64.b64encode(path.read_bytes()).decode())
        assert served.tobytes() == trained.tobytes(), path.name
        with Image.open(path) as opened:
            assert space["to_rgb"](opened).tobytes() == trained.tobytes(), path.name


def test_the_handler_answers_as_the_pipeline_does(handler: Any, release: Path) -> None:
    bare = handler(request(png(), max_new_tokens=8))
    assert bare == handler(request(f"data:image/png;base64,{png()}", max_new_tokens=8))
    asked = request(Image.open(io.BytesIO(base64.b64decode(png()))))["inputs"]
    ask = pipeline("image-text-to-text", model=str(release), trust_remote_code=True)
    (given,) = ask(text=asked, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert bare["generated_text"] == given["generated_text"].strip()
    text_alone = handler({"inputs": [{"role": "user", "content": "hello"}], "parameters": {"max_new_tokens": 4}})
    assert isinstance(text_alone["generated_text"], str)


def test_at_temperature_0_no_penalty_changes_the_answer(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5's generation config has one, which composing keeps."""
    greedy = handler(request(png(), max_new_tokens=32))
    for name, value in (("repetition_penalty", 9.0), ("num_beams", 3), ("no_repeat_ngram_size", 1)):
        monkeypatch.setattr(handler.model.generation_config, name, value)
    assert handler(request(png(), max_new_tokens=32)) == greedy


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inputs": [{"role": "user", "content": [{"type": "video"}]}]}, "only text and base64 pictures .* not video"),
        (request(str(ROOT / "README.md")), "not a base64 picture in PNG, .*; paths are refused"),
        (request(png((20_000, 20_000))), "not a base64 picture .*decompression bomb"),
        (request(png(), max_new_tokens=5000), "only max_new_tokens, from 1 to 1024"),
        (request(png(), "<|image_pad|>"), "The total number of .* tokens"),
    ],
)
def test_the_handler_refuses(data: dict[str, Any], message: str, handler: Any) -> None:
    with pytest.raises(ValueError, match=message):
        handler(data)


@pytest.fixture(scope="module")
def client(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The OpenAI client of a server that runs."""
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("w") as file:
        command = [sys.executable, "-m", "hub_cards", "serve", str(release), "--port", str(port)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait()


def conversation(url: str, text: str = "what is it?") -> list[dict[str, Any]]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def test_transformers_serve_answers_the_openai_client(client: Any, release: Path, handler: Any) -> None:
    url = f"data:image/png;base64,{png()}"
    asked = {"model": str(release), "max_tokens": 4, "temperature": 0}
    expected = handler(request(png(), max_new_tokens=4))["generated_text"]
    assert [model.id for model in client.models.list()] == [str(release)]
    assert client.get(str(client.base_url).replace("/v1/", "/"), cast_to=object)["model"] == str(release)
    answer = client.chat.completions.create(messages=conversation(url), **asked)
    assert answer.choices[0].message.content.strip() == expected
    chunks = client.chat.completions.create(messages=conversation(url), stream=True, **asked)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed.strip() == expected.rstrip("\ufffd")  # a stream holds half a character back
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what is it?"}]
    response = client.responses.create(
        model=str(release), input=[{"role": "user", "content": content}], max_output_tokens=4, temperature=0
    )
    assert response.output_text.strip() == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_body": {"generation_config": '{"max_new_tokens": 1000000}'}}, "generation_config: not accepted"),
        ({"model": "me/other"}, "Server is pinned to .*; requested 'me/other'"),
        ({"messages": conversation(str(ROOT / "docs/picture.png"))}, "files are not read"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "/etc/passwd"}}]}]},
         "only text, and pictures"),
    ],
)  # fmt: skip
def test_transformers_serve_refuses(client: Any, release: Path, fields: dict[str, Any], message: str) -> None:
    asked = {"model": str(release), "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**asked, stream=stream)


def test_the_other_routes_load_and_read_nothing_either(client: Any, release: Path) -> None:
    content = [{"type": "input_image", "image_url": "/etc/passwd"}, {"type": "input_text", "text": "what is it?"}]
    with pytest.raises(openai.BadRequestError, match="files are not read"):
        client.responses.create(model=str(release), input=[{"role": "user", "content": content}])
    for route in ("/load_model", "/v1/completions", "/v1/audio/transcriptions"):
        with pytest.raises(openai.NotFoundError, match="Not Found"):
            client.post(str(client.base_url).replace("/v1/", route), body={"model": "me/other"}, cast_to=object)
    of_a_page = urllib.request.Request(f"{client.base_url}models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in urllib.request.urlopen(of_a_page).headers


def test_only_the_loopback_interface_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: heard.update(options))
    monkeypatch.setattr("hub_cards.serve.build_app", lambda *args: args)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["hub_cards", "serve", "me/x", "--port", str(port)])
        with pytest.raises(SystemExit, match=rf"^error: --port {port} can't be used \(.*Address already in use"):
            command_line()
    command_line()
    assert heard == {"host": "127.0.0.1", "port": port}
