"""The staged folder asked in each way that it is served: endpoint handler, pipeline, transformers serve."""

import base64
import copy
import functools
import http.server
import importlib.util
import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import ExifTags, Image
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, pipeline, set_seed

from chat_servers import serving
from conversations.pictures import to_rgb
from hub_cards import serve
from plants import deep_picture
from training.compose import compose


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


def test_at_temperature_0_no_penalty_changes_the_answer(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5's generation config has one, which composing keeps."""
    greedy = handler(request(png(), max_new_tokens=32))
    for name, value in (("repetition_penalty", 9.0), ("num_beams", 3), ("no_repeat_ngram_size", 1)):
        monkeypatch.setattr(handler.model.generation_config, name, value)
    assert handler(request(png(), max_new_tokens=32)) == greedy


def test_transformers_serve_is_greedy_at_temperature_0(handler: Any) -> None:
    from transformers.cli.serving.utils import GenerationState

    from hub_cards.chat_server import Chat

    chat = Chat(None, GenerationState())
    config = copy.deepcopy(handler.model.generation_config)
    config.update(repetition_penalty=9.0, num_beams=3)
    greedy = chat._build_generation_config({"temperature": 0}, config)
    assert (greedy.do_sample, greedy.repetition_penalty, greedy.num_beams) == (False, 1.0, 1)
    sampled = chat._build_generation_config({"temperature": 0.5}, config)
    assert sampled.repetition_penalty == 9.0
    assert config.repetition_penalty == 9.0


def test_a_decoder_without_a_longest_sequence_is_served(
    handler_module: ModuleType, handler: Any, backbones: Callable[[str], Path], tmp_path: Path
) -> None:
    config = BloomConfig(vocab_size=512, hidden_size=32, n_layer=1, n_head=2, tie_word_embeddings=False)
    set_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "text")
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path / "text")
    model, processor = compose(str(backbones("siglip")), str(tmp_path / "text"))
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    answered = handler_module.EndpointHandler(str(tmp_path))(request(png(), max_new_tokens=4))
    assert isinstance(answered["generated_text"], str)


def test_the_handler_turns_pictures_as_training_does(handler_module: ModuleType) -> None:
    picture, exif = Image.new("RGB", (30, 20), (200, 20, 90)), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", exif=exif)
    messages = request(base64.b64encode(buffer.getvalue()).decode())["inputs"]
    (read, _) = handler_module.read_messages(messages)[0]["content"]
    assert read["image"].size == (20, 30)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_the_handler_reads_pixels_as_training_does(mode: str, handler_module: ModuleType, tmp_path: Path) -> None:
    deep_picture(mode, tmp_path / "deep")
    content = (tmp_path / "deep").read_bytes()
    if mode in ("I", "F"):
        with pytest.raises(ValueError, match=f"inputs.*pixels of mode {mode} have no known range"):
            handler_module.open_image(content, "inputs[0]")
    else:
        expected = to_rgb(Image.open(tmp_path / "deep"))
        assert handler_module.open_image(content, "inputs[0]").tobytes() == expected.tobytes()


def test_the_handler_starts_no_program_for_a_picture(
    handler_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **kwargs: started.append(args))
    picture = io.BytesIO()
    Image.new("RGB", (30, 20)).save(picture, "EPS")
    with pytest.raises(ValueError, match=r"inputs\[0\]: not a picture in PNG, .* \(UnidentifiedImageError\)"):
        handler_module.read_messages(request(base64.b64encode(picture.getvalue()).decode())["inputs"])
    assert started == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must be a list of chat messages"),
        ({"inputs": "hello"}, "must be a list of chat messages"),
        ({"inputs": [{"content": "x"}]}, "a message needs a role"),
        ({"inputs": [{"role": "user", "content": [{"type": "video"}]}]}, "a part must be text, or an image"),
        (request("/etc/passwd"), "URLs and paths are not accepted"),
        (request("https://example.com/a.png"), "URLs and paths are not accepted"),
        (request("http://169.254.169.254/latest,x"), "no URLs or paths"),
        (request("file:///etc/passwd"), "URLs and paths are not accepted"),
        (request({"path": "/etc/passwd"}), "is not base64 text"),
        (request(base64.b64encode(b"no picture").decode()), r"not a picture in PNG, .* \(UnidentifiedImageError\)"),
        (request(png((9000, 9000))), "9000 x 9000 pixels, more than 40000000"),
        (request(png((101, 1))), "the picture has 101 x 1 pixels"),
        (request("A" * 14_000_000), "more than 10000000 bytes"),
        ({"inputs": request(png())["inputs"] * 9}, "more than 8 pictures"),
        (request(png(), "x" * 50_001), "more than 50000 characters"),
        (request(png(), max_new_tokens=5000), "max_new_tokens: must be an integer from 1 to 1024"),
        (request("ü" * 8), r"inputs\[0\]: not valid base64"),
        ({"inputs": [{"role": "user", "content": []}]}, r"inputs\[0\].content: must be text or a list of parts"),
        (request(png(), "\ud83d"), r"inputs\[0\].content: half a surrogate pair"),
        (request(png(), "<|image_pad|>"), "inputs: The total number of .* tokens"),
        (
            request(png(), "x" * 600, max_new_tokens=8),
            "inputs: .* tokens and 8 new ones are more than the model's 512",
        ),
        (request(png(), "x" * 300, max_new_tokens=256), "tokens and 256 new ones are more than the model's 512"),
        (request(png(), temperature=-1), "temperature: must be 0, or a number from 0.01 to 2"),
        (request(png(), temperature=1e-9), "temperature: must be 0, or a number from 0.01 to 2"),
        (request(png(), temperature=float("nan")), "temperature: must be 0, or a number from 0.01 to 2"),
        (request(png(), num_beams=99), "only max_new_tokens, temperature can be set"),
    ],
)
def test_the_handler_refuses(data: dict[str, Any], message: str, handler: Any) -> None:
    with pytest.raises(ValueError, match=message):
        handler(data)


