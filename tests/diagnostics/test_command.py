"""The command as a user runs it: from models and pictures on disk to the report; and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from common.records import read_record
from diagnostics.__main__ import main
from diagnostics.loading import load_model, load_questions
from diagnostics.recording import record_questions
from diagnostics.report import Report
from modeling_normllava import NormLlavaForConditionalGeneration


Composed = Callable[..., Path]


@pytest.fixture
def data(tmp_path: Path, picture: Image.Image) -> Path:
    """Three questions about pictures, and one without."""
    rows = []
    for turn, question in enumerate(("what is it?", "<b>which | colour</b>?", "why, and how many of them are there?")):
        picture.rotate(90 * turn).save(tmp_path / f"{turn}.png")
        turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": "seven"}]
        rows.append({"image": f"{turn}.png", "conversations": turns})
    rows.insert(1, {"conversations": [{"from": "human", "value": "no picture"}, {"from": "gpt", "value": "none"}]})
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(rows))
    return path


def run(*arguments: object) -> None:
    """Run the command."""
    main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_two_models_side_by_side(composed: Composed, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    names = ("without", "with")
    models = (composed(projector_norm="none"), composed())
    broken = shutil.copytree(composed(), tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    named = ("--model", *models, broken, "--names", *names, "broken")
    with pytest.raises(SystemExit, match="no file named"):  # what was measured before is kept
        run(*named, "--data", data, "--attention_map", "them", "--output_dir", out)
    report = read_record(Report, out / "report.json")
    assert (report.data, report.passed_over) == ("questions.json", 1)
    before, after = report.models
    assert (before.name, after.name) == names
    assert after.summary.look("ratio_to_vocabulary").mean == pytest.approx(1, abs=0.01)  # what composing sets
    assert before.summary.look("gain_l2") is None
    assert after.summary.look("gain_drift").mean == pytest.approx(0, abs=1e-6)
    assert after.excluded["special"] > 0
    assert (after.num_pictures, after.num_tokens["visual"]) == (3, 3 * 4)
    assert before.weights != after.weights is not None
    page = (out / "report.html").read_text()
    assert f"Command: python -m diagnostics --model {models[0]}" in page
    figures = {path.stem for path in (out / "figures").glob("*.png")}
    assert page.count("<img") == len(figures)
    assert figures == {"overview", "layers", "attention_map", "keys", "key_map"}
    assert figures == {path.stem for path in (out / "figures").glob("*.pdf")}


def test_what_is_refused_before_a_model_is_loaded(
    backbones: Callable[[str], Path],
    composed: Composed,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("diagnostics.__main__.load_model", lambda *args, **kwargs: loaded.append(args))
    rest = ("--output_dir", tmp_path / "report")
    with pytest.raises(SystemExit, match=f"{tmp_path}/none: there is no such folder"):
        run("--model", composed(), f"{tmp_path}/none", "--data", data, *rest)
    with pytest.raises(SystemExit, match="qwen2 takes no pictures, it has only a tokenizer"):
        run("--model", composed(), backbones("qwen2"), "--data", data, *rest)
    with pytest.raises(SystemExit):
        run("--model", composed(), composed(), "--data", data, *rest)
    assert "two models have the same name" in capsys.readouterr().err
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}]))
    with pytest.raises(SystemExit, match=r"has no pictures to ask about \(1 rows without one"):
        run("--model", composed(), "--data", texts, *rest)
    assert (loaded, (tmp_path / "report").exists()) == ([], False)

    with pytest.raises(SystemExit, match=r'error: --attention_map: no question .* has "zebra"'):
        run("--model", composed(), "--data", data, "--attention_map", "zebra", *rest)
    assert loaded == []


def test_bfloat16_and_offloaded_weights_give_the_same_numbers(data: Path, composed: Composed, tmp_path: Path) -> None:
    questions = load_questions(data, 2).questions
    model, processor = load_model(str(composed()), dtype="float32")

    def record(model: Any, count: int = 2) -> list:
        return record_questions(model, processor, questions[:count], [0, 1], "")

    records = record(model)
    half, _ = load_model(str(composed()), dtype="bfloat16")
    (rounded,) = record(half, 1)
    assert rounded.layer_norms.dtype == rounded.cosines.dtype == torch.float32
    assert torch.allclose(rounded.layer_norms, records[0].layer_norms, rtol=0.05)

    decoder = "model.language_model"
    on_cpu = ("model.vision_tower", f"{decoder}.layers.0", f"{decoder}.norm", f"{decoder}.rotary_emb")
    on_disk = ("model.multi_modal_projector", f"{decoder}.embed_tokens", f"{decoder}.layers.1", "lm_head")
    device_map = dict.fromkeys(on_cpu, "cpu") | dict.fromkeys(on_disk, "disk")
    spread = NormLlavaForConditionalGeneration.from_pretrained(
        composed(), device_map=device_map, offload_folder=tmp_path / "offload", dtype=torch.float32
    ).eval()
    for one, other in zip(records, record(spread), strict=True):
        assert torch.equal(one.cosines, other.cosines)
        assert torch.equal(one.keys[1], other.keys[1])
        assert torch.equal(one.attention[1], other.attention[1])
