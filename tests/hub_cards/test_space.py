"""What the Space answers, draws and refuses, called in this process and over HTTP."""

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gradio as gr
import pytest
import torch
from gradio.data_classes import ImageData
from gradio_client import Client, handle_file
from huggingface_hub import metadata_load
from PIL import Image

from hub_cards.contents import ASSETS
from normllava.conversations.pixels import to_rgb


SPACE_FOLDER = ASSETS / "space"
ROOT = Path(__file__).parents[2]


def import_app(patch: pytest.MonkeyPatch, model: Path, space_folder: Path) -> ModuleType:
    """Import `app.py` of a Space's folder anew, so that it loads this model, and limit answers to eight tokens."""
    patch.setenv("MODEL", str(model))
    patch.setenv("REVISION", "main")
    patch.syspath_prepend(space_folder)
    for name in ("app", "words"):
        sys.modules.pop(name, None)
    app = importlib.import_module("app")
    patch.setattr(app, "MAX_NEW_TOKENS", 8)
    return app


@pytest.fixture(scope="module")
def space(release: Path) -> Iterator[ModuleType]:
    """The imported `app.py` of the Space that was built with the release. It serves the release's model."""
    with pytest.MonkeyPatch.context() as patch:
        yield import_app(patch, release, release.with_name("release-space"))


@pytest.fixture(scope="module")
def words_module(space: ModuleType) -> ModuleType:
    """The Space's `words.py`, which `app.py` imports."""
    return sys.modules["words"]


@torch.no_grad()
def predict_tokens(model: Any, inputs: Any, answer_ids: torch.Tensor) -> list[float]:
    """The probability of each token of an answer, from a prompt that is longer by a token each time."""
    probabilities = []
    for num_tokens_before, token_id in enumerate(answer_ids):
        tokens_before = answer_ids[None, :num_tokens_before]
        input_ids = torch.cat([inputs["input_ids"], tokens_before], dim=1)
        logits = model(input_ids=input_ids, pixel_values=inputs["pixel_values"]).logits
        probability = logits[0, -1].softmax(dim=-1)[token_id]
        probabilities.append(probability.item())
    return probabilities


def test_a_word_is_as_likely_as_its_tokens_together(
    space: ModuleType, words_module: ModuleType, picture: Image.Image
) -> None:
    inputs = space.encode_question(picture, "what is it?")
    grey_inputs = space.encode_question(Image.new("RGB", picture.size, (128, 128, 128)), "what is it?")
    tokenizer = space.processor.tokenizer
    # Each character is a token, and so is "<|im_end|>".
    answer_ids = tokenizer("a bc<|im_end|>", return_tensors="pt").input_ids[0]
    first_word, second_word = words_module.score_words(space.model, tokenizer, inputs, grey_inputs, answer_ids)
    assert (first_word.text, second_word.text) == ("a", "bc")

    a, blank, b, c = predict_tokens(space.model, inputs, answer_ids[:4])
    assert first_word.with_picture == pytest.approx(a, rel=1e-4)
    assert second_word.with_picture == pytest.approx(blank * b * c, rel=1e-4)

    a, blank, b, c = predict_tokens(space.model, grey_inputs, answer_ids[:4])
    assert first_word.with_grey == pytest.approx(a, rel=1e-4)
    assert second_word.with_grey == pytest.approx(blank * b * c, rel=1e-4)
    assert second_word.with_picture != second_word.with_grey


def test_a_character_of_several_tokens_is_shown_whole(space: ModuleType, words_module: ModuleType) -> None:
    tokenizer = space.processor.tokenizer
    answer_ids = tokenizer("für 字").input_ids  # a token for each byte: two for "ü", three for "字"
    words = words_module.split_into_words(tokenizer, answer_ids)
    assert words == [("für", [0, 1, 2, 3]), ("字", [4, 5, 6, 7])]


def test_the_figure_shows_the_first_words(words_module: ModuleType) -> None:
    words = [words_module.Word(f"word{number}", 0.75, 0.25) for number in range(20)]
    words[0] = words_module.Word("$5$", 0.5, 0.1)
    words[1] = words_module.Word("an-answer-that-is-long", 0.75, 0.25)

    # The figure shows twelve words, and sixteen characters of each.
    axis = words_module.draw_words(words).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["$5$", "an-answer-that-…", *(f"word{number}" for number in range(2, 12))]

    # Bars show percent.
    picture_bars, grey_bars = axis.containers
    assert [bar.get_width() for bar in picture_bars][:2] == [50, 75]
    assert [bar.get_width() for bar in grey_bars][:2] == [10, 25]


def test_an_answer_without_words_has_an_empty_figure(words_module: ModuleType) -> None:
    assert len(words_module.draw_words([]).axes[0].patches) == 0


