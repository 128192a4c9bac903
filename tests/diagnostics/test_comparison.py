"""Measuring models in memory, as in a notebook."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image

from conversations.rows import BadRowError
from diagnostics import compare, measure
from diagnostics.comparison import find_questions
from diagnostics.loading import load_model
from diagnostics.parts import DiagnosticsError
from diagnostics.table import COLUMNS


Composed = Callable[..., Path]


@pytest.fixture
def pictures(picture: Image.Image) -> list[Image.Image]:
    return [picture.rotate(90 * turn) for turn in range(4)]


def test_a_model_in_memory_stays_as_it_is(
    composed: Composed, pictures: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept for a backward pass, for which a model that can be asked may have no room."""
    model, processor = load_model(str(composed()))
    model.train()
    model.model.vision_tower.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    needed: list[bool] = []
    model.get_decoder().layers[-1].register_forward_hook(lambda *of: needed.append(of[-1].requires_grad))
    measured = measure(model, processor, pictures, question="what is it?", name="mine")
    assert needed == [False] * 4
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    (report,) = measured.report.models
    assert (report.name, report.num_pictures) == ("mine", 4)
    assert "mine: Over 4 pictures, visual tokens enter the decoder" in str(measured)

    mine = tmp_path / "figures" / "photo.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    (mine.parent / "keys.png").write_bytes(b"of a report before")
    monkeypatch.setattr(type(measured), "figures", lambda measured: {})
    measured.save(tmp_path)
    assert mine.read_bytes() == b"mine"
    assert not (mine.parent / "keys.png").exists()
    assert "<img" not in (tmp_path / "report.html").read_text()
    written = pd.read_csv(tmp_path / "report.csv")
    assert written["mean"].tolist() == pytest.approx(measured.frame()["mean"].tolist(), nan_ok=True)
    assert len(pd.read_csv(tmp_path / "rows.csv")) == len(measured.rows)


def test_rows_and_their_summary(composed: Composed, pictures: list[Image.Image]) -> None:
    models = {name: load_model(str(composed(projector_norm=name))) for name in ("gwc", "none")}
    measured = compare(models, pictures, num_samples=3)
    assert list(measured.rows.columns) == ["model", *COLUMNS]
    assert {"overview", "layers", "attention_maps"} <= set(measured.figures())
    frame = measured.frame()
    assert not frame.duplicated(["model", "measure", "modality", "layer"]).any()
    for name in models:
        turning = frame[(frame["measure"] == "turning") & (frame["model"] == name) & frame["layer"].notna()]
        assert turning.groupby("modality")["layer"].apply(list).to_dict() == {"text": [0, 1], "visual": [0, 1]}
        assert (turning["n"] == 3).all()
        assert ((turning["low"] <= turning["mean"]) & (turning["mean"] <= turning["high"])).all()
        rows = measured.rows[(measured.rows["measure"] == "turning") & (measured.rows["model"] == name)]
        means = rows.groupby(["layer", "modality"])["value"].mean()
        assert means.tolist() == pytest.approx(turning.set_index(["layer", "modality"])["mean"][means.index].tolist())
    # Neither another model nor the order changes what is found.
    turned = compare(dict(reversed(models.items())), pictures, num_samples=3).rows
    for name in models:
        of = [rows[rows["model"] == name].reset_index(drop=True) for rows in (measured.rows, turned)]
        pd.testing.assert_frame_equal(*of)


def test_rows_and_what_is_wrong_with_them(composed: Composed, pictures: list[Image.Image]) -> None:
    model, processor = load_model(str(composed()))
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "seven"}]
    with pytest.raises(ValueError, match="row 0: 1 <image> marks but 2 images"):
        measure(model, processor, [{"images": pictures[:2], "conversations": turns}])
    with pytest.raises(ValueError, match="has no pictures"):
        measure(model, processor, [])
    with pytest.raises(ValueError, match="entry 0: neither a picture nor a row: str"):
        measure(model, processor, ["0.png"])
    with pytest.raises(DiagnosticsError, match=r"^mine: It has layers 0 to 1, got --layers 9"):
        measure(model, processor, pictures, name="mine", layers=[9])
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"num_samples must be at least 1, got {number}"):
            measure(model, processor, pictures, num_samples=number)


def test_rows_are_read_as_far_as_they_are_needed(composed: Composed, pictures: list[Image.Image]) -> None:
    """In any colour space, and under `image` as in LLaVA's data."""
    turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "seven"}]
    read: list[int] = []

    class Rows(list):
        def __iter__(self) -> Iterator[dict]:
            for number, picture in enumerate(pictures * 100):
                read.append(number)
                yield {"image": picture.convert("CMYK"), "conversations": turns}

    model, processor = load_model(str(composed()))
    assert (measure(model, processor, Rows(), num_samples=3).report.num_pictures, len(read)) == (3, 4)


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
