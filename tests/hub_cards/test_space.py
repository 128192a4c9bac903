"""What the Space answers, draws and refuses, also over HTTP."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import gradio as gr
import pytest
import torch
from gradio_client import Client, handle_file
from huggingface_hub import metadata_load
from PIL import Image
from transformers import AutoProcessor

from conversations.pixels import to_rgb
from diagnostics.measures import measure_layers
from diagnostics.probe import Probe
from diagnostics.table import Summary
from diagnostics.tokens import classify_sample, token_ids
from hub_cards.contents import ASSETS
from modeling_normllava import NormLlavaForConditionalGeneration


SPACE_FOLDER = ASSETS / "space"
ROOT = Path(__file__).parents[2]


def import_app(patch: pytest.MonkeyPatch, model: Path, space_folder: Path) -> ModuleType:
    """Import the app of a Space's folder anew, with this model. Importing it loads the model."""
    patch.setenv("MODEL", str(model))
    patch.setenv("REVISION", "main")
    patch.syspath_prepend(space_folder)
    sys.modules.pop("app", None)
    return importlib.import_module("app")


@pytest.fixture(scope="module")
def space(release: Path) -> Iterator[ModuleType]:
    """The app of the Space that was built with the release."""
    with pytest.MonkeyPatch.context() as patch:
        yield import_app(patch, release, release.with_name("release-space"))


def test_its_values_are_those_of_the_diagnostics(
    space: ModuleType, picture: Image.Image, composed: Callable[..., Path]
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).eval()
    processor = AutoProcessor.from_pretrained(composed())
    # The letter "x" becomes an attention sink: its embedding is very long. The question below has two.
    (letter_id,) = processor.tokenizer("x", add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[letter_id] *= 1000
    inputs = space.prepare_inputs(model, processor, picture, "what is xx?")

    tokens = classify_sample(inputs, token_ids(model, processor))
    with Probe(model, inputs, tokens) as probe, torch.no_grad():
        model(**inputs)
    record = probe.record()
    assert record.tokens.excluded["sink"].sum() == 2
    summary = Summary.of(measure_layers([record]))

    measured = space.measure_layers(model, processor, inputs)
    # The diagnostics' name of the modality "image" is "visual".
    for modality, diagnostics_modality in (("image", "visual"), ("text", "text")):
        norms = summary.curve("norm", diagnostics_modality)["mean"].tolist()
        turning = summary.curve("turning", diagnostics_modality)["mean"].tolist()
        assert measured["norm"][modality] == pytest.approx(norms, rel=1e-5)
        assert measured["turning"][modality] == pytest.approx(turning, abs=1e-6)


def test_without_the_norm_image_tokens_enter_as_the_norm_gets_them(space: ModuleType, picture: Image.Image) -> None:
    inputs = space.prepare_inputs(space.model, space.processor, picture, "what is it?")
    without_norm = space.measure_without_norm(inputs)

    # The hook runs only if the norm is in its place again.
    norm_inputs: list[torch.Tensor] = []
    norm = space.model.base_model.multi_modal_projector.norm
    with norm.register_forward_pre_hook(lambda norm, args: norm_inputs.append(args[0])):
        with_norm = space.measure_layers(space.model, space.processor, inputs)

    (projected,) = norm_inputs
    assert without_norm["norm"]["image"][0] == pytest.approx(projected.norm(dim=-1).mean().item(), rel=1e-5)
    assert without_norm["norm"]["text"][0] == with_norm["norm"]["text"][0]


def test_a_model_without_a_norm_is_served_too(
    composed: Callable[..., Path], release: Path, picture: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = import_app(monkeypatch, composed(projector_norm="none"), release.with_name("release-space"))
    _, figure = app.answer(picture, "what is it?")
    # One line for image tokens and one for text tokens, and none without the norm.
    assert len(figure.axes[0].lines) == 2


def test_a_question_that_contains_the_image_token_is_refused(space: ModuleType, picture: Image.Image) -> None:
    with pytest.raises(gr.Error, match="can't be asked: The total number"):
        space.answer(picture, "<|image_pad|>")


@pytest.fixture(scope="module")
def client(space: ModuleType) -> Iterator[Client]:
    """A client of the running Space."""
    _, url, _ = space.demo.launch(prevent_thread_lock=True, quiet=True, max_file_size="20mb")
    try:
        yield Client(url, verbose=False)
    finally:
        space.demo.close()


def test_it_answers_over_http(space: ModuleType, client: Client, picture: Image.Image, tmp_path: Path) -> None:
    picture.save(tmp_path / "picture.png")
    text, plot = client.predict(handle_file(tmp_path / "picture.png"), "what is it?", api_name="/answer")
    assert client.config["title"] == space.NAME

    expected_text, figure = space.answer(picture, "what is it?")
    assert text == expected_text
    assert plot["plot"].startswith("data:image")
    labels = {line.get_label() for axis in figure.axes for line in axis.lines}
    assert labels == {"image", "text", "image, without norm", "text, without norm"}


def test_a_transparent_picture_gets_a_white_ground_over_http(
    space: ModuleType, client: Client, tmp_path: Path
) -> None:
    """Without it, black writing on a transparent ground would be a black picture."""
    writing = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
    writing.paste((0, 0, 0, 255), (5, 5, 20, 10))
    writing.save(tmp_path / "writing.png")

    tower_inputs: list[torch.Tensor] = []
    tower = space.model.base_model.vision_tower
    with tower.register_forward_pre_hook(lambda _, args: tower_inputs.append(args[0])):
        client.predict(handle_file(tmp_path / "writing.png"), "what is it?", api_name="/answer")

    on_white = to_rgb(writing)
    expected = space.prepare_inputs(space.model, space.processor, on_white, "what is it?")["pixel_values"]
    assert torch.equal(tower_inputs[0], expected)


def read_pins(path: Path) -> dict[str, str]:
    """The versions that a requirements file pins, by package."""
    lines = path.read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_its_pins_are_what_the_tests_run_with() -> None:
    pins = read_pins(SPACE_FOLDER / "requirements.txt")
    tested = read_pins(ROOT / "constraints.txt")
    for package, version in pins.items():
        assert tested[package] == version
    assert metadata_load(SPACE_FOLDER / "README.md")["sdk_version"] == pins["gradio"]
