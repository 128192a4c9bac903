"""What the Space answers, draws and refuses, called in this process and over HTTP."""

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
    """Import `app.py` of a Space's folder anew, which loads this model."""
    patch.setenv("MODEL", str(model))
    patch.setenv("REVISION", "main")
    patch.syspath_prepend(space_folder)
    sys.modules.pop("app", None)
    return importlib.import_module("app")


@pytest.fixture(scope="module")
def space(release: Path) -> Iterator[ModuleType]:
    """The imported `app.py` of the Space that was built with the release. It serves the release's model."""
    with pytest.MonkeyPatch.context() as patch:
        yield import_app(patch, release, release.with_name("release-space"))


def test_the_spaces_values_are_those_of_the_diagnostics(
    space: ModuleType, picture: Image.Image, composed: Callable[..., Path]
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).eval()
    processor = AutoProcessor.from_pretrained(composed())
    # The letter "x" becomes an attention sink, because its embedding gets a very large norm. The question has two.
    (letter_id,) = processor.tokenizer("x", add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[letter_id] *= 1000
    inputs = space.prepare_inputs(model, processor, picture, "what is xx?")

    # The diagnostics exclude both sinks.
    tokens = classify_sample(inputs, token_ids(model, processor))
    with Probe(model, inputs, tokens) as probe, torch.no_grad():
        model(**inputs)
    record = probe.record()
    assert record.tokens.excluded["sink"].sum() == 2
    summary = Summary.of(measure_layers([record]))

    means = space.measure_tokens(model, processor, inputs)
    # The diagnostics' name of the modality "image" is "visual".
    for modality, diagnostics_modality in (("image", "visual"), ("text", "text")):
        norms = summary.curve("norm", diagnostics_modality)["mean"].tolist()
        turning = summary.curve("turning", diagnostics_modality)["mean"].tolist()
        assert means["norm"][modality] == pytest.approx(norms, rel=1e-5)
        assert means["turning"][modality] == pytest.approx(turning, abs=1e-6)


def test_without_the_norm_layer_image_tokens_enter_the_decoder_as_the_projector_returns_them(
    space: ModuleType, picture: Image.Image
) -> None:
    inputs = space.prepare_inputs(space.model, space.processor, picture, "what is it?")
    means_without_norm_layer = space.measure_without_norm_layer(inputs)

    # What the norm layer gets is what the projector returns.
    projected: list[torch.Tensor] = []
    norm_layer = space.model.base_model.multi_modal_projector.norm
    with norm_layer.register_forward_pre_hook(lambda module, args: projected.append(args[0])):
        means = space.measure_tokens(space.model, space.processor, inputs)
    (image_tokens,) = projected

    # The first value of the L2 norm is at the input of the first layer of the decoder.
    l2_norm = image_tokens.norm(dim=-1).mean().item()
    assert means_without_norm_layer["norm"]["image"][0] == pytest.approx(l2_norm, rel=1e-5)
    assert means["norm"]["image"][0] != pytest.approx(l2_norm, rel=1e-5)
    assert means_without_norm_layer["norm"]["text"][0] == means["norm"]["text"][0]


def test_a_model_without_a_norm_layer_is_served_too(
    composed: Callable[..., Path], release: Path, picture: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = import_app(monkeypatch, composed(projector_norm="none"), release.with_name("release-space"))
    _, figure = app.answer(picture, "what is it?")
    # There is a line for image tokens and a line for text tokens, but no dashed lines.
    norm_panel = figure.axes[0]
    assert len(norm_panel.lines) == 2


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


def test_the_space_answers_over_http(space: ModuleType, client: Client, picture: Image.Image, tmp_path: Path) -> None:
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
    """Without a white ground, black writing on a transparent ground would be a black picture."""
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
