"""The command as a user runs it: from models and pictures on disk to the report; and what it refuses."""

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from diagnostics import compare
from diagnostics.__main__ import main
from diagnostics.loading import load_model, load_questions
from diagnostics.model_report import (
    GRADIENT_SAMPLES,
    OTHER_PROMPTS,
    Closeup,
    SharedBases,
    measure_model,
    record_samples,
)
from diagnostics.results import ModelReport, Report, from_json, to_json
from diagnostics.samples import prepare_samples
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


class Page(HTMLParser):
    """Collects tags and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
def test_two_models_side_by_side(
    composed: Composed, backbones: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report"
    plain = composed(projector_norm="none")
    names = ("without", r"with <script>| $\frac{a")
    base = ("--base_model", backbones("qwen2"))
    run(monkeypatch, "--model", plain, composed(), "--names", *names, *base, "--data", data, "--output_dir", out)
    report = read(out)
    assert (report.num_samples, report.num_pictures, report.passed_over) == (3, 3, 1)
    assert (report.data, report.compare) == ("questions.json", "models")
    before, after = report.models
    assert (before.name, after.name) == names
    assert after.interface.ratio_to_vocabulary.mean == pytest.approx(1, abs=0.01)  # what composing sets
    assert before.projector_norm is None
    assert after.projector_norm is not None
    assert after.projector_norm.gain_drift_relative == pytest.approx(0, abs=1e-6)
    assert before.gradients is not None
    assert after.gradients is not None
    assert (set(before.gradients.norms), set(after.gradients.norms)) == ({"no norm"}, {"compensated", "plain"})
    assert report.base is not None
    assert report.base.embeddings.mean == pytest.approx(after.embeddings.mean)
    assert after.excluded["special"] > 0
    assert after.num_tokens["visual"] == 3 * 4
    assert [prompted.question for prompted in after.prompts] == [None, *OTHER_PROMPTS]

    page = Page()
    page.feed((out / "report.html").read_text())
    assert "script" not in page.tags
    assert "img" not in page.tags  # figures are part of the page
    assert page.tags.count("svg") > 5
    assert "with <script>|" in page.text
    assert "visual tokens enter the decoder" in page.text
    assert not re.search(r"\bnan\b|None", page.text)
    figures = re.findall(r"\]\((figures/\w+\.png)\)", (out / "report.md").read_text())
    assert sorted(figures) == sorted(f"figures/{path.name}" for path in (out / "figures").glob("*.png"))
    assert {Path(figure).stem for figure in figures} == {path.stem for path in (out / "figures").glob("*.pdf")}


def measured_with(models: dict[str, Path], data: Path, **options: Any) -> Report:
    """What the command measures, without its figures."""
    return compare({name: load_model(str(path)) for name, path in models.items()}, data, **options).report


def test_questions_about_one_picture_are_one_sample(composed: Composed, data: Path, tmp_path: Path) -> None:
    """Copies under other paths among them. Rows counted each, and intervals were too narrow by the root of that."""
    model = {"it": composed()}
    rows = [row for row in json.loads(data.read_text()) if "image" in row]
    once = measured_with(model, data)
    (tmp_path / "copy.png").write_bytes((tmp_path / "0.png").read_bytes())
    data.write_text(json.dumps([*rows, *rows, {**rows[0], "image": "copy.png"}, *rows[1:]]))
    repeated = measured_with(model, data)
    assert (repeated.num_samples, repeated.num_pictures) == (9, 3)
    for of in (lambda model: model.layers.gap.overall, lambda model: model.interface.ratio):
        one, other = of(once.models[0]), of(repeated.models[0])
        assert (other.mean, *other.interval) == pytest.approx((one.mean, *one.interval))
    # With fewer asked for, all are different.
    few = measured_with(model, data, num_samples=2)
    assert (few.num_samples, few.num_pictures) == (2, 2)
    data.write_text(json.dumps([rows[0]] * 3))
    (alone,) = measured_with(model, data).models
    assert alone.lens is not None
    assert alone.lens.num_pictures == 1


def test_the_order_of_models_changes_nothing(composed: Composed, data: Path) -> None:
    """The divergence of one model's keys hung on which model had been named first."""
    paths = {"a": composed(), "b": composed(projector_norm="none")}
    forwards = {model.name: to_json(model) for model in measured_with(paths, data).models}
    turned = {name: paths[name] for name in "ba"}
    assert {model.name: to_json(model) for model in measured_with(turned, data).models} == forwards
    first, second = measured_with(turned, data, kind="checkpoints").models
    assert to_json(first) == forwards["b"]
    assert to_json(second.key_space) != forwards["a"]["key_space"]  # on the first one's components


