"""The study's models: their shared start, their training, their measures, and the folders of their runs."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from examples.emoji import evaluate
from examples.emoji.pictures import Record
from examples.emoji.study import __main__ as study
from examples.emoji.study import measures, scores, starts
from examples.emoji.study import run as study_run
from examples.emoji.study.cells import Arm, Cell, Machine
from examples.emoji.study.starts import START_FILE, make_arm_model
from examples.steps import ROOT
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT, dump_recipe


# The arms' models


def test_all_arms_start_from_the_shared_projector(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    # A seed's shared start. Its file says that the projector's second layer was divided by k = 4.
    model_folder = make_model_folder(projector_norm="none")
    shared = LlavaForConditionalGeneration.from_pretrained(model_folder)
    shared.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(model_folder).save_pretrained(tmp_path)
    (tmp_path / START_FILE).write_text(json.dumps({"seed": 1, "k": 4.0}))
    features = torch.randn(2, 4, 24)  # [num_pictures, num_patches, width of the vision encoder]
    shared_output = shared.model.multi_modal_projector(features)

    def load_arm(arm: Arm) -> LlavaForConditionalGeneration:
        """The arm's model, saved and loaded again, as it is for training."""
        model, _ = make_arm_model(arm, tmp_path)
        model.save_pretrained(tmp_path / arm.name)
        return AutoModelForImageTextToText.from_pretrained(tmp_path / arm.name)

    scaled = load_arm(Arm.SCALED)
    assert torch.equal(scaled.model.multi_modal_projector(features), shared_output)

    plain = load_arm(Arm.NOTHING)
    assert torch.equal(plain.model.multi_modal_projector(features), 4 * shared_output)

    # "LayerNorm at T" gives the plain projector's output the norm T, the mean norm of text embeddings.
    with_norm = load_arm(Arm.LAYER_NORM)
    embedding_norms = with_norm.get_input_embeddings().weight.norm(dim=-1)
    text_norm = embedding_norms[embedding_norms > 0].mean()  # without rows of zeros, which stand for no token
    hidden_size = 32  # width of the language model
    normalized = nn.functional.layer_norm(4 * shared_output, (hidden_size,))  # with the norm √hidden_size
    expected = normalized * text_norm / hidden_size**0.5
    assert torch.allclose(with_norm.model.multi_modal_projector(features), expected, atol=1e-5)
    assert with_norm.config.projector_norm == "gwc"


# Training


