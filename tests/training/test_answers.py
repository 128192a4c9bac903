"""Answers to held-out rows during training: they are the model's own, and training goes on as without them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import FSDP_ON_CPU, TWO_PROCESSES, launch, two_processes_on_cpu
from test_held_out import EVERY_TWO_STEPS, PACKED_LONGER, QLORA, fields, held_out
from transformers import AutoModelForImageTextToText, AutoProcessor

from normllava.conversations.loading import load_rows
from normllava.conversations.pictures import open_images
from script_runs import INSTRUCT, changed_weights, read_metrics, read_steps, run
from training.options.arguments import TrainingConfig


# `fields` and `held_out` are fixtures of test_held_out.
__all__ = ["fields", "held_out"]


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `answers.jsonl`."""
    with (folder / "answers.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def answer_by_transformers(folder: Path, row: dict[str, Any], is_align: bool) -> str:
    """A model's answer to a row's first question, by transformers alone."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    images = open_images(row)
    if is_align:
        inputs = processor(images=images, text=processor.image_token, return_tensors="pt")
    else:
        question = row["conversations"][0]["value"].replace("<image>", "").strip()
        content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": question}]
        message = {"role": "user", "content": content if images else question}
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template([message], **options)
    generated = model.generate(**inputs, do_sample=False, max_new_tokens=64)
    return processor.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("packing", [{}, PACKED_LONGER], ids=["padded", "packed"])
@pytest.mark.parametrize("max_tiles", [1, 4], ids=["whole pictures", "tiles"])
def test_the_answers_are_those_of_the_saved_model(
    fields: dict[str, Any],
    held_out: Path,
    make_model_folder: Callable[..., Path],
    packing: dict[str, Any],
    max_tiles: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields["model_name_or_path"] = str(make_model_folder(max_tiles=max_tiles))
    packing = {**packing, "packed_length": 2000} if packing else packing
    run(
        tmp_path, **fields, **INSTRUCT, **EVERY_TWO_STEPS, **packing, max_steps=2, eval_answers=4,
        output_dir=str(tmp_path / "out"),
    )  # fmt: skip

    answers = read_answers(tmp_path / "out")
    assert [answer["row"] for answer in answers] == [0, 3, 7, 10]  # spread over the 11 rows
    rows = list(load_rows(str(held_out)))
    for answer in answers:
        row = rows[answer["row"]]
        turns = json.loads(held_out.read_text())[answer["row"]]["conversations"]
        assert answer["step"] == 2
        assert answer["question"] == turns[0]["value"].replace("<image>", "").strip()
        assert answer["expected"] == turns[1]["value"].strip()
        row["conversations"] = turns
        assert answer["answer"] == answer_by_transformers(tmp_path / "out", row, is_align=False)
    assert f"    asked: {answers[0]['question']}" in capsys.readouterr().err


def test_stage_align_describes_pictures(fields: dict[str, Any], data: Path, tmp_path: Path) -> None:
    rows = [row for row in json.loads(data.read_text()) if "image" in row][:3]
    for row in rows:
        row["conversations"] = row["conversations"][:2]
    captions = data.parent / "three_captions.json"
    captions.write_text(json.dumps(rows))
    fields["eval_dataset_name"] = str(captions)
    run(tmp_path, **fields, **EVERY_TWO_STEPS, stage="align", max_steps=2, output_dir=str(tmp_path / "out"))

    for answer, row in zip(read_answers(tmp_path / "out"), load_rows(str(captions)), strict=True):
        assert answer["question"] == ""  # the model gets the picture alone
        assert answer["answer"] == answer_by_transformers(tmp_path / "out", row, is_align=True)


@pytest.mark.parametrize("stage", [INSTRUCT, QLORA], ids=["instruct", "qlora with dropout"])
def test_training_goes_on_to_the_bit_as_without_answers(
    fields: dict[str, Any], stage: dict[str, Any], tmp_path: Path
) -> None:
    fields |= {**stage, **EVERY_TWO_STEPS, "max_steps": 4, "save_steps": 2}
    for name, num_answers in (("with", 3), ("without", 0)):
        run(tmp_path, **fields, eval_answers=num_answers, output_dir=str(tmp_path / name))
    assert not (tmp_path / "without" / "answers.jsonl").exists()

    weights_file = "adapter_model.safetensors" if stage is QLORA else "model.safetensors"
    assert changed_weights(tmp_path / "with", tmp_path / "without", weights_file) == set()
    assert [line.get("loss") for line in read_metrics(tmp_path / "with")] == [
        line.get("loss") for line in read_metrics(tmp_path / "without")
    ]

    # A resumed run has the answers of each step once, and ends with the same weights. An answer may hold a line
    # separator, which JSON leaves as it is.
    answers = read_answers(tmp_path / "with")
    assert [answer["step"] for answer in answers] == [2, 2, 2, 4, 4, 4]
    answers[0]["answer"] = "a\u2028b"
    lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
    (tmp_path / "with" / "answers.jsonl").write_text("".join(lines), encoding="utf-8")
    checkpoint = tmp_path / "with" / "checkpoint-2"
    run(tmp_path, **fields, eval_answers=3, output_dir=str(tmp_path / "with"), resume_from_checkpoint=str(checkpoint))
    assert read_answers(tmp_path / "with") == answers
    assert changed_weights(tmp_path / "with", tmp_path / "without", weights_file) == set()


def test_adapters_answer_beside_frozen_weights_in_bfloat16(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: what is frozen is bfloat16, and what is trained is float32."""
    monkeypatch.setattr(TrainingConfig, "frozen_dtype", torch.bfloat16)
    fields |= {"stage": "adapt", "bf16": True, **EVERY_TWO_STEPS, "max_steps": 2, "eval_answers": 3}
    run(tmp_path, **fields, output_dir=str(tmp_path / "out"))
    assert len(read_answers(tmp_path / "out")) == 3


def test_tensorboard_and_trackio_get_the_answers(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    fields |= {**INSTRUCT, **EVERY_TWO_STEPS, "max_steps": 2, "report_to": ["tensorboard", "trackio"]}
    run(tmp_path, **fields, eval_answers=4, output_dir=str(tmp_path / "out"))

    (events,) = (tmp_path / "out" / "runs").rglob("events.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    texts = {tag for tag in accumulator.Tags()["tensors"] if tag.startswith("answers/")}
    assert texts == {f"answers/row {row}/text_summary" for row in (0, 3, 7, 10)}
    assert accumulator.Tags()["images"] == ["answers/row 3", "answers/row 7"]  # rows 0 and 10 have no picture
    assert len(list((tmp_path / "trackio" / "media").rglob("*.png"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("projector_norm", ["gwc", "none"])
@pytest.mark.parametrize("launcher", ["ddp", "fsdp2", "fsdp2 in bfloat16"])
@pytest.mark.parametrize("stage", [INSTRUCT, {"stage": "adapt"}], ids=["instruct", "adapt"])
def test_several_processes_answer_together(
    fields: dict[str, Any],
    make_model_folder: Callable[..., Path],
    launcher: str,
    stage: dict[str, Any],
    projector_norm: str,
    tmp_path: Path,
) -> None:
    """The untrained model's answers are those of one process, and so are the losses after them."""
    folder = make_model_folder(projector_norm=projector_norm)
    # Three rows for two processes, so that one of them answers a row for nothing.
    fields |= {**stage, **EVERY_TWO_STEPS, "model_name_or_path": str(folder), "eval_on_start": True}
    fields |= {"eval_answers": 3, "max_steps": 2, "logging_steps": 1}
    run(tmp_path, **fields, output_dir=str(tmp_path / "one"))
    two = {**fields, "output_dir": str(tmp_path / "two")}
    if launcher == "ddp":
        launch(tmp_path, *TWO_PROCESSES, **two)
    else:
        precision = "bf16" if "bfloat16" in launcher else "no"
        options = two_processes_on_cpu("fsdp2", tmp_path, precision)
        launch(tmp_path, *options, script=FSDP_ON_CPU, **{**two, "bf16": precision == "bf16"})

    answers = read_answers(tmp_path / "two")
    assert [(answer["step"], answer["row"]) for answer in answers] == [
        (step, row) for step in (0, 2) for row in (0, 5, 10)
    ]
    if "bfloat16" not in launcher:
        assert answers[:3] == read_answers(tmp_path / "one")[:3]
        losses = [step["loss"] for step in read_steps(tmp_path / "two")]
        assert losses == pytest.approx([step["loss"] for step in read_steps(tmp_path / "one")], rel=2e-4)
