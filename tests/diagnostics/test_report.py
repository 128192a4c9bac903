"""The command as a user runs it: from models and pictures on disk to the report; and what it refuses."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, PreTrainedModel

from diagnostics.__main__ import main
from diagnostics.loading import Question, load_model, load_questions
from diagnostics.measure import GRADIENT_SAMPLES, Closeup, measure_model, record_samples
from diagnostics.probe import Record
from diagnostics.report import escape, number, render_markdown, verdict
from diagnostics.results import Curve, Estimate, ModelReport, Report, from_json, to_json
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


def record_of(model: PreTrainedModel, processor: Any, questions: list[Question], layers: list[int]) -> list[Record]:
    return record_samples(model, prepare_samples(model, processor, questions), layers)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["diagnostics", *map(str, arguments)])
    main()


class Page(HTMLParser):
    """Collects tags and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_two_models_side_by_side(
    composed: Composed, backbones: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report"
    plain = composed(projector_norm="none")
    names = ("without", "with <script>|")
    base = ("--base_model", backbones("qwen2"))
    run(monkeypatch, "--model", plain, composed(), "--names", *names, *base, "--data", data, "--output_dir", out)
    report = json.loads((out / "report.json").read_text())
    assert (report["num_samples"], report["passed_over"], report["data"]) == (3, 1, "questions.json")
    before, after = report["models"]
    assert [model["name"] for model in report["models"]] == list(names)
    assert after["interface"]["ratio_to_vocabulary"]["mean"] == pytest.approx(1, abs=0.01)  # what composing sets
    assert before["projector_norm"] is None
    assert after["projector_norm"]["gain_drift_relative"] == pytest.approx(0, abs=1e-6)
    assert set(after["gradients"]) == {"compensated", "plain"}
    assert set(before["gradients"]) == {"no norm"}
    assert report["base"]["embeddings"]["mean"] == pytest.approx(after["embeddings"]["mean"])
    assert after["excluded"]["special"] > 0
    assert after["num_tokens"]["visual"] == 3 * 4

    page = Page()
    page.feed((out / "report.html").read_text())
    assert len(page.images) == 4
    assert all(image.startswith("data:image/png;base64,") for image in page.images)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "with <script>|" in page.text
    assert "Visual tokens enter the decoder" in page.text
    assert not re.search(r"\bnan\b|None", page.text)
    markdown = (out / "report.md").read_text()
    assert sorted(re.findall(r"\]\((\w+\.png)\)", markdown)) == sorted(path.name for path in out.glob("*.png"))


def test_what_was_not_recorded_leaves_a_dash(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report"
    run(monkeypatch, "--model", composed(), "--data", data, "--num_samples", 1, "--output_dir", out)
    report = json.loads((out / "report.json").read_text())
    (model,) = report["models"]
    assert model["interface"]["ratio"]["interval"] is None  # one sample has no spread
    assert "Of the text's attention" in render_markdown(from_json(Report, report, "report"), out)
    model["attention"] = model["key_space"] = None
    assert "Of the text's attention" not in render_markdown(from_json(Report, report, "report"), out)


@pytest.fixture
def measured(data: Path, composed: Composed) -> ModelReport:
    """A model measured on three questions."""
    questions, _ = load_questions(str(data), 3)
    return measure_model(*load_model(str(composed())), questions, "it", {}, Closeup())[0]


def test_a_question_is_prepared_once(data: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for its prompt, and one with its answer for those whose gradients are measured."""
    rows = json.loads(data.read_text())
    data.write_text(json.dumps(rows * 3))
    questions, _ = load_questions(str(data), 7)
    model, processor = load_model(str(composed()))
    calls: list[object] = []
    prepare = type(processor).__call__
    monkeypatch.setattr(
        type(processor), "__call__", lambda *args, **kwargs: calls.append(1) or prepare(*args, **kwargs)
    )
    measure_model(model, processor, questions, "it", {}, Closeup())
    assert len(calls) == 7 + GRADIENT_SAMPLES


def test_a_report_reads_as_it_was_written(measured: ModelReport) -> None:
    report = Report("command", {"torch": "2"}, "data", 3, 0, [measured], None)
    written = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert written["models"][0]["class"] == "NormLlavaForConditionalGeneration"
    again = from_json(Report, written, "report.json")
    assert to_json(again) == written
    assert again.models[0].layers == measured.layers
    assert from_json(Report, {**written, "newer": 1}, "report.json") == again


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
    report = to_json(Report("command", {}, "data", 3, 0, [measured], None))
    spoil(report)
    with pytest.raises(ValueError, match=message):
        from_json(Report, report, "r.json")


def cells(markdown: str, title: str) -> list[dict[str, str]]:
    """Rows of the first table of a section, by the column's header."""
    lines = markdown.split(f"## {title}\n")[1].split("\n## ")[0].strip().split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    count = next((number for number, line in enumerate(lines) if line == ""), len(lines))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:count]]


def test_tables_say_what_was_measured(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report"
    run(monkeypatch, "--model", composed(), "--names", "it", "--data", data, "--output_dir", out)
    (model,) = json.loads((out / "report.json").read_text())["models"]
    markdown = (out / "report.md").read_text()

    def mean(values: list[float]) -> str:
        return number(sum(values) / len(values))

    for row in cells(markdown, "How long tokens are on their way in"):
        entry = model["interface"][row["tokens"]]
        expected = (entry["std"], entry["median"], entry["p95"], entry["rms"])
        assert [row[name] for name in ("std", "median", "95%", "RMS")] == [number(value) for value in expected]
        assert row["mean norm (95% interval)"].split()[0] == number(entry["mean"])
        assert (row["n"], row["width"]) == (f"{entry['num_tokens']:,}", str(entry["width"]))
    rows = cells(markdown, "Norm and turning by layer")
    assert [row["tokens"] for row in rows] == ["visual", "text"]
    for row in rows:
        curves = model["layers"][row["tokens"]]
        assert row["1 − cosine"].split()[0] == number(curves["update_rate"]["mean"])
        for header, name in (
            ("‖u‖/‖h‖", "update_ratio"),
            ("cos(u, h)", "update_cosine"),
            ("angle, eq. 8 (°)", "angle"),
        ):
            assert row[header] == mean(curves[name]["mean"])
    assert rows[0]["gap of cosines"].split()[0] == number(model["layers"]["mean_gap"]["mean"])
    (row,) = cells(markdown, "The norm behind the projector")
    assert all(row[name] == number(value, 4) for name, value in model["projector_norm"].items())
    rows = cells(markdown, "Where text looks")
    for kind, seen, even in (("with_sinks", *rows[:2]), ("without_sinks", *rows[2:])):
        for row, curves in ((seen, model["attention"][kind]), (even, model["attention"][kind]["evenly_spread"])):
            for header in ("mass", "entropy", "bottom third"):
                assert row[header] == mean(curves[header.replace(" ", "_")]["mean"])
    keys = model["key_space"]
    for place, line in enumerate(markdown.split("| model | layer | n of each")[1].split("\n")[2:4]):
        # Two columns are called "within": what stands beside each measure.
        found = [cell.strip() for cell in line.strip("|").split("|")][3:]
        names = ("mmd", "mmd_baseline", "p_value", "js", "js_baseline", "probe")
        assert found == [number(keys[name][place]) for name in names]
    for row in cells(markdown, "Gradients"):
        for name, value in model["gradients"][row["norm"]].items():
            assert row[name.replace("_", " ")] == number(value)
    for row, values in zip(
        cells(markdown, "Do updates attract each other"), model["attraction"].values(), strict=True
    ):
        assert row["mean over layers"] == mean(values["mean"])
        assert (row["lowest"], row["highest"]) == (number(min(values["mean"])), number(max(values["mean"])))


@pytest.mark.parametrize(
    ("interval", "says"),
    [
        ((0.01, 0.2), "so visual tokens turn **more slowly**"),
        ((-0.2, -0.01), "so visual tokens turn **faster**"),
        ((-0.1, 0.1), "a difference that 7 samples can't tell from none"),
        (None, "on one sample, which has no spread"),
    ],
)
def test_the_verdict_follows_the_gaps_interval(
    interval: tuple[float, float] | None, says: str, measured: ModelReport
) -> None:
    layers = replace(measured.layers, mean_gap=Estimate(0.0, interval))
    interface = replace(measured.interface, ratio=Estimate(3.0, (2.5, 3.5)))
    gaze = measured.attention.with_sinks
    even = replace(gaze.evenly_spread, mass=Curve([0.6, 0.6], [None, None]))
    gaze = replace(gaze, mass=Curve([0.2, 0.4], [None, None]), evenly_spread=even)
    keys = replace(measured.key_space, mmd=[0.1, 0.3], mmd_baseline=[0.001, 0.003], p_value=[0.002, 0.04])
    attention = replace(measured.attention, with_sinks=gaze)
    text = verdict(
        replace(measured, num_samples=7, interface=interface, layers=layers, attention=attention, key_space=keys)
    )
    assert says in text
    assert "**3 (2.5 to 3.5) times** as long" in text
    assert "30% falls on the picture, against 60%" in text
    assert "0.2 apart in MMD² (p at most 0.04 in every layer), random halves of one modality 0.002" in text


def test_tokens_say_nothing_to_markdown_or_html() -> None:
    assert escape("a|b<i>*_`&\n") == "a&#124;b&#60;i&#62;&#42;&#95;&#96;&#38;&#10;"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0", "9"], r"has layers 0 to 1, got --layers 0 9"),
        (["--heads", "7"], r"has heads 0 to 3, got --heads 7"),
        (["--query", "-40"], r"has queries -1 to -\d+, got --query -40"),
    ],
)
def test_layers_and_heads_that_are_not_there(
    arguments: list[str], message: str, composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "--model", composed(), "--data", data, "--output_dir", tmp_path / "report", *arguments)


