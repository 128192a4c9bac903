"""Whole runs of the training script: what they train, at which learning rates, and what they write."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.conversations.loading import load_rows
from script_runs import (
    FAST,
    INSTRUCT,
    NORM,
    PACKED,
    ROOT,
    changed_weights,
    collate,
    dump_recipe,
    load_weights,
    read_metrics,
    read_steps,
    run,
)
from training.folders.run import Run, describe_environment


def test_both_stages_from_the_command_line(make_model_folder: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    stage1 = tmp_path / "stage1"
    stage2 = tmp_path / "stage2"
    stage1.mkdir()
    (stage1 / "README.md").write_text("written by the user")

    def launch(**fields: Any) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(dump_recipe(**FAST, **fields, dataset_name=str(data)))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "training/sft.py"]
        result = subprocess.run([*command, "--config", str(recipe)], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "1 processes x 2 rows x 2 accumulation steps = global batch 4" in result.stderr

    launch(stage="align", model_name_or_path=str(make_model_folder()), output_dir=str(stage1))
    launch(**INSTRUCT, model_name_or_path=str(stage1), output_dir=str(stage2))

    # Stage 1 trains the projector.
    names = set(load_weights(stage1))
    projector_names = {name for name in names if name.startswith("model.multi_modal_projector.")}
    assert changed_weights(make_model_folder(), stage1) == projector_names
    assert (stage1 / "README.md").read_text() == "written by the user"

    # Stage 2 trains all weights that Llava reads. Llava reads neither the encoder's last layer nor the encoder's
    # final norm.
    unread_modules = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.")
    unread_names = {name for name in names if any(module in name for module in unread_modules)}
    assert len(unread_names) > 0
    assert changed_weights(stage1, stage2) == names - unread_names

    steps = read_steps(stage2)
    assert [step["step"] for step in steps] == [2, 4, 6, 8]
    assert read_metrics(stage2)[-1]["step"] == 8  # the line on the whole run
    # In the log, "multi_modal_projector" stands for the projector without its norm.
    modules = ("vision_tower", "multi_modal_projector", "multi_modal_projector.norm", "language_model", "lm_head")
    for step in steps:
        assert step["norm/ratio"] == pytest.approx(step["norm/image"] / step["norm/text"])
        assert step["learning_rate/vision_tower"] == pytest.approx(step["learning_rate"] / 5)  # 2e-4 = 1e-3 / 5
        squared_norms = [step[f"grad_norm/{module}"] ** 2 for module in modules]
        assert sum(squared_norms) == pytest.approx(step["grad_norm"] ** 2, rel=2e-4)

    # transformers loads the folder.
    AutoProcessor.from_pretrained(stage2)
    AutoModelForImageTextToText.from_pretrained(stage2)

    record = Run.read(stage2)
    assert record.arguments["stage"] == "instruct"
    assert record.arguments["model_name_or_path"] == str(stage1)
    assert record.recipe == str(tmp_path / "recipe.yaml")
    assert record.environment.num_processes == 1
    assert not record.environment.resumed
    assert record.environment.packages["torch"] == torch.__version__


# One step on all 30 rows, whose order then doesn't matter.
ONE_STEP = {"max_steps": 1, "logging_steps": 1, "lr_scheduler_type": "constant", "global_batch_size": 30}


@pytest.fixture
def fields(make_model_folder: Callable[..., Path], data: Path) -> dict[str, Any]:
    """The recipe fields that name the model and the rows."""
    return {"model_name_or_path": str(make_model_folder()), "dataset_name": str(data)}


def test_each_module_moves_at_its_own_rate(
    make_model_folder: Callable[..., Path], fields: dict[str, Any], tmp_path: Path
) -> None:
    # Adam's first step moves every weight that has a gradient by the learning rate. `run` adds the common rate, 1e-3,
    # and `INSTRUCT` has the vision encoder's rate, 2e-4.
    rates = {"norm_learning_rate": 5e-4, "projector_learning_rate": 1e-4}
    run(tmp_path, **fields, **INSTRUCT, **ONE_STEP, **rates, output_dir=str(tmp_path / "out"))
    (step,) = read_steps(tmp_path / "out")
    assert step["learning_rate/multi_modal_projector.norm"] == 5e-4
    assert step["learning_rate/multi_modal_projector"] == 1e-4

    before = load_weights(make_model_folder())
    after = load_weights(tmp_path / "out")
    expected_rates = {
        "model.vision_tower.embeddings.patch_embedding.weight": 2e-4,
        "model.multi_modal_projector.linear_1.weight": 1e-4,
        f"{NORM}.weight": 5e-4,
        "model.language_model.layers.0.mlp.up_proj.weight": 1e-3,
    }
    for name, rate in expected_rates.items():
        largest_change = (after[name] - before[name]).abs().max().item()
        assert largest_change == pytest.approx(rate, rel=0.05), name


@pytest.mark.parametrize("clip_by_module", [False, True], ids=["all modules together", "by module"])
def test_clipping_by_module_leaves_a_modules_small_gradient_whole(
    make_model_folder: Callable[..., Path], fields: dict[str, Any], tmp_path: Path, clip_by_module: bool
) -> None:
    # With SGD and a learning rate of 1, a weight changes by its clipped gradient.
    fields |= {**INSTRUCT, **ONE_STEP, "optim": "sgd", "learning_rate": 1.0, "vision_learning_rate": 1.0}
    limit = 0.05
    out = tmp_path / "out"
    run(tmp_path, **fields, output_dir=str(out), clip_by_module=clip_by_module, max_grad_norm=limit)

    (step,) = read_steps(out)
    before = load_weights(make_model_folder())
    after = load_weights(out)
    weight_prefixes = {
        "multi_modal_projector.norm": NORM,
        "language_model": "model.language_model",
        "lm_head": "lm_head",
    }
    for module, prefix in weight_prefixes.items():
        names = [name for name in before if name.startswith(f"{prefix}.")]
        changes = [(after[name] - before[name]).flatten() for name in names]
        clipped_norm = torch.cat(changes).norm().item()

        gradient_norm = step[f"grad_norm/{module}"]
        factor = limit / step["grad_norm"]  # for all modules together
        if clip_by_module:
            factor = min(1, limit / gradient_norm)  # a gradient below the limit stays whole
        assert clipped_norm == pytest.approx(factor * gradient_norm, rel=0.02), module


def test_gradient_accumulation_is_exact(fields: dict[str, Any], tmp_path: Path) -> None:
    """Four batches of one row make the same step as one batch of four rows."""
    fields |= {"stage": "align", "logging_steps": 1}
    losses = {}
    for batch_size in (1, 4):
        out = tmp_path / f"batches of {batch_size}"
        run(tmp_path, **fields, output_dir=str(out), per_device_train_batch_size=batch_size)
        losses[batch_size] = [step["loss"] for step in read_steps(out)]
    assert losses[1] == pytest.approx(losses[4], rel=1e-5)


def test_no_telemetry_is_sent(fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topics: list[str] = []
    monkeypatch.delenv("CI", raising=False)  # with CI set, TRL would send nothing anyway
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **event: topics.append(event["topic"]))
    run(tmp_path, **fields, **ONE_STEP, stage="align", output_dir=str(tmp_path / "out"))
    assert topics == []


def test_the_logged_rate_is_the_highest_if_no_module_has_the_common_rate(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    rates = {"learning_rate": 1e-3, "projector_learning_rate": 2e-4, "norm_learning_rate": 1e-5}
    run(tmp_path, **fields, **ONE_STEP, **rates, stage="align", output_dir=str(tmp_path / "out"))
    (step,) = read_steps(tmp_path / "out")
    assert step["learning_rate/multi_modal_projector"] == 2e-4
    assert step["learning_rate"] == 2e-4
    assert step["learning_rate/multi_modal_projector.norm"] == pytest.approx(1e-5)


@pytest.mark.parametrize("stage_fields", [{"stage": "align"}, INSTRUCT], ids=["align", "instruct"])
def test_packed_and_padded_rows_train_alike_with_the_loss_that_transformers_computes(
    make_model_folder: Callable[..., Path], fields: dict[str, Any], tmp_path: Path, stage_fields: dict[str, Any]
) -> None:
    fields |= {**stage_fields, "logging_steps": 1, "global_batch_size": 30, "num_train_epochs": 3}
    run(tmp_path, **fields, output_dir=str(tmp_path / "padded"))
    run(tmp_path, **{**fields, **PACKED}, output_dir=str(tmp_path / "packed"))

    padded_steps = read_steps(tmp_path / "padded")
    packed_steps = read_steps(tmp_path / "packed")
    assert len(packed_steps) == 3  # one in each epoch
    for step, expected in zip(packed_steps, padded_steps, strict=True):
        for name in ("loss", "norm/image", "norm/text", "grad_norm", "grad_norm/multi_modal_projector", "num_tokens"):
            assert step[name] == pytest.approx(expected[name], rel=1e-4), name

    # The first loss is the model's loss on all rows in one batch. `collate` uses the chat template, as only stage
    # "instruct" does.
    if stage_fields is INSTRUCT:
        model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.float32)
        batch = collate(make_model_folder(), list(load_rows(fields["dataset_name"])))
        assert packed_steps[0]["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_the_record_has_the_commit_of_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git_head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    environment = describe_environment("cpu", num_processes=1, resumed=False)
    # The record of a working tree with changes has "-dirty" after the commit.
    assert str(environment.commit).removesuffix("-dirty") == git_head.stdout.strip()

    # The record has no commit if this code is installed in a virtual environment inside another project's repository.
    installed = tmp_path / "venv" / "site-packages" / "training"
    installed.mkdir(parents=True)
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.com", "-C", str(tmp_path)]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "of another project"], check=True)
    monkeypatch.setattr("training.folders.run.__file__", str(installed / "run.py"))
    environment = describe_environment("cpu", num_processes=1, resumed=False)
    assert environment.commit is None


def test_a_model_in_the_output_folder_is_never_replaced(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_model_folder(), tmp_path / "model"))
    fields = {**INSTRUCT, "model_name_or_path": str(folder), "dataset_name": str(data), "output_dir": str(folder)}
    before = load_weights(folder)
    for resume in (False, True):
        with pytest.raises(ValueError, match="choose another folder"):
            run(tmp_path, **fields, resume_from_checkpoint=resume)

    for name, tensor in load_weights(folder).items():
        assert torch.equal(tensor, before[name]), name


def test_stage_align_refuses_conversations(make_model_folder: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    row = json.loads(data.read_text())[4]  # a row with a picture
    row["conversations"] += [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "two"}]
    path = data.parent / "conversation.json"
    path.write_text(json.dumps([row]))
    fields = {"model_name_or_path": str(make_model_folder()), "dataset_name": str(path), "max_steps": 1}
    with pytest.raises(ValueError, match=r"row 0: stage 'align' takes one human turn and one gpt turn"):
        run(tmp_path, **fields, stage="align", output_dir=str(tmp_path / "out"))
    run(tmp_path, **fields, **INSTRUCT, output_dir=str(tmp_path / "out"))


@pytest.mark.parametrize("stage_fields", [{"stage": "align"}, INSTRUCT], ids=["align", "instruct"])
def test_a_small_step_moves_every_value_in_bfloat16_training(
    make_model_folder: Callable[..., Path], fields: dict[str, Any], tmp_path: Path, stage_fields: dict[str, Any]
) -> None:
    # Adam's first step changes a weight by the learning rate, 1e-5. In bfloat16 the change would be lost: from 0.014,
    # for example, the next number is 6e-5 away.
    fields |= {**stage_fields, **PACKED, **ONE_STEP, "bf16": True, "learning_rate": 1e-5}
    run(tmp_path, **fields, output_dir=str(tmp_path / "out"))

    before = load_weights(make_model_folder())
    after = load_weights(tmp_path / "out")
    trained_names = [f"{NORM}.weight", "model.multi_modal_projector.linear_2.weight"]
    if stage_fields is INSTRUCT:
        trained_names += ["model.language_model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    for name in trained_names:
        has_changed = (after[name] - before[name]).abs() > 5e-6  # by at least half of the learning rate
        assert has_changed.float().mean() > 0.98, name
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}  # on a CPU, frozen weights are float32 too


def test_the_rates_of_other_modules_are_logged_if_the_common_rate_is_zero(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    # Without a rate of its own, the projector's norm has the common rate.
    rates = {"learning_rate": 0.0, "projector_learning_rate": 2e-4}
    run(tmp_path, **fields, **ONE_STEP, **rates, stage="align", output_dir=str(tmp_path / "out"))
    (step,) = read_steps(tmp_path / "out")
    assert step["learning_rate"] == 0.0
    assert step["learning_rate/multi_modal_projector.norm"] == 0.0
    assert step["learning_rate/multi_modal_projector"] == 2e-4