@pytest.fixture
def recipe(make_model_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe of one step of stage 2 with the given fields, and returns its path."""
    Image.new("RGB", (28, 28), "red").save(tmp_path / "red.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}]
    rows = [{"image": "red.png", "conversations": turns}] * 4
    (tmp_path / "data.json").write_text(json.dumps(rows))

    def write(**fields: Any) -> Path:
        common: dict[str, Any] = {
            **FAST,  # makes training fast on a CPU
            **INSTRUCT,  # trains as in stage 2
            "model_name_or_path": str(make_model_folder()),
            "dataset_name": str(tmp_path / "data.json"),
            "output_dir": str(tmp_path / "out"),
            "max_steps": 1,
            "clip_by_module": True,
            "logging_steps": 1,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(dump_recipe(**common | fields))
        return path

    return write


def train(recipe: Path) -> int:
    """Train as a run of the study does, and return the exit status."""
    command = [sys.executable, "-m", "examples.emoji.study.train", "--config", str(recipe)]
    return subprocess.run(command, cwd=ROOT).returncode


def test_a_run_whose_loss_is_not_finite_is_told_from_a_crash(
    recipe: Callable[..., Path], make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    assert train(recipe(dataset_name=str(tmp_path / "missing.json"))) == 1

    broken = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    with torch.no_grad():
        broken.model.multi_modal_projector.linear_1.weight.fill_(torch.nan)
    broken.save_pretrained(tmp_path / "broken")
    AutoProcessor.from_pretrained(make_model_folder()).save_pretrained(tmp_path / "broken")
    assert train(recipe(model_name_or_path=str(tmp_path / "broken"))) == study_run.NOT_FINITE
    # It ended before its first log, and its record says so.
    assert study_run.read_training(tmp_path / "out") == {"losses": [], "clipped": {}}


def test_the_norm_and_the_projector_are_clipped_separately(recipe: Callable[..., Path], tmp_path: Path) -> None:
    assert train(recipe()) == 0
    training = measures.read_training(tmp_path / "out")
    assert len(training["losses"]) == 1
    projector_modules = [name for name in training["clipped"] if "projector" in name]
    assert projector_modules == ["multi_modal_projector", "multi_modal_projector.norm"]


def test_a_crash_is_recorded_and_stops_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "WORK", tmp_path / "work")
    runner = study.Runner(tmp_path / "records.jsonl", commit="0123", at_once=1)
    monkeypatch.setattr(runner, "_make_start", lambda seed: tmp_path / "no-start")
    cells = [Cell(Arm.NOTHING, 101), Cell(Arm.SCALED, 101)]
    with pytest.raises(subprocess.CalledProcessError):
        runner.run_all(cells)

    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    crash = json.loads(line)
    assert (crash["crashed"], crash["arm"], crash["seed"], crash["commit"]) == (1, "nothing", 101, "0123")
    assert Machine(crash["processor"], crash["arithmetic"]) == study_run.this_machine()


def test_a_run_that_was_stopped_has_not_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the runs' processes too."""
    monkeypatch.setattr(study, "WORK", tmp_path / "work")
    runner = study.Runner(tmp_path / "records.jsonl", commit="0123", at_once=1)
    monkeypatch.setattr(runner, "_make_start", lambda seed: tmp_path / "no-start")

    def stop(*arguments: str) -> None:
        raise subprocess.CalledProcessError(-signal.SIGINT, "a run")

    monkeypatch.setattr(runner, "_run_module", stop)
    with pytest.raises(subprocess.CalledProcessError):
        runner.run_all([Cell(Arm.NOTHING, 101)])
    assert not (tmp_path / "records.jsonl").exists()


def test_rows_about_drawings_by_emojione_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "RUN", tmp_path)
    emojione_row = {"image": "emojione/a.png"}
    noto_row = {"image": "noto/a.png"}
    text_row: dict[str, Any] = {"conversations": []}
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "train.json").write_text(json.dumps([emojione_row, noto_row, text_row]))

    copy = starts.write_rows("train.json", tmp_path)
    assert json.loads(copy.read_text()) == [noto_row, text_row]


# Measures