def test_data_without_pictures(tmp_path: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}]))
    with pytest.raises(SystemExit, match=r"holds no pictures to ask about \(1 rows without one"):
        run(monkeypatch, "--model", composed(), "--data", path, "--output_dir", tmp_path / "report")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="holds no pictures"):
        run(monkeypatch, "--model", composed(), "--data", tmp_path / "empty", "--output_dir", tmp_path / "report")


def test_a_model_without_pictures(
    backbones: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"no model for pictures and text: .* the config LlamaConfig"):
        run(monkeypatch, "--model", backbones("llama"), "--data", data, "--output_dir", tmp_path / "report")


def test_a_folder_of_pictures_and_a_question(tmp_path: Path, picture: Image.Image, composed: Composed) -> None:
    for name in ("b.png", "a.jpg", "c.PNG"):
        picture.save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a picture")
    questions, passed_over = load_questions(str(tmp_path), 2, question="what is it?")
    assert [Path(question.source).name for question in questions] == ["a.jpg", "b.png"]
    assert passed_over == 0
    model, processor = load_model(str(composed()))
    (sample,) = prepare_samples(model, processor, questions[:1], num_answered=1)
    text = processor.tokenizer.decode(sample.prompt.inputs["input_ids"][0])
    assert "what is it?" in text
    assert text.rstrip().endswith("assistant")  # where the answer begins
    assert sample.answered.start > 4


