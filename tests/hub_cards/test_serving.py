"""The staged folder asked in each way that it is served: endpoint handler, pipeline, transformers serve."""

import base64
import importlib.util
import io
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import ExifTags, Image
from transformers import pipeline

from hub_cards import serve


ROOT = Path(__file__).parents[2]


def load_file_as_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def handler_module(staged: Path) -> ModuleType:
    return load_file_as_module(staged / "handler.py")


@pytest.fixture(scope="module")
def handler(handler_module: ModuleType, staged: Path) -> Any:
    return handler_module.EndpointHandler(str(staged))


def png(size: tuple[int, int] = (30, 20)) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 20, 90)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def request(image: Any, text: Any = "what is it?", **parameters: Any) -> dict[str, Any]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return {"inputs": [{"role": "user", "content": content}], "parameters": parameters}


def test_the_handler_answers_as_the_pipeline_does(handler: Any, staged: Path) -> None:
    bare = handler(request(png(), max_new_tokens=8))
    assert bare == handler(request(f"data:image/png;base64,{png()}", max_new_tokens=8))
    picture = Image.open(io.BytesIO(base64.b64decode(png())))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "what is it?"}]
    ask = pipeline("image-text-to-text", model=str(staged), trust_remote_code=True)
    (given,) = ask(
        text=[{"role": "user", "content": content}], max_new_tokens=8, do_sample=False, return_full_text=False
    )
    assert bare["generated_text"] == given["generated_text"].strip()
    text_alone = handler({"inputs": [{"role": "user", "content": "hello"}], "parameters": {"max_new_tokens": 4}})
    assert isinstance(text_alone["generated_text"], str)


def test_the_handler_turns_pictures_as_training_does(handler_module: ModuleType) -> None:
    picture, exif = Image.new("RGB", (30, 20), (200, 20, 90)), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", exif=exif)
    messages = request(base64.b64encode(buffer.getvalue()).decode())["inputs"]
    (read, _) = handler_module.read_messages(messages)[0]["content"]
    assert read["image"].size == (20, 30)


def test_the_handler_starts_no_program_for_a_picture(
    handler_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **kwargs: started.append(args))
    picture = io.BytesIO()
    Image.new("RGB", (30, 20)).save(picture, "EPS")
    with pytest.raises(ValueError, match=r"inputs\[0\]: no picture in base64 \(UnidentifiedImageError\), one of PNG"):
        handler_module.read_messages(request(base64.b64encode(picture.getvalue()).decode())["inputs"])
    assert started == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "a list of chat messages"),
        ({"inputs": "hello"}, "a list of chat messages"),
        ({"inputs": [{"content": "x"}]}, "a message has a role"),
        ({"inputs": [{"role": "user", "content": [{"type": "video"}]}]}, "a part is text, or an image"),
        (request("/etc/passwd"), "URLs and paths are not taken"),
        (request("https://example.com/a.png"), "URLs and paths are not taken"),
        (request("http://169.254.169.254/latest,x"), "no URLs and no paths"),
        (request("file:///etc/passwd"), "URLs and paths are not taken"),
        (request({"path": "/etc/passwd"}), "is not base64 text"),
        (request(base64.b64encode(b"no picture").decode()), "no picture in base64"),
        (request(png((9000, 9000))), "more than 40000000 pixels"),
        (request("A" * 14_000_000), "more than 10000000 bytes"),
        ({"inputs": request(png())["inputs"] * 9}, "more than 8 pictures"),
        (request(png(), "x" * 50_001), "more than 50000 characters"),
        (request(png(), max_new_tokens=5000), "max_new_tokens: a whole number from 1 to 1024"),
        (request("ü" * 8), r"inputs\[0\]: no picture in base64"),
        ({"inputs": [{"role": "user", "content": []}]}, r"inputs\[0\].content: text or a list of parts"),
        (request(png(), "<|image_pad|>"), "inputs: The total number of .* tokens"),
        (
            request(png(), "x" * 600, max_new_tokens=8),
            "inputs: .* tokens and 8 new ones are more than the model's 512",
        ),
        (request(png(), "x" * 300, max_new_tokens=256), "tokens and 256 new ones are more than the model's 512"),
        (request(png(), temperature=-1), "temperature: 0, or a number from 0.01 to 2"),
        (request(png(), temperature=1e-9), "temperature: 0, or a number from 0.01 to 2"),
        (request(png(), temperature=float("nan")), "temperature: 0, or a number from 0.01 to 2"),
        (request(png(), num_beams=99), "only max_new_tokens, temperature can be set"),
    ],
)
def test_the_handler_refuses(data: dict[str, Any], message: str, handler: Any) -> None:
    with pytest.raises(ValueError, match=message):
        handler(data)


def test_a_server_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    monkeypatch.setattr(serve, "Serve", lambda **options: pytest.fail("started"))
    monkeypatch.setattr(sys, "argv", ["serve", "me/x"])
    with pytest.raises(SystemExit, match=r"pip install -e '.\[serve\]'"):
        serve.main()


def test_transformers_serve_answers_the_openai_client(staged: Path, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")  # the extra "serve"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "hub_cards.serve", str(staged), "--port", str(port)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(1)
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}},
            {"type": "text", "text": "what is it?"},
        ]
        answer = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none").chat.completions.create(
            model=f"{staged}@main", messages=[{"role": "user", "content": content}], max_tokens=4
        )
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert isinstance(answer.choices[0].message.content, str)
    finally:
        server.terminate()
        server.wait()
