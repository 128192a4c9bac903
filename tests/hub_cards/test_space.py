"""The Space: what it answers, draws and refuses, over HTTP too."""

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


SPACE = ASSETS / "space"
ROOT = Path(__file__).parents[2]


def start(patch: pytest.MonkeyPatch, model: Path, made: Path) -> ModuleType:
    """The app in the folder that a build has made, imported as it is started."""
    patch.setenv("MODEL", str(model))
    patch.setenv("REVISION", "main")
    patch.syspath_prepend(made)
    sys.modules.pop("app", None)
    return importlib.import_module("app")


@pytest.fixture(scope="module")
def space(release: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield start(patch, release, release.with_name("release-space"))


def test_its_values_are_those_of_the_diagnostics(
    space: ModuleType, picture: Image.Image, composed: Callable[..., Path]
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).eval()
    processor = AutoProcessor.from_pretrained(composed())
    (letter,) = processor.tokenizer("x", add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[letter] *= 1000  # a sink
    inputs = space.prepare(model, processor, picture, "what is xx?")
    with Probe(model, inputs, classify_sample(inputs, token_ids(model, processor))) as probe, torch.no_grad():
        model(**inputs)
    seen = probe.record()
    assert seen.tokens.excluded["sink"].sum() == 2
    measured = space.measure(model, processor, inputs)
    summary = Summary.of(measure_layers([seen]))
    for modality, in_diagnostics in (("image", "visual"), ("text", "text")):
        norms = summary.curve("norm", in_diagnostics)["mean"].tolist()
        turning = summary.curve("turning", in_diagnostics)["mean"].tolist()
        assert measured["norm"][modality] == pytest.approx(norms, rel=1e-5)
        assert measured["turning"][modality] == pytest.approx(turning, abs=1e-6)


def test_without_the_norm_image_tokens_have_the_norm_of_before(space: ModuleType, picture: Image.Image) -> None:
    inputs = space.prepare(space.model, space.processor, picture, "what is it?")
    without_norm = space.measure_without_norm(inputs)
    before: list[torch.Tensor] = []
    norm = space.model.base_model.multi_modal_projector.norm
    with norm.register_forward_pre_hook(lambda norm, args: before.append(args[0])):
        measured = space.measure(space.model, space.processor, inputs)  # the norm is in its place again
    assert without_norm["norm"]["image"][0] == pytest.approx(before[0].norm(dim=-1).mean().item(), rel=1e-5)
    assert without_norm["norm"]["text"][0] == measured["norm"]["text"][0]


def test_a_model_without_a_norm_is_served_too(
    composed: Callable[..., Path], release: Path, picture: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = start(monkeypatch, composed(projector_norm="none"), release.with_name("release-space"))
    assert len(app.answer(picture, "what is it?")[1].axes[0].lines) == 2


def test_it_says_what_is_wrong(space: ModuleType, picture: Image.Image) -> None:
    with pytest.raises(gr.Error, match="can't be asked: The total number"):
        space.answer(picture, "<|image_pad|>")


def test_it_answers_over_http(space: ModuleType, picture: Image.Image, tmp_path: Path) -> None:
    picture.save(tmp_path / "picture.png")
    _, url, _ = space.demo.launch(prevent_thread_lock=True, quiet=True, max_file_size="20mb")
    try:
        client = Client(url, verbose=False)
        assert client.config["title"] == space.NAME
        text, figure = client.predict(handle_file(tmp_path / "picture.png"), "what is it?", api_name="/answer")
        expected, drawn = space.answer(picture, "what is it?")
        assert text == expected
        assert figure["plot"].startswith("data:image")
        lines = {line.get_label() for axis in drawn.axes for line in axis.lines}
        assert lines == {"image", "text", "image, without norm", "text, without norm"}

        # What is transparent is white here too: black on nothing is a picture of writing.
        writing = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
        writing.paste((0, 0, 0, 255), (5, 5, 20, 10))
        writing.save(tmp_path / "writing.png")
        seen: list[torch.Tensor] = []
        tower = space.model.base_model.vision_tower
        with tower.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            client.predict(handle_file(tmp_path / "writing.png"), "what is it?", api_name="/answer")
        on_white = to_rgb(writing)
        expected = space.prepare(space.model, space.processor, on_white, "what is it?")["pixel_values"]
        assert torch.equal(seen[0], expected)
    finally:
        space.demo.close()


def test_its_pins_are_what_the_tests_run_with() -> None:
    pins = dict(line.split("==") for line in (SPACE / "requirements.txt").read_text().split())
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pins.items() <= tested.items()
    assert metadata_load(SPACE / "README.md")["sdk_version"] == pins["gradio"]