def test_the_loss_begins_with_the_answer(data: Path, composed: Composed) -> None:
    questions, _ = load_questions(str(data), 1)
    model, processor = load_model(str(composed()))
    (sample,) = prepare_samples(model, processor, questions, num_answered=1)
    assert processor.tokenizer.decode(sample.answered.inputs["input_ids"][0, sample.answered.start :]).startswith(
        "seven"
    )


def test_chat_tokens_without_a_role_are_no_text(data: Path, composed: Composed) -> None:
    """As Llama 3 ships them: special, and named by nothing."""
    questions, _ = load_questions(str(data), 1)
    model, processor = load_model(str(composed()))
    (before,) = record_of(model, processor, questions, [0])
    processor.tokenizer._extra_special_tokens = []
    assert processor.tokenizer.convert_tokens_to_ids("<|im_start|>") not in processor.tokenizer.all_special_ids
    (after,) = record_of(model, processor, questions, [0])
    assert torch.equal(after.tokens.text, before.tokens.text)


def test_the_map_lies_over_what_the_encoder_saw(composed: Composed, tmp_path: Path) -> None:
    """CLIP's processor cuts a square out of the middle."""
    picture = Image.new("RGB", (84, 28), (255, 0, 0))
    picture.paste((0, 0, 255), (28, 0, 56, 28))
    picture.save(tmp_path / "wide.png")
    (question,), _ = load_questions(str(tmp_path), 1)
    for vision, seen in (("clip", {(0, 0, 255)}), ("siglip", {(0, 0, 255), (255, 0, 0)})):
        model, processor = load_model(str(composed(vision=vision)))
        (sample,) = prepare_samples(model, processor, [question])
        shown = sample.picture
        colours = {tuple(255 * (value > 127) for value in pixel) for _, pixel in shown.getcolors(10_000)}
        assert shown.size == (28, 28)
        assert ((255, 0, 0) in colours) == ((255, 0, 0) in seen)


