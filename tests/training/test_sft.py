"""The training script as people start it: both stages, resuming, and errors before any work is lost."""

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

from conversations.loading import load_rows
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT, NORM, PACKED, ROOT, collate, dump_recipe, logged, moved, run, weights
from training.run import Run, describe_environment


def test_both_stages_from_the_command_line(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    stage1, stage2 = tmp_path / "stage1", tmp_path / "stage2"
    stage1.mkdir()
    (stage1 / "README.md").write_text("ours")
    for fields in (
        {"stage": "align", "model_name_or_path": str(composed()), "output_dir": str(stage1)},
        {**INSTRUCT, "model_name_or_path": str(stage1), "output_dir": str(stage2)},
    ):
        (tmp_path / "recipe.yaml").write_text(dump_recipe(**{**FAST, "dataset_name": str(data), **fields}))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "training/sft.py"]
        result = subprocess.run(
            [*launch, "--config", str(tmp_path / "recipe.yaml")], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert "1 processes x 2 rows x 2 accumulation steps = global batch 4" in result.stderr

    names = set(weights(stage1))
    projector = {name for name in names if name.startswith("model.multi_modal_projector.")}
    assert moved(composed(), stage1) == projector
    # Llava reads the hidden state before the last of the three layers.
    past = (".layers.2.", ".post_layernorm.", ".head.")
    unread = {name for name in names if "vision_tower" in name and any(part in name for part in past)}
    still = names - moved(stage1, stage2)
    assert unread
    assert still == unread

    assert (stage1 / "README.md").read_text() == "ours"
    metrics = logged(stage2)
    assert [line["step"] for line in metrics] == [2, 4, 6, 8, 8]
    for line in metrics[:-1]:
        assert line["norm/ratio"] == pytest.approx(line["norm/visual"] / line["norm/text"])
        assert line["learning_rate/vision_tower"] == pytest.approx(line["learning_rate"] / 5)
        parts = ("vision_tower", "multi_modal_projector", "multi_modal_projector.norm", "language_model", "lm_head")
        total = sum(line[f"grad_norm/{part}"] ** 2 for part in parts) ** 0.5
        assert total == pytest.approx(line["grad_norm"], rel=1e-4)
    AutoProcessor.from_pretrained(stage2)
    AutoModelForImageTextToText.from_pretrained(stage2)
    made = Run.read(stage2)
    assert (made.arguments["stage"], made.arguments["model_name_or_path"]) == ("instruct", str(stage1))
    assert made.recipe == str(tmp_path / "recipe.yaml")
    assert (made.environment.num_processes, made.environment.resumed) == (1, False)
    assert made.environment.packages["torch"] == torch.__version__


# All rows a step, so that their order does not matter.
ONE_STEP = {"max_steps": 1, "logging_steps": 1, "lr_scheduler_type": "constant", "global_batch_size": 30}


@pytest.fixture
def fields(composed: Callable[..., Path], data: Path) -> dict[str, Any]:
    return {"model_name_or_path": str(composed()), "dataset_name": str(data)}


def test_each_module_moves_at_its_own_rate(
    composed: Callable[..., Path], fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Adam's first step moves every weight that has a gradient by its learning rate.
    rates = {"norm_learning_rate": 5e-4, "projector_learning_rate": 1e-4}
    run(monkeypatch, tmp_path, **fields, **INSTRUCT, **ONE_STEP, **rates, output_dir=str(tmp_path / "out"))
    (line, _) = logged(tmp_path / "out")
    assert line["learning_rate/multi_modal_projector.norm"] == 5e-4
    assert line["learning_rate/multi_modal_projector"] == 1e-4
    before, after = weights(composed()), weights(tmp_path / "out")
    for name, rate in (
        ("model.vision_tower.embeddings.patch_embedding.weight", 2e-4),
        ("model.multi_modal_projector.linear_1.weight", 1e-4),
        (f"{NORM}.weight", 5e-4),
        ("model.language_model.layers.0.mlp.up_proj.weight", 1e-3),
    ):
        assert (after[name] - before[name]).abs().max().item() == pytest.approx(rate, rel=0.05), name


@pytest.mark.parametrize("by_module", [False, True])
def test_clipping_by_module_leaves_the_small_gradients_whole(
    composed: Callable[..., Path], fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    by_module: bool,
) -> None:  # fmt: skip
    # With plain SGD a weight moves by its gradient, so the change says what was clipped.
    fields |= {**INSTRUCT, **ONE_STEP, "optim": "sgd", "learning_rate": 1.0, "vision_learning_rate": 1.0}
    limit, out = 0.05, tmp_path / "out"
    run(monkeypatch, tmp_path, **fields, output_dir=str(out), clip_by_module=by_module, max_grad_norm=limit)
    (line, _), before, after = logged(out), weights(composed()), weights(out)
    parts = {"multi_modal_projector.norm": NORM, "language_model": "model.language_model", "lm_head": "lm_head"}
    for part, prefix in parts.items():
        moves = [(after[name] - before[name]).norm() for name in before if name.startswith(f"{prefix}.")]
        norm = line[f"grad_norm/{part}"]
        scale = limit / max(norm, limit) if by_module else limit / line["grad_norm"]
        assert torch.stack(moves).norm().item() == pytest.approx(norm * scale, rel=0.02), part


def test_gradient_accumulation_is_exact_and_nothing_is_told_to_anyone(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **event: sent.append(event["topic"]))
    fields |= {"stage": "align", "logging_steps": 1}
    for size in (1, 4):
        run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / str(size)), per_device_train_batch_size=size)
    losses = [[line.get("loss") for line in logged(tmp_path / size)][:-1] for size in ("1", "4")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert sent == []


def test_rates_are_logged_where_no_module_has_the_common_one(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"learning_rate": 1e-3, "projector_learning_rate": 2e-4, "norm_learning_rate": 1e-5}
    run(monkeypatch, tmp_path, **{**fields, **ONE_STEP, **rates}, stage="align", output_dir=str(tmp_path / "out"))
    (line, _) = logged(tmp_path / "out")
    assert line["learning_rate/multi_modal_projector"] == line["learning_rate"] == 2e-4
    assert line["learning_rate/multi_modal_projector.norm"] == pytest.approx(1e-5)


@pytest.mark.parametrize("stage", [{"stage": "align"}, INSTRUCT], ids=["align", "instruct"])
def test_packing_trains_as_padding_does_by_the_loss_that_transformers_computes(
    composed: Callable[..., Path], fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    stage: dict[str, Any],
) -> None:  # fmt: skip
    fields |= {**stage, "logging_steps": 1, "global_batch_size": 30, "num_train_epochs": 3}
    run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / "padded"))
    run(monkeypatch, tmp_path, **{**fields, **PACKED}, output_dir=str(tmp_path / "packed"))
    padded, packed = ([line for line in logged(tmp_path / name) if "loss" in line] for name in ("padded", "packed"))
    assert len(packed) == 3
    for line, expected in zip(packed, padded, strict=True):
        for name in ("loss", "norm/visual", "norm/text", "grad_norm", "grad_norm/multi_modal_projector", "num_tokens"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name
    if stage is INSTRUCT:
        model = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.float32)
        batch = collate(composed(), list(load_rows(fields["dataset_name"])))
        assert packed[0]["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_the_commit_is_that_of_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment inside another project's repository holds an installed copy, which that one doesn't track."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    here = describe_environment("cpu", 1, resumed=False)
    assert str(here.commit).removesuffix("-dirty") == head.stdout.strip()
    installed = tmp_path / "venv" / "site-packages" / "training"
    installed.mkdir(parents=True)
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.com", "-C", str(tmp_path)]
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "theirs"], check=True)
    monkeypatch.setattr("training.run.__file__", str(installed / "run.py"))
    there = describe_environment("cpu", 1, resumed=False)
    assert there.commit is None


