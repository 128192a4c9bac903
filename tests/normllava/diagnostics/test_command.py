"""The command as a user runs it: from models and pictures on disk to the report; and what the command refuses."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.diagnostics.command import main
from normllava.diagnostics.loading import Question, load_model, load_questions
from normllava.diagnostics.probe import Record
from normllava.diagnostics.recording import record_questions
from normllava.diagnostics.report import Report
from normllava.evaluation.json_records import read_record


# The type of the fixture `make_model_folder`, which makes a small model and returns its folder.
MakeModelFolder = Callable[..., Path]
QUESTIONS = ("what is it?", "<b>which | colour</b>?", "why, and how many of them are there?")


def make_turns(question: str, answer: str) -> list[dict[str, str]]:
    """A question and its answer, as a row of LLaVA data has them."""
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


@pytest.fixture
def data(tmp_path: Path, picture: Image.Image) -> Path:
    """A JSON file with one question without a picture, and with `QUESTIONS`, each about another picture."""
    rows: list[dict[str, Any]] = [{"conversations": make_turns("no picture", "none")}]
    for number, question in enumerate(QUESTIONS):
        picture.rotate(90 * number).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "conversations": make_turns(f"<image>\n{question}", "seven")})
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(rows))
    return path


def run(*arguments: object) -> None:
    """Run the command."""
    main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_two_models_side_by_side_and_a_third_that_fails(
    make_model_folder: MakeModelFolder, data: Path, tmp_path: Path
) -> None:
    """What was measured before the failure is kept, as the report of the first two models."""
    without_norm = make_model_folder(projector_norm="none")
    with_norm = make_model_folder()
    broken = shutil.copytree(make_model_folder(), tmp_path / "broken")
    (broken / "model.safetensors").unlink()

    output = tmp_path / "report"
    models = ("--model", without_norm, with_norm, broken, "--names", "without", "with", "broken")
    word = "them"  # a word of the last question
    with pytest.raises(SystemExit, match="no file named"):  # transformers' error for missing weights
        run(*models, "--data", data, "--attention_map", word, "--output_dir", output)

    report = read_record(Report, output / "report.json")
    assert report.data == "questions.json"
    assert report.passed_over == 1  # the question without a picture
    first, second = report.models
    assert first.name == "without"
    assert second.name == "with"
    assert second.num_pictures == 3
    assert second.num_tokens["image"] == 3 * 4  # a picture has 2 x 2 patches
    assert second.excluded["special"] > 0
    # Composing gives image embeddings the norm of text embeddings.
    assert second.summary.look("ratio_to_vocabulary").mean == pytest.approx(1, abs=0.01)
    assert second.summary.look("gain_drift").mean == pytest.approx(0, abs=1e-6)  # the model was not trained
    assert first.summary.look("gain_l2") is None  # without a norm module there is no gain
    # `weights` is a fingerprint of the model's weights.
    assert first.weights is not None
    assert second.weights is not None
    assert first.weights != second.weights

    page = (output / "report.html").read_text()
    assert f"Command: normllava diagnose --model {without_norm}" in page
    figures = {path.stem for path in (output / "figures").glob("*.png")}
    assert figures == {"overview", "layers", "attention_map", "keys", "key_map"}
    assert figures == {path.stem for path in (output / "figures").glob("*.pdf")}
    assert page.count("<img") == len(figures)


@pytest.fixture
def loaded_models(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The arguments of each call that would load a model. With this fixture, no model is loaded."""
    loaded: list[object] = []
    monkeypatch.setattr("normllava.diagnostics.command.load_model", lambda *args, **kwargs: loaded.append(args))
    return loaded


def test_a_second_model_that_is_missing_is_refused_before_the_first_is_loaded(
    make_model_folder: MakeModelFolder, data: Path, tmp_path: Path, loaded_models: list[object]
) -> None:
    missing = tmp_path / "none"
    output = tmp_path / "report"
    with pytest.raises(SystemExit, match=f"{missing}: there is no such folder"):
        run("--model", make_model_folder(), missing, "--data", data, "--output_dir", output)
    assert loaded_models == []
    assert not output.exists()