def test_questions_with_formulas_are_drawn(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(data.read_text())[:1]
    rows[0]["conversations"][0]["value"] = "<image>\nSolve $\\boxed{x}$ now"
    data.write_text(json.dumps(rows))
    out = tmp_path / "report"
    run(monkeypatch, "--model", composed(), "--names", r"$\frac{a", "--data", data, "--output_dir", out)
    assert (out / "attention_maps.png").exists()


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


def test_two_pictures_have_no_map(composed: Composed, data: Path) -> None:
    turns = [{"from": "human", "value": "<image><image>\nwhich is it?"}]
    data.write_text(json.dumps([{"image": ["0.png", "1.png"], "conversations": turns}]))
    questions, _ = load_questions(str(data), 1)
    model, processor = load_model(str(composed()))
    (record,) = record_of(model, processor, questions, [0])
    assert record.tokens.visual.sum() == 2 * 4
    assert record.grid is None


def test_pictures_past_the_first_answer_are_not_asked_about(data: Path) -> None:
    rows = json.loads(data.read_text())[:1]
    later = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello"}, *rows[0]["conversations"]]
    rows.append({**rows[0], "conversations": later})
    data.write_text(json.dumps(rows))
    questions, passed_over = load_questions(str(data), 4)
    assert (len(questions), passed_over) == (1, 1)


def test_what_can_be_seen_first_is_checked_first(
    composed: Composed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    rest = ("--data", data, "--output_dir", tmp_path / "report")
    measured: list[object] = []
    monkeypatch.setattr("diagnostics.__main__.measure_model", lambda *args: measured.append(args))
    with pytest.raises(SystemExit, match=r"--output_dir: .*File exists"):
        run(monkeypatch, "--model", composed(), "--data", data, "--output_dir", tmp_path / "file")
    with pytest.raises(SystemExit, match=f"--base_model {tmp_path}/none: Repo id must be"):
        run(monkeypatch, "--model", composed(), "--base_model", f"{tmp_path}/none", *rest)
    with pytest.raises(SystemExit, match=f"--model {tmp_path}/none: Repo id must be"):
        run(monkeypatch, "--model", f"{tmp_path}/none", *rest)
    assert measured == []


def test_a_processor_without_a_chat_template(data: Path, composed: Composed) -> None:
    questions, _ = load_questions(str(data), 1)
    model, processor = load_model(str(composed()))
    processor.chat_template = None
    (sample,) = prepare_samples(model, processor, questions)
    text = processor.tokenizer.decode(sample.prompt.inputs["input_ids"][0])
    assert text == "<|image_pad|>" * 4 + "\nwhat is it?"


def test_bfloat16_and_offloaded_weights_give_the_same_numbers(data: Path, composed: Composed, tmp_path: Path) -> None:
    questions, _ = load_questions(str(data), 2)
    model, processor = load_model(str(composed()), dtype="float32")
    records = record_of(model, processor, questions, [0, 1])
    half, _ = load_model(str(composed()), dtype="bfloat16")
    (rounded,) = record_of(half, processor, questions[:1], [0, 1])
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
    offloaded = record_of(spread, AutoProcessor.from_pretrained(composed()), questions, [0, 1])
    measured, _ = measure_model(spread, processor, questions, "spread", {}, Closeup())
    assert measured.gradients is None
    assert any(note.startswith("gradients: not recorded") for note in measured.notes)
    for one, other in zip(records, offloaded, strict=True):
        assert torch.equal(one.cosines, other.cosines)
        assert torch.equal(one.keys[1], other.keys[1])
        assert torch.equal(one.attention[1], other.attention[1])


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
    (measured,) = json.loads((out / "report.json").read_text())["models"]
    assert measured["key_space"] is not None
    assert measured["interface"]["ratio_to_vocabulary"]["mean"] == pytest.approx(1, abs=0.01)
    gradients = measured["gradients"]
    assert gradients["compensated"]["projector_input"] > gradients["plain"]["projector_input"] > 0
