"""Measuring models in memory, as in a notebook."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image

from conversations.rows import BadRowError
from diagnostics import compare, measure
from diagnostics.comparison import find_questions
from diagnostics.frame import COLUMNS
from diagnostics.loading import load_model
from diagnostics.model_report import Closeup
from diagnostics.parts import DiagnosticsError


Composed = Callable[..., Path]


@pytest.fixture
def pictures(picture: Image.Image) -> list[Image.Image]:
    return [picture.rotate(90 * turn) for turn in range(4)]


def test_a_model_in_memory_stays_as_it_is(composed: Composed, pictures: list[Image.Image], tmp_path: Path) -> None:
    model, processor = load_model(str(composed()))
    model.train()
    model.model.vision_tower.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    measured = measure(model, processor, pictures, question="what is it?", name="mine")
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    (report,) = measured.report.models
    assert (report.name, report.num_pictures) == ("mine", 4)
    assert report.gradients is None  # no picture has an answer
    assert "mine: Over 4 pictures, visual tokens enter the decoder" in str(measured)
    assert "&#" not in str(measured)
    mine = tmp_path / "report" / "figures" / "photo.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    (mine.parent / "keys.png").write_bytes(b"of a report before")
    measured.save(tmp_path / "report")
    assert mine.read_bytes() == b"mine"
    assert (mine.parent / "keys.png").exists() == ("keys" in measured.figures())
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_the_frame_has_a_row_for_each_number(composed: Composed, pictures: list[Image.Image]) -> None:
    models = {name: load_model(str(composed(projector_norm=name))) for name in ("gwc", "none")}
    measured = compare(models, pictures, num_samples=3)
    frame = measured.frame()
    assert list(frame.columns) == COLUMNS
    assert frame["model"].unique().tolist() == ["gwc", "none"]
    cosines = frame[(frame["measure"] == "layers.cosine") & (frame["model"] == "none")]
    assert cosines.groupby("modality")["layer"].apply(list).to_dict() == {"text": [0, 1], "visual": [0, 1]}
    assert (cosines["n"] == 3).all()
    assert ((cosines["low"] <= cosines["mean"]) & (cosines["mean"] <= cosines["high"])).all()
    gaps = frame[frame["measure"] == "layers.gap"].set_index(["model", "layer"])["mean"]
    turning = frame[frame["measure"] == "layers.cosine"].set_index(["model", "layer", "modality"])["mean"]
    assert gaps["gwc", 1] == pytest.approx(turning["gwc", 1, "visual"] - turning["gwc", 1, "text"])
    assert not frame.duplicated(["model", "measure", "modality", "layer"]).any()
    assert np.isfinite(frame[frame["measure"].str.startswith("layers")]["mean"]).all()


def test_the_frame_holds_the_numbers_of_the_report(composed: Composed, pictures: list[Image.Image]) -> None:
    measured = measure(*load_model(str(composed())), pictures)
    (model,) = measured.report.models
    assert model.attention is not None
    rows = {
        (measure, None if modality != modality else modality, None if layer is pd.NA else layer): (mean, low, high)
        for _, measure, modality, layer, mean, low, high, _ in measured.frame().itertuples(index=False)
    }
    for modality in ("visual", "text"):
        curve = model.layers.of(modality).cosine
        for layer in (0, 1):
            assert rows["layers.cosine", modality, layer] == (curve.mean[layer], *(curve.interval[layer] or ()))
    assert rows["interface.ratio", None, None][0] == model.interface.ratio.mean
    gap = model.layers.groups[-1].gap
    assert rows[f"layers.groups.{model.layers.groups[-1].name}.gap", None, None] == (gap.mean, *(gap.interval or ()))
    looked_at = [layer for measure, _, layer in rows if measure == "attention.with_sinks.mass"]
    assert looked_at == model.attention.layers


def test_figures_are_there_by_name(composed: Composed, pictures: list[Image.Image]) -> None:
    figures = measure(*load_model(str(composed())), pictures).figures()
    assert {"overview", "layers", "attention", "attention_maps"} <= set(figures)
    assert all(figure.axes for figure in figures.values())


def test_rows_and_what_is_wrong_with_them(composed: Composed, pictures: list[Image.Image]) -> None:
    model, processor = load_model(str(composed()))
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "seven"}]
    rows = [{"images": [picture], "conversations": turns} for picture in pictures]
    assert measure(model, processor, rows).report.models[0].gradients is not None
    with pytest.raises(ValueError, match="row 0: 1 <image> marks but 2 images"):
        measure(model, processor, [{"images": pictures[:2], "conversations": turns}])
    with pytest.raises(ValueError, match="has no pictures"):
        measure(model, processor, [])
    with pytest.raises(ValueError, match="entry 0: neither a picture nor a row: str"):
        measure(model, processor, ["0.png"])
    with pytest.raises(ValueError, match=r"a kind of models or checkpoints; got 1 and 'checkpoint'"):
        measure(model, processor, pictures, kind="checkpoint")


def test_rows_are_read_as_far_as_they_are_needed(composed: Composed, pictures: list[Image.Image]) -> None:
    """In any colour space, and under `image` as in LLaVA's data; under no_grad, with frozen weights."""
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "seven"}]
    read: list[int] = []

    class Rows(list):
        def __iter__(self) -> Iterator[dict]:
            for number, picture in enumerate(pictures * 100):
                read.append(number)
                yield {"image": picture.convert("CMYK"), "conversations": turns}

    model, processor = load_model(str(composed()))
    model.requires_grad_(False)
    with torch.no_grad():
        report = measure(model, processor, Rows(), num_samples=3).report
    assert (report.num_pictures, len(read)) == (3, 4)
    assert report.models[0].gradients is not None


def test_models_in_memory_with_a_problem(composed: Composed, pictures: list[Image.Image]) -> None:
    model, processor = load_model(str(composed()))
    with pytest.raises(DiagnosticsError, match=r"^mine: It has layers 0 to 1, got --layers 9"):
        measure(model, processor, pictures, name="mine", closeup=Closeup(layers=[9]))


def test_a_picture_in_memory_is_turned_as_its_file_is(pictures: list[Image.Image], tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    pictures[0].resize((48, 32)).save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as opened:
        in_memory = find_questions([opened], "What?", 1).questions[0]
    in_folder = find_questions(str(tmp_path), "What?", 1).questions[0]
    assert in_memory.images[0].size == (32, 48)
    assert in_memory.images[0].tobytes() == in_folder.images[0].tobytes()
    with pytest.raises(BadRowError, match=r"picture 0: its picture can't be read \(pixels of mode F have no known"):
        find_questions([Image.new("F", (4, 4))], "What?", 1)


def test_there_must_be_a_picture_to_measure(composed: Composed, pictures: list[Image.Image]) -> None:
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"num_samples must be at least 1, got {number}"):
            measure(*load_model(str(composed())), pictures, num_samples=number)