def test_one_picture_has_no_interval_and_no_p(composed: Composed, data: Path) -> None:
    (model,) = measured_with({"it": composed()}, data, num_samples=1).models
    assert model.interface.ratio.interval is None
    assert model.layers.gap.interval == [None, None]
    assert model.key_space is None


@pytest.fixture
def measured(data: Path, composed: Composed) -> ModelReport:
    """A model measured on three questions."""
    questions = load_questions(str(data), 3).questions
    return measure_model(*load_model(str(composed())), questions, "it", Closeup(), SharedBases())[0]


def test_a_question_is_prepared_once(data: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for its prompt, one with its answer for those whose gradients are measured, one for each other prompt."""
    rows = json.loads(data.read_text())
    data.write_text(json.dumps(rows * 3))
    questions = load_questions(str(data), 7).questions
    model, processor = load_model(str(composed()))
    calls: list[object] = []
    prepare = type(processor).__call__
    monkeypatch.setattr(
        type(processor), "__call__", lambda *args, **kwargs: calls.append(1) or prepare(*args, **kwargs)
    )
    measure_model(model, processor, questions, "it", Closeup(), SharedBases())
    assert len(calls) == 7 + GRADIENT_SAMPLES + 3 * len(OTHER_PROMPTS)


def report_of(measured: ModelReport) -> Report:
    return Report("command", {"torch": "2"}, "data", 3, 3, 0, [], "models", [measured], None)


def test_a_report_reads_as_it_was_written(measured: ModelReport) -> None:
    written = json.loads(json.dumps(to_json(report_of(measured)), allow_nan=False))
    assert written["models"][0]["class"] == "NormLlavaForConditionalGeneration"
    again = from_json(Report, written, "report.json")
    assert to_json(again) == written
    assert again.models[0].layers == measured.layers
    assert to_json(from_json(Report, {**written, "newer": 1}, "report.json")) == written


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda report: report.pop("passed_over"), r"r\.json: no passed_over\."),
        (lambda report: report["models"][0].pop("dtype"), r"r\.json: no models\.0\.dtype\."),
        (lambda report: report["models"][0]["interface"].pop("ratio"), r"r\.json: no models\.0\.interface\.ratio\."),
        (lambda report: report["models"][0]["layers"]["gap"].update(mean=3), r"models\.0\.layers\.gap\.mean is 3\."),
        (lambda report: report["models"][0]["layers"]["gap"].update(mean=["x"]), r"gap\.mean\.0 is 'x'\."),
        (lambda report: report.update(models={}), r"r\.json: models is \{\}\."),
    ],
)
def test_what_a_report_lacks_is_named(spoil: Callable[[dict], object], message: str, measured: ModelReport) -> None:
    report = to_json(report_of(measured))
    spoil(report)
    with pytest.raises(ValueError, match=message):
        from_json(Report, report, "r.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0", "9"], r"It has layers 0 to 1, got --layers 0 9"),
        (["--heads", "7"], r"It has heads 0 to 3, got --heads 7"),
    ],
)
def test_layers_and_heads_are_checked_before_anything_is_loaded(
    arguments: list[str], message: str, composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("diagnostics.__main__.load_model", lambda *args, **kwargs: loaded.append(args))
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "--model", composed(), "--data", data, "--output_dir", tmp_path / "report", *arguments)
    assert loaded == []


def test_two_models_of_one_name_are_refused(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model", composed(), composed(), "--data", data, "--output_dir", tmp_path / "r")
    assert "two models have the same name" in capsys.readouterr().err


@pytest.mark.parametrize("query", ["-40", "0"])
def test_a_query_that_is_not_there(
    query: str, composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model", composed(), "--data", data, "--output_dir", tmp_path / "r", "--query", query)


def test_data_without_pictures(tmp_path: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}]))
    with pytest.raises(SystemExit, match=r"has no pictures to ask about \(1 rows without one"):
        run(monkeypatch, "--model", composed(), "--data", path, "--output_dir", tmp_path / "report")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="has no pictures"):
        run(monkeypatch, "--model", composed(), "--data", tmp_path / "empty", "--output_dir", tmp_path / "report")


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "0.png"}, r"row 0: `conversations` is empty or not a list of turns"),
        ({"image": "0.png", "conversations": [{"role": "user", "content": "x"}]}, r"row 0: turn 0 is not"),
        ({"image": "0.png", "conversations": [{"from": "user", "value": "x"}]}, r"row 0: turn 0 is not"),
        (
            {"image": "0.png", "conversations": [{"from": "human", "value": "x"}]},
            "row 0: 0 <image> marks but 1 images",
        ),
        (
            {"image": "0.png", "conversations": [{"from": "human", "value": "<image><image>"}]},
            "row 0: 2 <image> marks but 1 images",
        ),
        ({"image": "9.png", "conversations": [{"from": "human", "value": "<image>"}]}, r"9\.png is missing"),
    ],
)
def test_a_bad_row_is_named(
    row: dict, message: str, composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.write_text(json.dumps([row]))
    with pytest.raises(SystemExit, match=rf"--data: .*{message}"):
        run(monkeypatch, "--model", composed(), "--data", data, "--output_dir", tmp_path / "report")


def test_what_can_be_seen_first_is_checked_first(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    rest = ("--data", data, "--output_dir", tmp_path / "report")
    measured: list[object] = []
    monkeypatch.setattr("diagnostics.comparison.measure_model", lambda *args: measured.append(args))
    with pytest.raises(SystemExit, match=r"--output_dir: .*File exists"):
        run(monkeypatch, "--model", composed(), "--data", data, "--output_dir", tmp_path / "file")
    with pytest.raises(SystemExit, match=f"--base_model {tmp_path}/none: Repo id must be"):
        run(monkeypatch, "--model", composed(), "--base_model", f"{tmp_path}/none", *rest)
    with pytest.raises(SystemExit, match=f"--model {tmp_path}/none: Repo id must be"):
        run(monkeypatch, "--model", composed(), f"{tmp_path}/none", *rest)
    assert measured == []


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
    processor = AutoProcessor.from_pretrained(composed())
    measured, _ = measure_model(spread, processor, questions, "spread", Closeup(), SharedBases())
    assert measured.gradients is None
    assert any(note.startswith("gradients: not recorded") for note in measured.notes)
    assert measured.lens is not None
    for one, other in zip(records, offloaded, strict=True):
        assert torch.equal(one.cosines, other.cosines)
        assert torch.equal(one.keys[1], other.keys[1])
        assert torch.equal(one.attention[1], other.attention[1])


@pytest.mark.slow
def test_four_bit_weights_are_measured(
    data: Path, backbones: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    # bitsandbytes on CPU multiplies weights whose sides are multiples of 32 and 64.
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 16}
    config = AutoConfig.from_pretrained(backbones("qwen2"), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "text")
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path / "text")
    model, processor = compose(str(backbones("siglip")), str(tmp_path / "text"), "gwc")
    model.save_pretrained(tmp_path / "composed")
    processor.save_pretrained(tmp_path / "composed")
    out = tmp_path / "report"
    options = ("--load_in_4bit", "--dtype", "float32")
    run(monkeypatch, "--model", tmp_path / "composed", *options, "--data", data, "--output_dir", out)
    (measured,) = read(out).models
    assert measured.dtype == "float32, quantized"
    assert measured.key_space is not None
    assert measured.interface.ratio_to_vocabulary.mean == pytest.approx(1, abs=0.01)
    assert measured.gradients is not None
    norms = measured.gradients.norms
    assert (norms["compensated"].projector_input or 0) > (norms["plain"].projector_input or 0) > 0
