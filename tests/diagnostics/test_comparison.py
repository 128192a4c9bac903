"""Measuring models in memory, as in a notebook."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image
from transformers import PreTrainedModel

from diagnostics import compare, measure
from diagnostics.loading import Question, load_model, load_questions, questions_about
from diagnostics.parts import DiagnosticsError
from diagnostics.probe import Record
from diagnostics.recording import prepare_inputs, record_questions
from diagnostics.table import COLUMNS


Composed = Callable[..., Path]


@pytest.fixture
def pictures(picture: Image.Image) -> list[Image.Image]:
    return [picture.rotate(90 * turn) for turn in range(4)]


def record(model: PreTrainedModel, processor: Any, questions: list[Question]) -> Record:
    return record_questions(model, processor, questions, [0], "")[0]


def test_a_model_in_memory_stays_as_it_is(
    composed: Composed, pictures: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and modes stay. Nothing is kept for a backward pass, which would need more memory than a question."""
    model, processor = load_model(str(composed()))
    model.train()
    model.model.vision_tower.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    needs_gradient: list[bool] = []
    model.get_decoder().layers[-1].register_forward_hook(
        lambda layer, args, output: needs_gradient.append(output.requires_grad)
    )
    measured = measure(model, processor, pictures, question="what is it?", name="mine")
    assert needs_gradient == [False] * 4
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "mine: Over 4 pictures, image tokens enter the decoder" in str(measured)

    # Saving removes an earlier report's figures from the folder, and no other file.
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "photo.png").write_bytes(b"a file of the user's")
    (figures / "keys.png").write_bytes(b"a figure of an earlier report")
    monkeypatch.setattr(type(measured), "figures", lambda measured: {})
    measured.save(tmp_path)
    assert [path.name for path in figures.iterdir()] == ["photo.png"]

    written = pd.read_csv(tmp_path / "report.csv")
    assert written["mean"].tolist() == pytest.approx(measured.frame()["mean"].tolist(), nan_ok=True)
    assert len(pd.read_csv(tmp_path / "rows.csv")) == len(measured.rows)


def test_rows_and_their_summary(composed: Composed, pictures: list[Image.Image]) -> None:
    models = {name: load_model(str(composed(projector_norm=name))) for name in ("gwc", "none")}
    measured = compare(models, pictures, num_samples=3)
    assert list(measured.rows.columns) == ["model", *COLUMNS]
    frame = measured.frame()
    assert not frame.duplicated(["model", "measure", "modality", "layer"]).any()
    for name in models:
        means = frame[(frame["measure"] == "turning") & (frame["model"] == name) & frame["layer"].notna()]
        assert (means["n"] == 3).all()
        rows = measured.rows[(measured.rows["measure"] == "turning") & (measured.rows["model"] == name)]
        expected = rows.groupby(["layer", "modality"])["value"].mean()
        assert means.set_index(["layer", "modality"])["mean"].to_dict() == pytest.approx(expected.to_dict())
    # Neither another model nor the order changes what is found.
    turned = compare(dict(reversed(models.items())), pictures, num_samples=3).rows
    for name in models:
        in_order, reversed_order = (
            rows[rows["model"] == name].reset_index(drop=True) for rows in (measured.rows, turned)
        )
        pd.testing.assert_frame_equal(in_order, reversed_order)


def test_what_is_wrong_is_named(composed: Composed, pictures: list[Image.Image]) -> None:
    model, processor = load_model(str(composed()))
    with pytest.raises(DiagnosticsError, match=r"^mine: It has layers 0 to 1, got --layers 9"):
        measure(model, processor, pictures, name="mine", layers=[9])
    processor.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DiagnosticsError, match="picture 0: The processor can't prepare it: System role"):
        measure(model, processor, pictures)


def test_pictures_in_memory_are_those_of_a_folder(pictures: list[Image.Image], tmp_path: Path) -> None:
    """Both are turned as their EXIF data says, and the same picture counts once."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    pictures[0].resize((48, 32)).save(tmp_path / "a.png", exif=exif)
    pictures[1].convert("RGBA").save(tmp_path / "b.png")
    opened = [Image.open(tmp_path / f"{name}.png") for name in ("a", "a", "b")]
    in_memory = questions_about([*opened, pictures[2]], "What?", 2).questions
    in_folder = load_questions(tmp_path, 2, "What?").questions
    assert [question.fingerprint for question in in_memory] == [question.fingerprint for question in in_folder]
    assert [question.prompt for question in in_memory] == [question.prompt for question in in_folder]


def test_chat_tokens_without_a_role_are_no_text(pictures: list[Image.Image], composed: Composed) -> None:
    """Llama 3 has such tokens: its tokenizer marks them as special, but no role in its config names them."""
    questions = questions_about(pictures, "what is it?", 1).questions
    model, processor = load_model(str(composed()))
    before = record(model, processor, questions)
    processor.tokenizer._extra_special_tokens = []
    assert processor.tokenizer.convert_tokens_to_ids("<|im_start|>") not in processor.tokenizer.all_special_ids
    after = record(model, processor, questions)
    assert torch.equal(after.tokens.text, before.tokens.text)


def test_a_processor_without_a_chat_template(pictures: list[Image.Image], composed: Composed) -> None:
    questions = questions_about(pictures, "what is it?", 1).questions
    model, processor = load_model(str(composed()))
    processor.chat_template = None
    text = processor.tokenizer.decode(record(model, processor, questions).input_ids)
    assert text == "<|image_pad|>" * 4 + "\nwhat is it?"


def test_labels_that_a_processor_returns_are_left_out(pictures: list[Image.Image], composed: Composed) -> None:
    """PaliGemma's processor returns labels, which are for training."""
    (question,) = questions_about(pictures, "what is it?", 1).questions
    model, _ = load_model(str(composed()))

    def process(**options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 2)}

    assert list(prepare_inputs(model, process, question.prompt)) == ["input_ids"]