def test_a_server_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["serve", "me/x"])
    with pytest.raises(SystemExit, match=r"pip install -e '.\[serve\]'"):
        serve.main()


@pytest.fixture(scope="module")
def client(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The OpenAI client of a server that runs."""
    openai = pytest.importorskip("openai")  # the extra "release"
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(staged, log) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def conversation(url: str, text: str = "what is it?") -> list[dict[str, Any]]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def test_transformers_serve_answers_the_openai_client(client: Any, staged: Path, handler: Any, tmp_path: Path) -> None:
    import openai

    Image.open(io.BytesIO(base64.b64decode(png()))).save(tmp_path / "picture.png")
    web = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    )
    threading.Thread(target=web.serve_forever, daemon=True).start()
    asked = {"max_tokens": 4, "temperature": 0}
    expected = handler(request(png(), max_new_tokens=4))["generated_text"]
    names = [model.id for model in client.models.list()]
    assert names == [str(staged), f"{staged}@main"]
    urls = [f"data:image/png;base64,{png()}", f"http://127.0.0.1:{web.server_port}/picture.png"]
    for name, url in zip(names, urls, strict=True):
        answer = client.chat.completions.create(model=name, messages=conversation(url), **asked)
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert answer.choices[0].message.content.strip() == expected
        chunks = client.chat.completions.create(model=name, messages=conversation(url), stream=True, **asked)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed.strip() == expected.rstrip("\ufffd")  # a stream holds half a character back
    (tmp_path / "large.png").write_bytes(bytes(10_000_001))
    large = conversation(f"http://127.0.0.1:{web.server_port}/large.png")
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]: the picture at .*large.png has more than"):
        client.chat.completions.create(model=str(staged), messages=large, **asked)
    web.shutdown()
    content = [{"type": "input_image", "image_url": urls[0]}, {"type": "input_text", "text": "what is it?"}]
    response = client.responses.create(
        model=str(staged), input=[{"role": "user", "content": content}], max_output_tokens=4, temperature=0
    )
    assert response.output_text.strip() == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: missing or empty"),
        ({"max_tokens": 10**9}, "max_tokens: a whole number from 1 to 1024"),
        ({"max_tokens": "1000000"}, "max_tokens: a whole number from 1 to 1024"),
        ({"extra_body": {"generation_config": '{"max_new_tokens": 1000000}'}}, "generation_config: not accepted"),
        ({"extra_body": {"chat_template_kwargs": {"images": ["private.png"]}}}, "chat_template_kwargs: not accepted"),
        ({"model": "me/other"}, "Server is pinned to .*@main'; requested 'me/other'"),
        ({"messages": conversation("data:image/png;base64,@@")}, r"messages\[0\]: not valid base64"),
        (
            {"messages": conversation("data:image/png;base64,YWJj")},
            r"messages\[0\]: not a picture in .* \(Unidentified",
        ),
        ({"messages": conversation("http://127.0.0.1:9/a.png")}, r"messages\[0\]: http://127.0.0.1:9/a.png can't be"),
        ({"messages": conversation(str(ROOT / "README.md"))}, r"messages\[0\]: .*; files are not read"),
        ({"messages": conversation(f"file://{ROOT}/README.md")}, "files are not read"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "/etc/passwd"}}]}]},
            r"messages\[0\]: only text and pictures are accepted, not video",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, r"not in the form .* \(KeyError: 'type'\)"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "Unknown role judge"),
        ({"messages": conversation(f"data:image/png;base64,{png()}", "<|image_pad|>")}, "The total number of"),
    ],
)
def test_transformers_serve_refuses(
    client: Any, staged: Path, fields: dict[str, Any], message: str, stream: bool
) -> None:
    import openai

    asked = {"model": str(staged), "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.chat.completions.create(**asked, stream=stream)
    assert refused.value.type == "invalid_request_error"


def test_transformers_serve_loads_nothing_else(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.post(str(client.base_url).replace("/v1/", "/load_model"), body={"model": "me/other"}, cast_to=object)