@pytest.mark.parametrize(
    "options",
    [{"projector_norm": "none"}, {"max_tiles": 4}, {"key_adapter_rank": 4}, {"spatial_merge_size": 2}],
    ids=str,
)
def test_models_of_each_kind_are_served(
    options: dict[str, Any],
    make_model_folder: Callable[..., Path],
    release: Path,
    picture: Image.Image,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = import_app(monkeypatch, make_model_folder(**options), release.with_name("release-space"))
    text, figure = app.answer(picture, "what is it?")
    assert text
    assert len(figure.axes[0].patches) > 0


def test_a_gpu_of_zerogpu_is_asked_for_the_models_work_alone(
    release: Path, picture: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that records calls replaces the package `spaces`, which the Hub installs on a Space."""
    calls = []

    def record_calls(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_function(*args: Any) -> Any:
            calls.append(function.__name__)
            # ZeroGPU pickles the arguments for the process with the GPU, and the result.
            result = function(*pickle.loads(pickle.dumps(args)))
            return pickle.loads(pickle.dumps(result))

        return recorded_function

    monkeypatch.setitem(sys.modules, "spaces", SimpleNamespace(GPU=record_calls))
    app = import_app(monkeypatch, release, release.with_name("release-space"))
    text, _ = app.answer(picture, "what is it?")
    assert calls == ["run_model"]
    assert text


def test_what_can_not_be_asked_gets_a_sentence(space: ModuleType, picture: Image.Image) -> None:
    assert space.answer(picture, " ") == ("Give a picture and a question.", None)
    assert space.answer(None, "What?") == ("Give a picture and a question.", None)
    text, figure = space.answer(picture, "<|image_pad|>")  # the image token
    assert text.startswith("The question can't be asked: The total number")
    assert figure is None


def test_the_space_offers_the_releases_examples(space: ModuleType, release: Path) -> None:
    (component,) = [block for block in space.demo.blocks.values() if isinstance(block, gr.Dataset)]
    assert [question for _, question in component.samples] == ["what is it?", "what is it?"]
    for number, (picture, _) in enumerate(component.samples, start=1):
        shown = Image.open(picture["path"])
        assert shown.tobytes() == Image.open(release / f"images/example{number}.png").tobytes()


def test_the_spaces_page_names_no_folder_of_this_machine() -> None:
    text = (SPACE_FOLDER / "README.md").read_text()
    assert "runs/" not in text
    assert "MODEL=owner/name REVISION=v1.0 python app.py" in text


@pytest.fixture(scope="module")
def client(space: ModuleType) -> Iterator[Client]:
    """A client of the running Space."""
    _, url, _ = space.demo.launch(prevent_thread_lock=True, quiet=True, max_file_size="20mb")
    try:
        yield Client(url, verbose=False)
    finally:
        space.demo.close()


def test_a_transparent_picture_gets_a_white_ground(space: ModuleType, tmp_path: Path) -> None:
    """Without a white ground, black writing on a transparent ground would be a black picture."""
    transparent_black = (0, 0, 0, 0)
    writing = Image.new("RGBA", (40, 30), transparent_black)
    writing.paste("black", box=(5, 5, 20, 10))
    writing.save(tmp_path / "writing.png")

    # What gradio makes of an uploaded file.
    (component,) = [block for block in space.demo.blocks.values() if isinstance(block, gr.Image)]
    uploaded = component.preprocess(ImageData(path=str(tmp_path / "writing.png"), orig_name="writing.png"))

    # Record the pictures that enter the vision tower.
    tower_inputs: list[torch.Tensor] = []
    tower = space.model.base_model.vision_tower
    with tower.register_forward_pre_hook(lambda module, args: tower_inputs.append(args[0])):
        text, figure = space.answer(uploaded, "what is it?")
    assert figure is not None, text

    on_white = to_rgb(writing)
    expected = space.encode_question(on_white, "what is it?")["pixel_values"]
    assert torch.equal(tower_inputs[0], expected)


def test_a_picture_that_can_not_be_read_gets_a_sentence(space: ModuleType, tmp_path: Path) -> None:
    Image.new("F", (40, 30)).save(tmp_path / "heights.tiff")
    with Image.open(tmp_path / "heights.tiff") as picture:
        text, figure = space.answer(picture, "what is it?")
    assert text == "The picture can't be read: pixels of mode F have no known range"
    assert figure is None


def test_the_space_answers_over_http(space: ModuleType, client: Client, picture: Image.Image, tmp_path: Path) -> None:
    picture.save(tmp_path / "picture.png")
    text, plot = client.predict(handle_file(tmp_path / "picture.png"), "what is it?", api_name="/answer")
    assert plot is not None, text
    assert client.config["title"] == space.NAME

    expected_text, figure = space.answer(picture, "what is it?")
    assert text == expected_text
    assert plot["plot"].startswith("data:image")
    first_label = figure.axes[0].get_yticklabels()[0].get_text()
    assert text.startswith(first_label.removesuffix("…"))  # the "…" shows that a word was cut off


def read_pins(path: Path) -> dict[str, str]:
    """The versions that a requirements file pins, by package."""
    pins = {}
    for line in path.read_text().splitlines():
        if "==" in line:
            package, version = line.split("==")
            pins[package] = version
    return pins


def test_the_space_pins_the_versions_that_the_tests_run_with() -> None:
    pins = read_pins(SPACE_FOLDER / "requirements.txt")
    tested_versions = read_pins(ROOT / "constraints.txt")
    for package, version in pins.items():
        assert tested_versions[package] == version
    assert metadata_load(SPACE_FOLDER / "README.md")["sdk_version"] == pins["gradio"]


# The versions that the Hub's page on ZeroGPU lists (docs/hub/spaces-zerogpu.md of huggingface/hub-docs, which got the
# two newest of torch on September 4, 2026).
ZEROGPU_PYTHON = ("3.10.13", "3.12.12")
ZEROGPU_TORCH = ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0")


def test_zerogpu_has_the_versions_of_python_and_torch() -> None:
    assert metadata_load(SPACE_FOLDER / "README.md")["python_version"] in ZEROGPU_PYTHON
    assert read_pins(SPACE_FOLDER / "requirements.txt")["torch"] in ZEROGPU_TORCH
