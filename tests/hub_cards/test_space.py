"""The Space: what it answers, draws and refuses, over HTTP too, and that its pins install together."""

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType
from typing import Any

import gradio as gr
import pytest
import torch
from gradio_client import Client, handle_file
from huggingface_hub import metadata_load
from packaging.requirements import Requirement
from PIL import ExifTags, Image
from transformers import AutoProcessor

from conversations.pictures import to_rgb
from diagnostics import plots, tokens
from diagnostics.measures import measure_layers
from diagnostics.probe import Probe, Record
from diagnostics.table import Summary
from diagnostics.tokens import classify_sample, token_ids
from hub_cards.build import ASSETS
from modeling_normllava import NormLlavaForConditionalGeneration
from plants import deep_picture


SPACE = ASSETS / "space"
ROOT = Path(__file__).parents[2]


def start(patch: pytest.MonkeyPatch, **variables: Any) -> ModuleType:
    """The app, imported as it is started."""
    for name in ("MODEL", "REVISION", "BASELINE", "BASELINE_REVISION"):
        patch.delenv(name, raising=False)
    for name, value in variables.items():
        patch.setenv(name, str(value))
    patch.syspath_prepend(SPACE)
    sys.modules.pop("app", None)
    return importlib.import_module("app")


@pytest.fixture(scope="module")
def space(staged: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield start(patch, MODEL=staged, REVISION="main")


@pytest.fixture
def upload(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "upload.png"
    Image.linear_gradient("L").resize((30, 20)).save(path)
    return {"path": str(path)}


def record(model: Any, inputs: Any, processor: Any) -> Record:
    """What the diagnostics see of one question."""
    with Probe(model, inputs, classify_sample(inputs, token_ids(model, processor))) as probe, torch.no_grad():
        model(**inputs)
    return probe.record()


def assert_as_diagnostics(measured: dict[str, dict[str, list[float]]], seen: Record) -> None:
    summary = Summary.of(measure_layers([seen]))
    for modality in ("visual", "text"):
        norms, turning = (summary.curve(name, modality)["mean"].tolist() for name in ("norm", "turning"))
        assert measured["norm"][modality] == pytest.approx(norms, rel=1e-5)
        assert measured["turning"][modality] == pytest.approx(turning, abs=1e-6)


def test_the_space_answers_and_draws(space: ModuleType, upload: dict[str, str]) -> None:
    text, figures = space.answer(upload, "what is it?")
    assert isinstance(text, str)
    assert figures.count("<svg") == 2
    for label in ("visual, without norm", "text, without norm", "norm of tokens", "turning, 1 − cosine"):
        assert label in figures
    assert "the norm after the projector removed" in figures


def test_its_numbers_are_those_of_the_diagnostics(space: ModuleType, upload: dict[str, str]) -> None:
    picture = space.open_picture(upload["path"])
    inputs = space.prepare(space.model, space.processor, picture, "what is it?")
    seen = record(space.model, inputs, space.processor)
    without_norm = space.measure_without_norm(inputs, picture, "what is it?")
    measured = space.measure(space.model, space.processor, inputs)  # the norm is in its place again
    assert_as_diagnostics(measured, seen)
    before_the_norm = seen.interface["norm_input"]
    assert without_norm["norm"]["visual"][0] == pytest.approx(before_the_norm.mean().item(), rel=1e-5)
    assert without_norm["norm"]["text"][0] == measured["norm"]["text"][0]
    assert without_norm["turning"] != measured["turning"]


def test_sinks_are_left_out_as_in_the_diagnostics(
    space: ModuleType, upload: dict[str, str], composed: Callable[..., Path]
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).eval()
    processor = AutoProcessor.from_pretrained(composed())
    (letter,) = processor.tokenizer("x", add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[letter] *= 1000
    inputs = space.prepare(model, processor, space.open_picture(upload["path"]), "what is xx?")
    seen = record(model, inputs, processor)
    assert seen.tokens.excluded["sink"].sum() == 2
    assert_as_diagnostics(space.measure(model, processor, inputs), seen)


def test_its_style_is_the_reports(space: ModuleType) -> None:
    layers = sys.modules["layers"]
    colours = {modality: line["color"] for modality, line in layers.LINES.items()}
    assert colours == plots.MODALITY_COLOURS
    assert (plots.INK, plots.FAINT, plots.DASHES[1]) == (layers.INK, layers.FAINT, layers.DASH)
    assert layers.STYLE.items() <= plots.STYLE.items()
    assert layers.SINK_FACTOR == tokens.SINK_FACTOR


def test_a_real_baseline_is_drawn_in_place_of_the_models_own(
    staged: Path, composed: Callable[..., Path], upload: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = composed(projector_norm="none")
    app = start(monkeypatch, MODEL=staged, REVISION="main", BASELINE=baseline, BASELINE_REVISION="main")
    picture = app.open_picture(upload["path"])
    without_norm = app.measure_without_norm(None, picture, "what is it?")
    model, processor = app.baseline
    assert_as_diagnostics(
        without_norm, record(model, app.prepare(model, processor, picture, "what is it?"), processor)
    )
    assert f"Dashed: {baseline}." in app.answer(upload, "what is it?")[1]
    alone = start(monkeypatch, MODEL=baseline, REVISION="main")  # has no norm to take out, and no card
    assert "Dashed" not in alone.answer(upload, "what is it?")[1]
    assert alone.read_examples() == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"REVISION": "main"}, "the Space's variable MODEL"),
        ({"MODEL": "staged"}, "the Space's variable REVISION"),
        ({"MODEL": "staged", "REVISION": "main", "BASELINE": "staged"}, "the Space's variable BASELINE_REVISION"),
        (
            {"MODEL": "staged", "REVISION": "main", "BASELINE": "staged", "BASELINE_REVISION": "main"},
            "has a norm after its projector: use a model without one",
        ),
    ],
)
def test_wrong_variables_are_named(
    variables: dict[str, str], message: str, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=message):
        start(monkeypatch, **{name: staged if value == "staged" else value for name, value in variables.items()})


