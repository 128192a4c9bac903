"""Held-out rows while training: figures that a plain computation gives too, and a training that does not notice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import TWO_PROCESSES, launch
from torch import nn
from transformers import AutoProcessor

from conversations.chat_template import plain_template
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.tokens import IGNORED, RowTokenizer
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, logged, moved, run
from training import sft


EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
QLORA = {"stage": "adapt", "load_in_4bit": True, "bf16": True, "lora_dropout": 0.3}
LONGER = {**PACKED, "packed_length": 260}


@pytest.fixture(scope="session")
def held_out(data: Path) -> Path:
    """11 rows of one to three answers of very different lengths, two without pictures; two stand at the start."""
    rows = json.loads(data.read_text())[2:13]
    for number, row in enumerate(rows):
        row["conversations"][-1]["value"] += " and so on" * (number % 4) ** 2
        row["conversations"] += [{"from": "human", "value": "More?"}, {"from": "gpt", "value": "No."}] * (number % 3)
    (data.parent / "held_out.json").write_text(json.dumps(rows))
    return data.parent / "held_out.json"


@pytest.fixture
def fields(composed: Callable[..., Path], data: Path, held_out: Path) -> dict[str, Any]:
    return {"model_name_or_path": str(composed()), "dataset_name": str(data), "eval_dataset_name": str(held_out)}


def evaluated(folder: Path) -> list[dict[str, float]]:
    names = ("step", "eval/loss", "eval/loss_blank")
    lines = [line for line in logged(folder) if "eval/loss" in line]
    return [{name: line[name] for name in names if name in line} for line in lines]


def plain_losses(folder: Path, held_out: Path, align: bool) -> list[float]:
    """Loss and loss with blank pictures, row by row, by the model and torch alone."""
    processor = AutoProcessor.from_pretrained(folder)
    template = plain_template(processor.tokenizer, processor.image_token) if align else processor.chat_template
    tokenize = RowTokenizer(processor, template)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    sums, num_tokens = torch.zeros(2, dtype=torch.float64), 0
    for row in map(tokenize, load_rows(str(held_out))):
        labels = torch.tensor([tokenize.repeat_at_pictures(row["labels"], row["input_ids"])])
        input_ids = torch.tensor([tokenize.expand_pictures(row["input_ids"])])
        num_tokens += int((labels != IGNORED).sum())
        pictures = open_images(row)
        for kind, images in enumerate((pictures, [image.point(lambda value: 0) for image in pictures])):
            pixels = {"pixel_values": processor.image_processor(images, return_tensors="pt")["pixel_values"]}
            with torch.no_grad():
                logits = model(input_ids=input_ids, **(pixels if images else {})).logits
            sums[kind] += nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").double()
    return (sums / num_tokens).tolist()


@pytest.mark.parametrize(
    ("stage", "packing"),
    [({"stage": "align"}, {"per_device_train_batch_size": 5}), (INSTRUCT, LONGER)],
    ids=["align-padded", "instruct-packed"],
)
def test_the_losses_are_those_of_a_plain_computation(
    fields: dict[str, Any],
    held_out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: dict[str, Any],
    packing: dict[str, Any],
) -> None:
    if stage is not INSTRUCT:  # which takes no conversations
        rows = [{**row, "conversations": row["conversations"][:2]} for row in json.loads(held_out.read_text())]
        held_out = held_out.with_name("captions.json")
        held_out.write_text(json.dumps(rows))
        fields["eval_dataset_name"] = str(held_out)
    settings = {"max_steps": 3, "global_batch_size": 10, "gradient_checkpointing": True}
    out = tmp_path / "out"
    run(monkeypatch, tmp_path, **fields, **stage, **EVERY_TWO, **settings, **packing, output_dir=str(out))
    assert [line["step"] for line in evaluated(out)] == [2, 3]
    last = evaluated(out)[-1]
    loss, loss_blank = plain_losses(out, held_out, align=stage is not INSTRUCT)
    assert last["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert last["eval/loss_blank"] == pytest.approx(loss_blank, rel=1e-5)
    assert abs(loss - loss_blank) > 1e-4
    assert f"held out: loss {loss:.4f}, with blank pictures {loss_blank:.4f}" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [INSTRUCT, QLORA], ids=["instruct", "4 bits"])
def test_training_does_not_notice(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: dict[str, Any]
) -> None:
    if stage is QLORA:
        pytest.importorskip("bitsandbytes")
    fields |= stage
    without, measured = tmp_path / "without", tmp_path / "measured"
    run(monkeypatch, tmp_path, **{**fields, "eval_dataset_name": None}, output_dir=str(without))
    run(monkeypatch, tmp_path, **fields, **EVERY_TWO, eval_on_start=True, output_dir=str(measured))
    file = "model.safetensors" if stage is INSTRUCT else "adapter_model.safetensors"
    assert moved(without, measured, file) == set()
    lines, expected = ([line for line in logged(folder) if "loss" in line] for folder in (measured, without))
    assert lines == expected


def test_the_rows_are_checked_as_those_of_training(
    fields: dict[str, Any], held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(held_out.read_text())
    rows[3]["image"] = "gone.png"
    (tmp_path / "bad.json").write_text(json.dumps(rows))
    fields |= {"eval_dataset_name": str(tmp_path / "bad.json"), "eval_image_folder": str(held_out.parent)}
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=r"bad.json, row 3: image file .*gone.png is missing"):
        run(monkeypatch, tmp_path, **fields, **INSTRUCT, **EVERY_TWO, output_dir=str(tmp_path / "out"))


def test_bad_rows_are_listed_apart_from_those_of_training(
    fields: dict[str, Any], data: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path, number in (("train", data, 5), ("eval", held_out, 3)):
        rows = json.loads(path.read_text())
        rows[number]["image"] = "gone.png"
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    fields |= {"dataset_name": str(tmp_path / "train.json"), "eval_dataset_name": str(tmp_path / "eval.json")}
    fields |= {"image_folder": str(data.parent), "eval_image_folder": str(data.parent), "bad_rows": "skip"}
    out = tmp_path / "out"
    for _ in range(2):  # a second start lists them again, not twice
        run(monkeypatch, tmp_path, **fields, **INSTRUCT, **EVERY_TWO, max_steps=2, output_dir=str(out))
        for name, source in (("bad_rows", "train.json, row 5"), ("held_out_bad_rows", "eval.json, row 3")):
            (line,) = (out / f"{name}.jsonl").read_text().splitlines()
            assert json.loads(line)["source"].endswith(source)
        fields["resume_from_checkpoint"] = True


@pytest.mark.parametrize("strategy", ["best", "steps"])
def test_the_best_is_kept(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    # A rate at which the loss falls at first, and then rises.
    settings = {**fields, **INSTRUCT, **EVERY_TWO, "num_train_epochs": 2, "learning_rate": 0.05}
    settings |= {"lr_scheduler_type": "constant", "save_strategy": strategy, "metric_for_best_model": "loss"}
    out = tmp_path / "out"
    run(monkeypatch, tmp_path, **settings, save_steps=2, save_total_limit=1, output_dir=str(out))
    losses = {line["step"]: line["eval/loss"] for line in evaluated(out)}
    best, last = (f"checkpoint-{step}" for step in (min(losses, key=lambda step: losses[step]), max(losses)))
    kept = {best} if strategy == "best" else {best, last}
    assert best != last
    assert {path.name for path in out.glob("checkpoint-*")} == kept
    assert moved(out / best, out) != set()  # the result is the last step's
    for name in kept:
        state = json.loads((out / name / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(out / best)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [{}, LONGER], ids=["padded", "packed"])
def test_two_processes_find_what_one_does(fields: dict[str, Any], tmp_path: Path, packing: dict[str, Any]) -> None:
    # 11 rows in batches of 3 don't go round, and one batch has no picture.
    settings = {**fields, **INSTRUCT, **EVERY_TWO, **packing, "global_batch_size": 10}
    settings |= {} if packing else {"per_device_train_batch_size": 5}
    one, two = tmp_path / "one", tmp_path / "two"
    launch(tmp_path, "--cpu", **settings, output_dir=str(one))
    settings["per_device_eval_batch_size"] = 1 if not packing else 3
    launch(tmp_path, *TWO_PROCESSES, **settings, output_dir=str(two))
    assert len(evaluated(two)) == 2
    for line, expected in zip(evaluated(two), evaluated(one), strict=True):
        assert line == {name: pytest.approx(value, rel=2e-4) for name, value in expected.items()}