def test_a_language_model_is_refused_before_a_model_is_loaded(
    make_model_folder: MakeModelFolder,
    backbones: Callable[[str], Path],
    data: Path,
    tmp_path: Path,
    loaded_models: list[object],
) -> None:
    output = tmp_path / "report"
    with pytest.raises(SystemExit, match="qwen2 takes no pictures, it has only a tokenizer"):
        run("--model", make_model_folder(), backbones("qwen2"), "--data", data, "--output_dir", output)
    assert loaded_models == []
    assert not output.exists()


def test_two_models_with_the_same_name_are_refused(
    make_model_folder: MakeModelFolder,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    loaded_models: list[object],
) -> None:
    output = tmp_path / "report"
    with pytest.raises(SystemExit):
        run("--model", make_model_folder(), make_model_folder(), "--data", data, "--output_dir", output)
    assert "two models have the same name" in capsys.readouterr().err
    assert loaded_models == []
    assert not output.exists()


def test_data_without_pictures_is_refused_before_a_model_is_loaded(
    make_model_folder: MakeModelFolder, tmp_path: Path, loaded_models: list[object]
) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}]))
    output = tmp_path / "report"
    with pytest.raises(SystemExit, match=r"has no pictures to ask about \(1 rows without one"):
        run("--model", make_model_folder(), "--data", texts, "--output_dir", output)
    assert loaded_models == []
    assert not output.exists()


def test_a_word_that_no_question_has_is_refused_before_a_model_is_loaded(
    make_model_folder: MakeModelFolder, data: Path, tmp_path: Path, loaded_models: list[object]
) -> None:
    output = tmp_path / "report"
    with pytest.raises(SystemExit, match=r'error: --attention_map: no question .* has "zebra"'):
        run("--model", make_model_folder(), "--data", data, "--attention_map", "zebra", "--output_dir", output)
    assert loaded_models == []


def record_all(model: PreTrainedModel, processor: Any, questions: Sequence[Question]) -> list[Record]:
    """A record of each question, with attention, keys and values of both layers."""
    return record_questions(model, processor, questions, layers=[0, 1], title="")


def test_a_model_in_bfloat16_gives_float32_numbers_that_are_nearly_the_same(
    data: Path, make_model_folder: MakeModelFolder
) -> None:
    questions = load_questions(data, num_samples=1).questions
    model, processor = load_model(str(make_model_folder()), dtype="float32")
    (record,) = record_all(model, processor, questions)

    model_in_bfloat16, _ = load_model(str(make_model_folder()), dtype="bfloat16")
    (rounded,) = record_all(model_in_bfloat16, processor, questions)
    assert rounded.layer_norms.dtype == torch.float32
    assert rounded.cosines.dtype == torch.float32
    assert torch.allclose(rounded.layer_norms, record.layer_norms, rtol=0.05)


def test_a_model_with_offloaded_weights_gives_the_same_numbers(
    data: Path, make_model_folder: MakeModelFolder, tmp_path: Path
) -> None:
    questions = load_questions(data, num_samples=2).questions
    model, processor = load_model(str(make_model_folder()), dtype="float32")
    records = record_all(model, processor, questions)

    device_map = {
        "model.vision_tower": "cpu",
        "model.multi_modal_projector": "disk",
        "model.language_model.embed_tokens": "disk",
        "model.language_model.rotary_emb": "cpu",
        "model.language_model.layers.0": "cpu",
        "model.language_model.layers.1": "disk",
        "model.language_model.norm": "cpu",
        "lm_head": "disk",
    }
    offloaded_model = NormLlavaForConditionalGeneration.from_pretrained(
        make_model_folder(), device_map=device_map, offload_folder=tmp_path / "offload", dtype=torch.float32
    ).eval()
    offloaded_records = record_all(offloaded_model, processor, questions)

    for record, offloaded in zip(records, offloaded_records, strict=True):
        assert torch.equal(record.cosines, offloaded.cosines)
        assert torch.equal(record.keys[1], offloaded.keys[1])
        assert torch.equal(record.attention[1], offloaded.attention[1])
