"""Held-out rows during training: their losses are right, and evaluating them doesn't change the trained weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_distributed import TWO_PROCESSES, launch
from torch import nn
from transformers import AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.conversations.chat_template import plain_template
from normllava.conversations.loading import load_rows
from normllava.conversations.pictures import open_images
from normllava.conversations.row_tokenizer import IGNORED, RowTokenizer
from script_runs import INSTRUCT, PACKED, changed_weights, read_metrics, read_steps, run
from training import sft


# Recipe fields of an evaluation every two steps, and at the end.
EVERY_TWO_STEPS = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
QLORA = {"stage": "adapt", "load_in_4bit": True, "bf16": True, "lora_dropout": 0.3}
# The longest held-out rows need more than the 120 tokens of `PACKED`.
PACKED_LONGER = {**PACKED, "packed_length": 260}


@pytest.fixture(scope="session")
def held_out(data: Path) -> Path:
    """The path of a file with 11 rows of one to three answers. Some first answers are much longer than others.

    Rows 0, 1 and 10 have no picture.
    """
    rows = json.loads(data.read_text())[2:13]
    second_question = {"from": "human", "value": "More?"}
    second_answer = {"from": "gpt", "value": "No."}
    for number, row in enumerate(rows):
        turns = row["conversations"]
        num_repeats = (number % 4) ** 2  # 0, 1, 4 or 9
        turns[-1]["value"] += " and so on" * num_repeats
        num_further_answers = number % 3
        turns += [second_question, second_answer] * num_further_answers

    path = data.parent / "held_out.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def fields(make_model_folder: Callable[..., Path], data: Path, held_out: Path) -> dict[str, Any]:
    """The recipe fields that name the model, the rows and the held-out rows."""
    return {
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(data),
        "eval_dataset_name": str(held_out),
    }


def read_evaluations(folder: Path) -> list[dict[str, float]]:
    """The step and the losses of each evaluation of a run."""
    names = ("step", "eval/loss", "eval/loss_blank")
    lines = [line for line in read_metrics(folder) if "eval/loss" in line]
    return [{name: line[name] for name in names} for line in lines]


def plain_losses(folder: Path, held_out: Path, is_align: bool) -> tuple[float, float]:
    """The mean loss of a token with the rows' pictures, and the mean loss with blank pictures.

    Both losses are computed without the code of training: the model runs on one row after the other.

    Args:
        folder: The model's folder.
        held_out: The path of the rows.
        is_align: Whether rows are a picture and a caption, as in stage "align". Otherwise they have the chat format.
    """
    processor = AutoProcessor.from_pretrained(folder)
    template = processor.chat_template
    if is_align:
        template = plain_template(processor.tokenizer, processor.image_token)
    tokenize = RowTokenizer(processor, template)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def sum_loss(input_ids: torch.Tensor, labels: torch.Tensor, images: list[Image.Image]) -> float:
        inputs = {"input_ids": input_ids}
        if images:
            inputs["pixel_values"] = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            logits = model(**inputs).logits
        # The logits at a position are for the next token.
        return nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").item()

    total_loss = 0.0
    total_loss_blank = 0.0
    num_tokens = 0
    for raw_row in load_rows(str(held_out)):
        row = tokenize(raw_row)
        # A tokenized row has one token for each picture, where the model gets all image tokens of the picture.
        input_ids = torch.tensor([tokenize.repeat_at_pictures(row["input_ids"], row)])
        labels = torch.tensor([tokenize.repeat_at_pictures(row["labels"], row)])
        images = open_images(row)
        blank_images = [Image.new(image.mode, image.size) for image in images]  # all black
        total_loss += sum_loss(input_ids, labels, images)
        total_loss_blank += sum_loss(input_ids, labels, blank_images)
        num_tokens += int((labels != IGNORED).sum())
    return total_loss / num_tokens, total_loss_blank / num_tokens


ALIGN_PADDED = {"stage": "align", "per_device_train_batch_size": 5}
INSTRUCT_PACKED = {**INSTRUCT, **PACKED_LONGER}


@pytest.mark.parametrize("stage_fields", [ALIGN_PADDED, INSTRUCT_PACKED], ids=["align, padded", "instruct, packed"])
def test_the_losses_are_those_of_a_plain_computation(
    fields: dict[str, Any],
    held_out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stage_fields: dict[str, Any],
) -> None:
    is_align = stage_fields["stage"] == "align"
    rows_file = held_out
    if is_align:
        # Stage "align" takes rows of one question and one answer.
        rows = json.loads(held_out.read_text())
        for row in rows:
            row["conversations"] = row["conversations"][:2]
        rows_file = held_out.with_name("captions.json")
        rows_file.write_text(json.dumps(rows))
        fields["eval_dataset_name"] = str(rows_file)

    fields |= {**stage_fields, **EVERY_TWO_STEPS}
    fields |= {"max_steps": 3, "global_batch_size": 10, "gradient_checkpointing": True}
    out = tmp_path / "out"
    run(tmp_path, **fields, output_dir=str(out))

    evaluations = read_evaluations(out)
    assert [evaluation["step"] for evaluation in evaluations] == [2, 3]
    last_evaluation = evaluations[-1]
    loss, loss_blank = plain_losses(out, rows_file, is_align)
    assert last_evaluation["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert last_evaluation["eval/loss_blank"] == pytest.approx(loss_blank, rel=1e-5)
    assert abs(loss - loss_blank) > 1e-4  # so that the lines above would notice swapped losses
    assert f"held out: loss {loss:.4f}, with blank pictures {loss_blank:.4f}" in capsys.readouterr().err


@pytest.mark.parametrize("stage_fields", [INSTRUCT, QLORA], ids=["instruct", "4 bits"])
def test_training_is_the_same_with_evaluation_and_without(
    fields: dict[str, Any], tmp_path: Path, stage_fields: dict[str, Any]
) -> None:
    if stage_fields is QLORA:
        pytest.importorskip("bitsandbytes")
    fields |= stage_fields
    without = tmp_path / "without"
    evaluated = tmp_path / "evaluated"
    run(tmp_path, **{**fields, "eval_dataset_name": None}, output_dir=str(without))
    run(tmp_path, **fields, **EVERY_TWO_STEPS, eval_on_start=True, output_dir=str(evaluated))

    file_name = "model.safetensors" if stage_fields is INSTRUCT else "adapter_model.safetensors"
    assert changed_weights(without, evaluated, file_name) == set()
    assert read_steps(evaluated) == read_steps(without)


def test_held_out_rows_are_checked_as_the_rows_of_training_are(
    fields: dict[str, Any], held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(held_out.read_text())
    rows[3]["image"] = "gone.png"
    (tmp_path / "bad.json").write_text(json.dumps(rows))
    fields |= {"eval_dataset_name": str(tmp_path / "bad.json"), "eval_image_folder": str(held_out.parent)}
    # The rows are checked before the model is loaded, which can take minutes.
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=r"bad.json, row 3: image file .*gone.png is missing"):
        run(tmp_path, **fields, **INSTRUCT, **EVERY_TWO_STEPS, output_dir=str(tmp_path / "out"))


def test_bad_held_out_rows_have_a_list_of_their_own(
    fields: dict[str, Any], data: Path, held_out: Path, tmp_path: Path
) -> None:
    train_rows = json.loads(data.read_text())
    train_rows[5]["image"] = "gone.png"
    (tmp_path / "train.json").write_text(json.dumps(train_rows))
    eval_rows = json.loads(held_out.read_text())
    eval_rows[3]["image"] = "gone.png"
    (tmp_path / "eval.json").write_text(json.dumps(eval_rows))
    fields |= {"dataset_name": str(tmp_path / "train.json"), "eval_dataset_name": str(tmp_path / "eval.json")}
    fields |= {"image_folder": str(data.parent), "eval_image_folder": str(data.parent), "bad_rows": "skip"}
    out = tmp_path / "out"

    def only_source(file_name: str) -> str:
        """The source of the only row in a list of bad rows."""
        (line,) = (out / file_name).read_text().splitlines()
        return json.loads(line)["source"]

    # A resumed run writes the lists anew, so each list still has one line.
    for resume in (False, True):
        fields["resume_from_checkpoint"] = resume
        run(tmp_path, **fields, **INSTRUCT, **EVERY_TWO_STEPS, max_steps=2, output_dir=str(out))
        assert only_source("bad_rows.jsonl").endswith("train.json, row 5")
        assert only_source("held_out_bad_rows.jsonl").endswith("eval.json, row 3")


@pytest.mark.parametrize("save_strategy", ["best", "steps"])
def test_the_best_checkpoint_is_kept(fields: dict[str, Any], tmp_path: Path, save_strategy: str) -> None:
    """With `save_strategy` "best" only the best checkpoint is kept, with "steps" also the last checkpoint."""
    # With this learning rate the loss falls at first and then rises, so the best checkpoint is not the last.
    settings = {**fields, **INSTRUCT, **EVERY_TWO_STEPS, "num_train_epochs": 2, "learning_rate": 0.05}
    settings |= {"lr_scheduler_type": "constant", "save_strategy": save_strategy, "metric_for_best_model": "loss"}
    out = tmp_path / "out"
    run(tmp_path, **settings, save_steps=2, save_total_limit=1, output_dir=str(out))

    evaluations = read_evaluations(out)
    best_evaluation = min(evaluations, key=lambda evaluation: evaluation["eval/loss"])
    best_step = best_evaluation["step"]
    last_step = evaluations[-1]["step"]
    assert best_step != last_step

    best = f"checkpoint-{best_step}"
    kept = {best}
    if save_strategy == "steps":
        kept.add(f"checkpoint-{last_step}")
    assert {path.name for path in out.glob("checkpoint-*")} == kept
    assert changed_weights(out / best, out) != set()  # the result has the weights of the last step
    for name in kept:
        state = json.loads((out / name / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(out / best)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [{}, PACKED_LONGER], ids=["padded", "packed"])
def test_two_processes_measure_the_same_losses_as_one_process(
    fields: dict[str, Any], tmp_path: Path, packing: dict[str, Any]
) -> None:
    # The 11 held-out rows come in batches of 3, and the last batch is smaller. With two processes, some batches are
    # without pictures.
    settings = {**fields, **INSTRUCT, **EVERY_TWO_STEPS, **packing, "global_batch_size": 10}
    if not packing:
        settings["per_device_train_batch_size"] = 5
    one = tmp_path / "one"
    two = tmp_path / "two"
    launch(tmp_path, "--cpu", **settings, output_dir=str(one))
    if not packing:
        settings["per_device_eval_batch_size"] = 1  # the losses must not depend on the size of a batch
    launch(tmp_path, *TWO_PROCESSES, **settings, output_dir=str(two))

    evaluations = read_evaluations(two)
    assert len(evaluations) == 2
    for evaluation, expected in zip(evaluations, read_evaluations(one), strict=True):
        assert evaluation == pytest.approx(expected, rel=2e-4)