def test_a_model_in_the_output_folder_is_never_replaced(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(composed(), tmp_path / "model"))
    fields = {**INSTRUCT, "model_name_or_path": str(folder), "dataset_name": str(data), "output_dir": str(folder)}
    before = weights(folder)
    for resume in ({}, {"resume_from_checkpoint": True}):
        with pytest.raises(ValueError, match="choose another folder"):
            run(monkeypatch, tmp_path, **fields, **resume)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(folder).items())


def test_a_conversation_is_no_row_of_stage_align(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(row for row in json.loads(data.read_text()) if "image" in row)
    more = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "two"}]
    path = data.parent / "conversation.json"
    path.write_text(json.dumps([{**row, "conversations": [*row["conversations"], *more]}]))
    fields = {"model_name_or_path": str(composed()), "dataset_name": str(path), "max_steps": 1}
    with pytest.raises(ValueError, match=r"row 0: stage 'align' takes one human turn and one gpt turn"):
        run(monkeypatch, tmp_path, **fields, stage="align", output_dir=str(tmp_path / "out"))
    run(monkeypatch, tmp_path, **fields, **INSTRUCT, output_dir=str(tmp_path / "out"))


@pytest.mark.parametrize("stage", [{"stage": "align"}, INSTRUCT], ids=["align", "instruct"])
def test_a_small_step_moves_every_value_in_bfloat16_training(
    composed: Callable[..., Path], fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    stage: dict[str, Any],
) -> None:  # fmt: skip
    # A bfloat16 weight of 0.014 has its neighbour 6e-5 away: a step of 1e-5 would be lost.
    fields |= {**stage, **PACKED, **ONE_STEP, "bf16": True, "learning_rate": 1e-5}
    run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / "out"))
    before, after = weights(composed()), weights(tmp_path / "out")
    trained = [f"{NORM}.weight", "model.multi_modal_projector.linear_2.weight"]
    if stage is INSTRUCT:
        trained += ["model.language_model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    for name in trained:
        assert after[name].dtype == torch.float32
        assert ((after[name] - before[name]).abs() > 5e-6).float().mean() > 0.98, name
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}  # on a CPU, frozen ones too
