"""Tests of measuring models in memory, as in a notebook."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image
from transformers import PreTrainedModel

from normllava.diagnostics import compare, measure
from normllava.diagnostics.loading import Question, load_model, load_questions, questions_about
from normllava.diagnostics.probe import Record
from normllava.diagnostics.recording import record_questions
from normllava.diagnostics.table import COLUMNS
from normllava.inputs import prepare_inputs
from normllava.parts import DiagnosticsError


# The type of the fixture `make_model_folder`, which makes a small model and returns its folder.
MakeModelFolder = Callable[..., Path]


@pytest.fixture
def pictures(picture: Image.Image) -> list[Image.Image]:
    """Four different pictures."""
    return [picture.rotate(90 * number) for number in range(4)]


def record_first(model: PreTrainedModel, processor: Any, questions: list[Question]) -> Record:
    """The record of the first question."""
    return record_questions(model, processor, questions[:1], layers=[0], title="")[0]


def test_a_model_in_memory_stays_as_it_is(make_model_folder: MakeModelFolder, pictures: list[Image.Image]) -> None:
    model, processor = load_model(str(make_model_folder()))
    model.train()
    model.model.vision_tower.eval()
    weights_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes_before = [module.training for module in model.modules()]

    measure(model, processor, pictures, question="what is it?")
    assert [module.training for module in model.modules()] == modes_before
    assert model.state_dict().keys() == weights_before.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights_before[name])


def test_nothing_is_kept_for_a_backward_pass(make_model_folder: MakeModelFolder, pictures: list[Image.Image]) -> None:
    """A graph for the backward pass would take more memory than asking a question does."""
    model, processor = load_model(str(make_model_folder()))
    needs_gradient: list[bool] = []

    def see_output(layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        needs_gradient.append(output.requires_grad)

    model.get_decoder().layers[-1].register_forward_hook(see_output)
    measure(model, processor, pictures, question="what is it?")
    assert needs_gradient == [False] * len(pictures)


def test_a_comparison_is_saved_in_the_place_of_an_earlier_one(
    make_model_folder: MakeModelFolder, pictures: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving removes an earlier report's figures from the folder, and no other file."""
    measured = measure(*load_model(str(make_model_folder())), pictures, question="what is it?", name="mine")
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "photo.png").write_bytes(b"a file of the user's")
    (figures / "keys.png").write_bytes(b"a figure of an earlier report")
    monkeypatch.setattr(type(measured), "figures", lambda comparison: {})  # no figure is drawn
    measured.save(tmp_path)
    assert [path.name for path in figures.iterdir()] == ["photo.png"]

    means = pd.read_csv(tmp_path / "report.csv")["mean"]
    assert means.tolist() == pytest.approx(measured.frame()["mean"].tolist(), nan_ok=True)
    assert len(pd.read_csv(tmp_path / "rows.csv")) == len(measured.rows)

    # Printed, a comparison has the lines at the top of the report.
    assert "\nmine:\n- Image embeddings enter with " in str(measured)


def test_the_frame_has_means_of_the_rows(make_model_folder: MakeModelFolder, pictures: list[Image.Image]) -> None:
    models = {name: load_model(str(make_model_folder(projector_norm=name))) for name in ("gwc", "none")}
    measured = compare(models, pictures, num_samples=3)
    assert list(measured.rows.columns) == ["model", *COLUMNS]
    frame = measured.frame()
    assert not frame.duplicated(["model", "measure", "modality", "layer"]).any()

    # The measure "turning" has a value for each layer. The frame also has means over layers.
    frame_of_turning = frame[(frame["measure"] == "turning") & frame["layer"].notna()]
    assert (frame_of_turning["n"] == 3).all()
    means = frame_of_turning.set_index(["model", "layer", "modality"])["mean"]
    rows_of_turning = measured.rows[measured.rows["measure"] == "turning"]
    expected = rows_of_turning.groupby(["model", "layer", "modality"])["value"].mean()
    assert means.to_dict() == pytest.approx(expected.to_dict())