def test_a_click_asks_the_cards_examples(space: ModuleType, staged: Path) -> None:
    widgets = metadata_load(staged / "README.md")["widget"]
    contents = [widget["messages"][0]["content"] for widget in widgets]
    examples = [[str(staged / picture["image_url"]["url"]), text["text"]] for picture, text in contents]
    assert space.read_examples() == examples
    assert len(examples) == 2
    for (path, question), widget in zip(examples, widgets, strict=True):
        answered = space.answer({"path": path}, question)[0]
        assert answered.startswith(widget["output"]["text"])  # the card's answers are shorter
    _, clicked = (event for event in space.demo.fns.values() if event.fn is space.answer)
    assert clicked.trigger_after is not None


@pytest.mark.parametrize(
    ("content", "question", "message"),
    [
        (None, "what?", "A picture and a question are needed"),
        ("whole", "  ", "A picture and a question are needed"),
        ("whole", "x" * 600, r"too long: \d+ tokens and 256 new ones are more than 512"),
        ("whole", "<|image_pad|>", "can't be asked: The total number of"),
        ("cut", "what?", "The picture is broken, or not one of PNG"),
        ("none", "what?", "The picture is broken, or not one of PNG"),
        ("EPS", "what?", "The picture is broken, or not one of PNG"),
        ("large", "what?", "more than 40000000 pixels"),
        ("narrow", "what?", "an aspect ratio over 100"),
    ],
)
def test_it_says_what_is_wrong(
    content: str | None, question: str, message: str, space: ModuleType, upload: dict[str, str]
) -> None:
    path = Path(upload["path"])
    if content == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif content == "none":
        path.write_bytes(b"no picture")
    elif content == "EPS":
        Image.new("RGB", (30, 20)).save(path, "EPS")
    elif content == "narrow":
        Image.new("RGB", (4000, 1)).save(path)
    elif content == "large":
        Image.new("1", (8000, 6000)).save(path)
    with pytest.raises(gr.Error, match=message):
        space.answer(upload if content else None, question)


def test_pictures_are_turned_as_in_training(space: ModuleType, tmp_path: Path) -> None:
    picture, exif = Image.new("RGB", (30, 20)), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for file in (tmp_path / "turned.jpg", tmp_path / "turned.tiff"):
        picture.convert("L").save(file, exif=exif)
        assert space.open_picture(str(file)).size == (20, 30)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_pixels_are_read_as_in_training(mode: str, space: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "deep"
    deep_picture(mode, path)
    if mode in ("I", "F"):
        with pytest.raises(gr.Error, match=f"Pixels of mode {mode} have no known range"):
            space.open_picture(str(path))
    else:
        assert space.open_picture(str(path)).tobytes() == to_rgb(Image.open(path)).tobytes()


def test_it_answers_and_refuses_over_http(space: ModuleType, upload: dict[str, str]) -> None:
    _, url, _ = space.demo.launch(prevent_thread_lock=True, quiet=True, max_file_size="20mb")
    try:
        client = Client(url, verbose=False)
        assert client.config["title"] == space.NAME
        text, figures = client.predict(handle_file(upload["path"]), "what is it?", api_name="/answer")
        assert text == space.answer(upload, "what is it?")[0]
        assert "<svg" in figures
        Path(upload["path"]).write_bytes(b"no picture")
        with pytest.raises(Exception, match="The picture is broken"):
            client.predict(handle_file(upload["path"]), "what is it?", api_name="/answer")
    finally:
        space.demo.close()


def test_its_pins_install_together_and_are_what_the_tests_run_with() -> None:
    pins = dict(line.split("==") for line in (SPACE / "requirements.txt").read_text().split())
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pins.items() <= tested.items()
    assert metadata_load(SPACE / "README.md")["sdk_version"] == pins["gradio"]
    asked = [(package, Requirement(line)) for package in pins for line in requires(package) or []]
    asked = [(package, need) for package, need in asked if need.marker is None or need.marker.evaluate({"extra": ""})]
    assert ("gradio", "pillow") in {(package, need.name) for package, need in asked}
    wrong = [
        f"{package} asks {need}"
        for package, need in asked
        if need.name in pins and pins[need.name] not in need.specifier
    ]
    assert wrong == []