@pytest.fixture
def pictures_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the study looks for drawings and their list. It has one picture, `red.png`."""
    for module in (measures, evaluate):
        monkeypatch.setattr(module, "RUN", tmp_path)
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (28, 28), "red").save(folder / "red.png")
    return folder


def write_list(folder: Path, names_by_artist: dict[str, list[str]]) -> None:
    """Write the list of drawings: for each artist, a drawing of each name. All have the picture `red.png`."""
    records = []
    for artist, names in names_by_artist.items():
        for name in names:
            records.append({"image": "red.png", "set": artist, "name": name})
    (folder / "pictures.json").write_text(json.dumps(records))


def test_a_name_is_right_for_its_drawing_and_for_a_near_copy(
    always_a: Callable[..., Path], pictures_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model names every drawing "A". A drawing of "AA" is a near copy of a drawing of "A".
    monkeypatch.setattr(scores, "SAME_DRAWING", {"AA": "A"})
    names_by_artist = {
        "twemoji": ["A", "AA", "b", "c"],
        "emojione": ["A", "b", "b", "b"],
        "openmoji": ["b"],
        "noto": ["A"],
    }
    write_list(pictures_folder, names_by_artist)

    model = NormLlavaForConditionalGeneration.from_pretrained(always_a()).eval()
    processor = AutoProcessor.from_pretrained(always_a())
    measured = measures.measure_model(model, processor)
    # Models are trained on noto's drawings, so the names of these aren't measured.
    assert list(measured["answers"]) == ["twemoji", "emojione", "openmoji"]
    assert [(right, given) for right, given, _ in measured["answers"]["twemoji"]] == [
        ("A", "A"), ("AA", "A"), ("b", "A"), ("c", "A")
    ]  # fmt: skip
    record = measured | {"failed": False}
    assert scores.percent_right(record, "twemoji") == 50
    assert scores.primary_score(record) == (50 + 25) / 2


def test_the_margin_is_that_of_the_right_name_over_the_likeliest_other(
    make_model_folder: Callable[..., Path], pictures_folder: Path
) -> None:
    names = ["ant", "bee", "cat", "dog", "emu", "fox", "gnu", "hen", "ibis", "jay", "kite", "lynx"]
    write_list(pictures_folder, {"emojione": names})
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    answers = measures.name_drawings(model, processor, measures.drawings_by("emojione"))

    # The log-probability of each name, in a pass of its own over question and name.
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": measures.ASK_NAME}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    picture = Image.open(pictures_folder / "red.png")
    log_probabilities = {}
    for name in names:
        ids = processor.tokenizer(f"{name}{processor.tokenizer.eos_token}", add_special_tokens=False).input_ids
        inputs = processor(text=prompt + f"{name}{processor.tokenizer.eos_token}", images=picture, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0].log_softmax(dim=-1)
        before = logits[-len(ids) - 1 : -1]
        log_probabilities[name] = before[range(len(ids)), ids].sum().item()

    best = max(names, key=lambda name: log_probabilities[name])
    for right, given, margin in answers:
        others = [score for name, score in log_probabilities.items() if name != right]
        assert given == best
        assert margin == pytest.approx(log_probabilities[right] - max(others), abs=2e-3)


def test_turning_and_attention_are_measured_in_each_layer(
    make_model_folder: Callable[..., Path], pictures_folder: Path
) -> None:
    write_list(pictures_folder, {"emojione": ["ant", "bee"]})
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    measured = measures.measure_decoder(model, processor)
    num_layers = model.config.text_config.num_hidden_layers
    assert {modality: len(by_layer) for modality, by_layer in measured["turning"].items()} == {
        "image": num_layers,
        "text": num_layers,
    }
    assert len(measured["attention"]) == num_layers
    assert all(0 < share < 1 for share in measured["attention"])


def test_tokens_point_at_the_name_that_they_are_made_from(
    make_model_folder: Callable[..., Path], pictures_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["ant", "bee", "cat"]
    write_list(pictures_folder, {"twemoji": names, "emojione": names})
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    embedding_norms = model.get_input_embeddings().weight.norm(dim=-1)
    text_norm = embedding_norms[embedding_norms > 0].mean()  # T, without rows of zeros, which stand for no token

    def make_image_tokens(model: Any, processor: Any, records: list[Record]) -> torch.Tensor:
        """Four equal image tokens for each drawing: its name's mean text embedding, with three times the norm T."""
        tokens = []
        for record in records:
            name = f" {record['name']}"  # with the space before a word inside a sentence
            ids = processor.tokenizer(name, add_special_tokens=False, return_tensors="pt").input_ids
            mean_embedding = model.get_input_embeddings()(ids)[0].mean(dim=0)  # [hidden_size]
            token = 3 * text_norm * nn.functional.normalize(mean_embedding, dim=-1)
            tokens.append(token.expand(4, -1))
        return torch.stack(tokens).detach()  # [num_drawings, 4, hidden_size]

    monkeypatch.setattr(measures, "image_tokens", make_image_tokens)
    measured = measures.measure_tokens(model, processor)
    assert measured["names_by_tokens"] == 100
    assert measured["norm"] == pytest.approx(3, rel=1e-4)  # in units of T


# A run's commit and folder


@pytest.mark.parametrize("given", [None, "0123"])
def test_the_commit_is_that_of_the_repository(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: "0123")
    assert study.find_commit(given) == "0123"


def test_another_commit_than_the_repositorys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: "0123")
    with pytest.raises(ValueError, match="this is 0123"):
        study.find_commit("4567")


def test_a_commit_with_changed_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: "0123-dirty")
    with pytest.raises(ValueError, match="commit them"):
        study.find_commit(None)


def test_a_copy_without_a_repository_needs_a_given_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "current_commit", lambda: None)
    assert study.find_commit("4567") == "4567"
    with pytest.raises(ValueError, match="give --commit"):
        study.find_commit(None)


@pytest.mark.parametrize("other", [Machine("a GPU", "bfloat16"), Machine("a CPU", "float32")])
def test_a_run_starts_again_on_another_machine(
    other: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoint-60"
    monkeypatch.setattr(study_run, "this_machine", lambda: Machine("a CPU", "bfloat16"))
    study_run.claim_folder(folder, commit="0123")
    checkpoint.mkdir()

    study_run.claim_folder(folder, commit="0123")
    assert checkpoint.exists()

    monkeypatch.setattr(study_run, "this_machine", lambda: other)
    study_run.claim_folder(folder, commit="0123")
    assert not checkpoint.exists()
