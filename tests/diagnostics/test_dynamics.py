"""A run followed through training, by the callback and from its checkpoints."""

import gc
import json
import re
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from diagnostics import dynamics
from diagnostics.dynamics import FILE, fingerprint, measure_run, read_points
from diagnostics.loading import load_questions
from conversations.records import to_json
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, logged, run, weights


@pytest.fixture
def rows(tmp_path: Path, picture: Image.Image) -> Path:
    """Fifteen rows with a picture, and one without."""
    made = [{"conversations": [{"from": "human", "value": "word?"}, {"from": "gpt", "value": "word"}]}]
    for number in range(15):
        picture.rotate(24 * number).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": f"number {number}"}]
        made.append({"image": f"{number}.png", "conversations": turns})
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(made))
    return path


def test_the_callback_and_the_checkpoints_tell_the_same(
    composed: Callable[..., Path], rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {
        **INSTRUCT,
        "model_name_or_path": str(composed("clip")),  # whose last hidden states no norm evens out
        "dataset_name": str(rows),
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / "watched"), probe_steps=2, probe_samples=3)
    run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / "plain"))
    watched, plain = (weights(tmp_path / name) for name in ("watched", "plain"))
    assert all(torch.equal(watched[name], plain[name]) for name in plain)  # watching changes nothing

    lines = [line for line in logged(tmp_path / "watched") if "loss" in line]
    assert ["norm/visual" in line for line in lines] == [True, True]

    during = read_points(tmp_path / "watched" / FILE)
    assert [point.step for point in during] == [0, 2, 4]
    assert during[0].summary.look("ratio_to_vocabulary").mean == pytest.approx(1, abs=0.01)
    assert during[0].summary.look("gain_drift").mean < 1e-6 < during[1].summary.look("gain_drift").mean

    # A run that goes on from an earlier checkpoint measures the rest again, and puts it in place of what was there.
    checkpoint = str(tmp_path / "watched" / "checkpoint-2")
    again_fields = {"output_dir": str(tmp_path / "watched"), "probe_steps": 2, "probe_samples": 3}
    run(monkeypatch, tmp_path, **fields, **again_fields, resume_from_checkpoint=checkpoint)
    assert read_points(tmp_path / "watched" / FILE) == during

    questions = load_questions(str(rows), 3).questions
    after = measure_run(tmp_path / "plain", questions)
    assert [point.step for point in after] == [2, 4]
    for one, other in zip(during[1:], after, strict=True):
        assert one.questions == other.questions
        # Of the encoder too, whose layers past the one that is read are skipped in training.
        assert one.summary.frame["measure"].tolist() == other.summary.frame["measure"].tolist()
        expected = other.summary.frame["mean"].tolist()
        assert one.summary.frame["mean"].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)

    # What is measured already is not measured again.
    lines = (tmp_path / "plain" / FILE).read_text().splitlines(True)
    kept = replace(after[0], dtype="kept")
    (tmp_path / "plain" / FILE).write_text(json.dumps(to_json(kept)) + "\n" + lines[1][:40])
    assert measure_run(tmp_path / "plain", questions) == [kept, after[1]]
    (tmp_path / "plain" / FILE).write_text(lines[0] + lines[1].replace('"summary"', '"other"'))
    with pytest.raises(ValueError, match=r"plain/dynamics\.jsonl, line 2: point: no summary\. Move the file"):
        measure_run(tmp_path / "plain", questions)
    (tmp_path / "plain" / FILE).write_text("".join(lines))
    # Pictures and words count, not where they lie.
    moved = shutil.copytree(rows.parent, tmp_path / "elsewhere", ignore=lambda folder, names: {
        name for name in names if Path(folder, name).is_dir()})  # fmt: skip
    assert fingerprint(load_questions(str(moved / rows.name), 3).questions) == fingerprint(questions)
    asked = [load_questions(str(moved), 3, question=question).questions for question in ("what?", "why?")]
    assert fingerprint(asked[0]) != fingerprint(asked[1])

    # Also where every checkpoint is measured already, and by training that goes on.
    other = {**again_fields, "probe_samples": 2, "resume_changed": "true"}
    with pytest.raises(ValueError, match="measured on other questions"):
        run(monkeypatch, tmp_path, **fields, **other, resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="measured on other questions"):
        measure_run(tmp_path / "plain", questions[:2])


def test_the_command_draws_a_run(
    composed: Callable[..., Path],
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step, norm in ((10, "gwc"), (5, "none")):
        model = NormLlavaForConditionalGeneration.from_pretrained(composed(projector_norm=norm))
        model.save_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        for path in composed().glob("*token*"):
            (tmp_path / "run" / f"checkpoint-{step}" / path.name).write_bytes(path.read_bytes())
        for name in ("processor_config.json", "chat_template.jinja"):
            (tmp_path / "run" / f"checkpoint-{step}" / name).write_bytes((composed() / name).read_bytes())
    command = ["dynamics", "--run", str(tmp_path / "run"), "--data", str(rows), "--num_samples", "2"]
    command += ["--start", str(composed(projector_norm="none")), "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", command)
    caplog.set_level("INFO")
    alive: list[int] = []
    loaded: list[weakref.ref] = []
    load = dynamics.load_model

    def watched(name: str, **options: Any) -> Any:
        gc.collect()
        alive.append(sum(model() is not None for model in loaded))
        model, processor = load(name, **options)
        loaded.append(weakref.ref(model))
        return model, processor

    monkeypatch.setattr(dynamics, "load_model", watched)
    dynamics.main()
    assert alive == [0, 0, 0]  # the last checkpoint stayed while the next one was loaded
    assert (tmp_path / "run" / "dynamics.png").stat().st_size > 10_000
    assert re.findall(r"^(\d+) +[\d.]+ ", "\n".join(caplog.messages), re.M) == ["0", "5", "10"]

    monkeypatch.setattr(sys, "argv", [*command[:-1], "float32"])
    dynamics.main()  # with nothing left to measure
    assert f"step 0 is in {tmp_path}/run/dynamics.jsonl already; {command[-3]} is not measured" in caplog.messages
    shutil.copytree(tmp_path / "run" / "checkpoint-10", tmp_path / "run" / "checkpoint-15")
    dynamics.main()
    said = f"{tmp_path}/run/checkpoint-15 is in float32, other points of {tmp_path}/run/dynamics.jsonl in bfloat16"
    assert said in caplog.messages
    assert [point.dtype for point in read_points(tmp_path / "run" / FILE)] == ["bfloat16"] * 3 + ["float32"]

    monkeypatch.setattr(sys, "argv", [*command[:2], str(rows.parent / "nowhere"), *command[3:]])
    with pytest.raises(SystemExit, match="has no checkpoint-<step> folders"):
        dynamics.main()