def test_the_order_of_models_does_not_change_their_rows(
    make_model_folder: MakeModelFolder, pictures: list[Image.Image]
) -> None:
    with_norm = load_model(str(make_model_folder(projector_norm="gwc")))
    without_norm = load_model(str(make_model_folder(projector_norm="none")))
    rows = compare({"with": with_norm, "without": without_norm}, pictures, num_samples=3).rows
    rows_in_other_order = compare({"without": without_norm, "with": with_norm}, pictures, num_samples=3).rows

    for name in ("with", "without"):
        rows_of_model = rows[rows["model"] == name].reset_index(drop=True)
        expected = rows_in_other_order[rows_in_other_order["model"] == name].reset_index(drop=True)
        pd.testing.assert_frame_equal(rows_of_model, expected)


def test_an_error_names_the_model_or_the_picture(
    make_model_folder: MakeModelFolder, pictures: list[Image.Image]
) -> None:
    model, processor = load_model(str(make_model_folder()))
    with pytest.raises(DiagnosticsError, match=r"^mine: The decoder has layers 0 to 1, got --layers 9"):
        measure(model, processor, pictures, name="mine", layers=[9])

    processor.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DiagnosticsError, match="picture 0: The processor can't prepare it: System role"):
        measure(model, processor, pictures)


def test_pictures_in_memory_give_the_same_questions_as_a_folder(pictures: list[Image.Image], tmp_path: Path) -> None:
    """A picture is turned as its EXIF data says, and counts once if it is given twice."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # turned by 90 degrees
    pictures[0].resize((48, 32)).save(tmp_path / "a.png", exif=exif)
    pictures[1].convert("RGBA").save(tmp_path / "b.png")
    in_folder = load_questions(tmp_path, num_samples=2, question="What?").questions

    turned = Image.open(tmp_path / "a.png")
    turned_again = Image.open(tmp_path / "a.png")
    transparent = Image.open(tmp_path / "b.png")
    one_too_many = pictures[2]
    in_memory = questions_about([turned, turned_again, transparent, one_too_many], "What?", num_samples=2).questions
    assert [question.fingerprint for question in in_memory] == [question.fingerprint for question in in_folder]
    assert [question.prompt for question in in_memory] == [question.prompt for question in in_folder]


def test_chat_tokens_without_a_role_are_no_text(
    pictures: list[Image.Image], make_model_folder: MakeModelFolder
) -> None:
    """Llama 3 has such tokens: its tokenizer marks them as special, but no role in its config names them."""
    questions = questions_about(pictures, "what is it?", 1).questions
    model, processor = load_model(str(make_model_folder()))
    record_with_roles = record_first(model, processor, questions)

    processor.tokenizer._extra_special_tokens = []  # the chat tokens now have no role
    assert processor.tokenizer.convert_tokens_to_ids("<|im_start|>") not in processor.tokenizer.all_special_ids
    record_without_roles = record_first(model, processor, questions)
    assert torch.equal(record_without_roles.tokens.text, record_with_roles.tokens.text)


def test_without_a_chat_template_the_prompt_is_the_picture_and_the_text(
    pictures: list[Image.Image], make_model_folder: MakeModelFolder
) -> None:
    questions = questions_about(pictures, "what is it?", 1).questions
    model, processor = load_model(str(make_model_folder()))
    processor.chat_template = None
    record = record_first(model, processor, questions)
    image_tokens = "<|image_pad|>" * 4  # the picture has 2 x 2 patches
    assert processor.tokenizer.decode(record.input_ids) == f"{image_tokens}\nwhat is it?"


def test_labels_that_a_processor_returns_are_left_out(
    pictures: list[Image.Image], make_model_folder: MakeModelFolder
) -> None:
    """PaliGemma's processor returns labels, which are for training."""
    (question,) = questions_about(pictures, "what is it?", 1).questions
    model, _ = load_model(str(make_model_folder()))

    def process(**options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 2)}

    assert list(prepare_inputs(model, process, question.prompt)) == ["input_ids"]
