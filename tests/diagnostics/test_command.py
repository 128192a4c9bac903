"""The command as a user runs it: from models and pictures on disk to the report; and what it refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from diagnostics import measure
from diagnostics.__main__ import main
from diagnostics.loading import load_model, load_questions
from diagnostics.model_report import record_samples
from diagnostics.report import Report
from conversations.records import from_json
from diagnostics.comparison import prepare_samples
from modeling_normllava import NormLlavaForConditionalGeneration
from training.compose import compose


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


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["diagnostics", *map(str, arguments)])
    main()


def read(folder: Path) -> Report:
    return from_json(Report, json.loads((folder / "report.json").read_text()), folder)


@pytest.mark.slow
def test_two_models_side_by_side(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report"
    names = ("without", r"with <script>| $\frac{a")
    models = (composed(projector_norm="none"), composed())
    run(monkeypatch, "--model", *models, "--names", *names, "--data", data, "--output_dir", out)
    report = read(out)
    assert (report.data, report.num_pictures, report.passed_over) == ("questions.json", 3, 1)
    before, after = report.models
    assert (before.name, after.name) == names
    assert after.summary.look("ratio_to_vocabulary").mean == pytest.approx(1, abs=0.01)  # what composing sets
    assert before.summary.look("gain_l2") is None
    assert after.summary.look("gain_drift").mean == pytest.approx(0, abs=1e-6)
    assert after.excluded["special"] > 0
    assert after.num_tokens["visual"] == 3 * 4
    assert before.weights != after.weights is not None
    page = (out / "report.html").read_text()
    assert "<script" not in page
    assert "with &lt;script&gt;|" in page
    figures = {path.stem for path in (out / "figures").glob("*.png")}
    assert page.count("<img") == len(figures) == 5
    assert figures == {path.stem for path in (out / "figures").glob("*.pdf")}


def test_layers_are_checked_before_anything_is_loaded(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("diagnostics.__main__.load_model", lambda *args, **kwargs: loaded.append(args))
    rest = ("--data", data, "--output_dir", tmp_path / "report")
    with pytest.raises(SystemExit, match=r"It has layers 0 to 1, got --layers 0 9"):
        run(monkeypatch, "--model", composed(), *rest, "--layers", "0", "9")
    with pytest.raises(SystemExit, match=f"--model {tmp_path}/none: Repo id must be"):
        run(monkeypatch, "--model", composed(), f"{tmp_path}/none", *rest)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"--output_dir: .*File exists"):
        run(monkeypatch, "--model", composed(), "--data", data, "--output_dir", tmp_path / "file")
    assert loaded == []


def test_two_models_of_one_name_are_refused(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model", composed(), composed(), "--data", data, "--output_dir", tmp_path / "r")
    assert "two models have the same name" in capsys.readouterr().err


def test_data_without_pictures(tmp_path: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}]))
    with pytest.raises(SystemExit, match=r"has no pictures to ask about \(1 rows without one"):
        run(monkeypatch, "--model", composed(), "--data", path, "--output_dir", tmp_path / "report")


def test_options_for_other_data_are_refused(
    tmp_path: Path, data: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGB", (30, 20)).save(pictures / "0.png")
    for source, option in ((pictures, "--image_folder"), (pictures, "--split"), (data, "--question")):
        with pytest.raises(SystemExit, match=f"{option} is not used, because {source} holds "):
            run(monkeypatch, "--model", composed(), "--data", source, "--output_dir", tmp_path / "r", option, "x")


def test_a_model_without_pictures(
    backbones: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"not an image-text model: .* the config LlamaConfig"):
        run(monkeypatch, "--model", backbones("llama"), "--data", data, "--output_dir", tmp_path / "report")


def test_bfloat16_and_offloaded_weights_give_the_same_numbers(data: Path, composed: Composed, tmp_path: Path) -> None:
    questions = load_questions(str(data), 2).questions
    model, processor = load_model(str(composed()), dtype="float32")

    def record(model: Any, count: int = 2) -> list:
        return record_samples(model, prepare_samples(model, processor, questions[:count]), [0, 1])

    records = record(model)
    half, _ = load_model(str(composed()), dtype="bfloat16")
    (rounded,) = record(half, 1)
    assert rounded.layer_norms.dtype == rounded.cosines.dtype == torch.float32
    assert torch.allclose(rounded.layer_norms, records[0].layer_norms, rtol=0.05)

    device_map = {
        "model.vision_tower": "cpu",
        "model.multi_modal_projector": "disk",
        "model.language_model.embed_tokens": "disk",
        "model.language_model.layers.0": "cpu",
        "model.language_model.layers.1": "disk",
        "model.language_model.norm": "cpu",
        "model.language_model.rotary_emb": "cpu",
        "lm_head": "disk",
    }
    spread = NormLlavaForConditionalGeneration.from_pretrained(
        composed(), device_map=device_map, offload_folder=tmp_path / "offload", dtype=torch.float32
    ).eval()
    offloaded = record(spread)
    for one, other in zip(records, offloaded, strict=True):
        assert torch.equal(one.cosines, other.cosines)
        assert torch.equal(one.keys[1], other.keys[1])
        assert torch.equal(one.attention[1], other.attention[1])


@pytest.mark.slow
def test_four_bit_weights_are_measured(data: Path, backbones: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    # bitsandbytes on CPU multiplies weights whose sides are multiples of 32 and 64.
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 16}
    config = AutoConfig.from_pretrained(backbones("qwen2"), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "text")
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path / "text")
    model, processor = compose(str(backbones("siglip")), str(tmp_path / "text"), "gwc")
    model.save_pretrained(tmp_path / "composed")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4",
        llm_int8_skip_modules=["vision_tower", "multi_modal_projector", "lm_head"],
    )  # fmt: skip
    quantized = NormLlavaForConditionalGeneration.from_pretrained(
        tmp_path / "composed", quantization_config=quantization, dtype=torch.float32
    )
    (measured,) = measure(quantized, processor, str(data)).report.models
    assert measured.dtype == "float32, quantized"
    assert measured.summary.look("keys.mmd") is not None
    assert measured.summary.look("ratio_to_vocabulary").mean == pytest.approx(1, abs=0.01)
