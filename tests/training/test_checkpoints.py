"""Checkpoints: what is complete, what is refused, and what a run does when it can't go on."""

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from trl import SFTTrainer

from common.errors import UserError
from script_runs import logged, moved, run
from training import checkpoints
from training.checkpoints import find_checkpoint, steps_done
from training.trainer import NormLlavaTrainer


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


FAULTS: dict[str, Callable[[Path], object]] = {
    "state torn": lambda folder: tear(folder / "trainer_state.json"),
    "state of another step": lambda folder: shutil.copy(folder.parent / "checkpoint-3" / "trainer_state.json", folder),
    "run of another version": lambda folder: (folder / "run.json").write_text('{"data": "a"}'),
    "nothing but weights": lambda folder: (folder / "scheduler.pt").unlink(),  # by `save_only_model`
    "nothing but a folder": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


def test_a_run_without_a_checkpoint_begins_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_checkpoint(tmp_path, True) is None
    assert "holds no checkpoint: the run starts from the beginning" in caplog.text


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_passed_over(copied: Path, fault: str) -> None:
    FAULTS[fault](copied / "checkpoint-6")
    assert find_checkpoint(copied, True) == copied / "checkpoint-3"
    with pytest.raises(ValueError, match="checkpoint-6 can't be resumed from"):
        find_checkpoint(copied, str(copied / "checkpoint-6"))
    tear(copied / "checkpoint-3" / "run.json")
    with pytest.raises(ValueError, match="no complete checkpoint to resume from"):
        find_checkpoint(copied, True)


def test_others_may_read_what_a_run_writes(finished: dict[str, Any]) -> None:
    """safetensors itself writes files that only their owner can read."""
    out = Path(finished["output_dir"])
    for path in (out / "model.safetensors", out / "checkpoint-6" / "model.safetensors"):
        assert path.stat().st_mode & 0o777 == (out / ".lock").stat().st_mode & 0o777


def test_weights_that_do_not_fit_are_an_error(
    finished: dict[str, Any], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied / "checkpoint-6" / "model.safetensors"
    tensors = load_file(file)
    tensors["renamed"] = tensors.pop("lm_head.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"Missing: \['lm_head.weight'\]; unexpected: \['renamed'\]"):
        run(monkeypatch, copied, **{**finished, "output_dir": str(copied), "resume_from_checkpoint": True})


def test_two_runs_do_not_share_a_folder(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    forked = multiprocessing.get_context("fork")
    locked = forked.Event()

    def hold() -> None:
        with checkpoints.lock_output_dir(out):
            locked.set()
            time.sleep(60)

    other = forked.Process(target=hold)
    other.start()
    assert locked.wait(timeout=60)
    fields = {**finished, "output_dir": str(out), "max_steps": 1}
    with pytest.raises(ValueError, match="out is in use"):
        run(monkeypatch, tmp_path, **fields)
    assert [path.name for path in out.iterdir()] == [".lock"]
    other.kill()
    other.join()
    run(monkeypatch, tmp_path, **fields)
    with pytest.raises(ValueError, match=r"none\.json: there is no such file"):
        run(monkeypatch, tmp_path, **{**fields, "dataset_name": "none.json", "output_dir": str(tmp_path / "new")})
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("fcntl.lockf", Mock(side_effect=OSError(38, "Function not implemented")))
    with checkpoints.lock_output_dir(tmp_path / "a disk without locks"):
        pass


@pytest.mark.parametrize("write", ["publish_checkpoint", "publish_result"])
def test_after_an_error_in_writing_the_run_goes_on_from_its_last_checkpoint(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    out = tmp_path / "out"
    fields = {**finished, "output_dir": str(out)}
    write_whole = getattr(checkpoints, write)

    def fail(folder: Path, destination: Path) -> None:
        if destination.name in ("checkpoint-6", "out"):
            raise OSError(28, "No space left on device")
        write_whole(folder, destination)

    with monkeypatch.context() as patched:
        patched.setattr(f"training.trainer.{write}", fail)
        with pytest.raises(OSError, match="No space left"):
            run(monkeypatch, tmp_path, **fields)
    last = "checkpoint-3" if write == "publish_checkpoint" else "checkpoint-8"
    assert find_checkpoint(out, True) == out / last
    assert not (out / "config.json").exists()
    run(monkeypatch, tmp_path, **fields, resume_from_checkpoint=True)
    assert moved(Path(finished["output_dir"]), out) == set()
    assert steps_done(out) == 8


def test_what_is_no_number_stops_the_run_and_keeps_its_checkpoint(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**finished, "output_dir": str(tmp_path / "out"), "save_steps": 1, "lr_scheduler_type": "constant"}
    with pytest.raises(UserError, match="The loss is nan in step"):
        run(monkeypatch, tmp_path, **{**fields, "learning_rate": 1e30})
    assert find_checkpoint(tmp_path / "out", True) is not None
    step = SFTTrainer.training_step

    def step_and_spoil(trainer: SFTTrainer, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(trainer, model, *args, **kwargs)
        model.model.multi_modal_projector.linear_1.weight.grad[0] = torch.inf
        return loss

    monkeypatch.setattr(SFTTrainer, "training_step", step_and_spoil)
    with pytest.raises(UserError, match="The gradient's norm is inf in step 1"):
        run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "spoilt")})


def test_the_optimizer_holds_what_is_trained_and_decays_no_norms_and_biases(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**finished, "weight_decay": 0.1, "max_steps": 1, "save_steps": 1, "output_dir": str(tmp_path / "out")}
    run(monkeypatch, tmp_path, **fields)
    groups = torch.load(tmp_path / "out" / "checkpoint-1" / "optimizer.pt", weights_only=False)["param_groups"]
    decays = [(group["module"], group["weight_decay"], len(group["params"])) for group in groups]
    modules = ["multi_modal_projector", "multi_modal_projector.norm", "language_model", "lm_head", "vision_tower"]
    assert list(dict.fromkeys(module for module, *_ in decays)) == modules
    assert [decay for decay in decays if "projector" in decay[0]] == [
        ("multi_modal_projector", 0.1, 2),
        ("multi_modal_projector", 0.0, 2),
        ("multi_modal_projector.norm", 0.0, 2),
    ]
    # Llava reads the second of three layers: 16 tensors each, and the embeddings.
    assert sum(count for module, _, count in decays if module == "vision_tower") == 2 * 16 + 3


@pytest.mark.parametrize(("optim", "accumulated"), [("adamw_torch_fused", 1), ("sgd", 2)])
def test_the_rehearsal_leaves_no_trace(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str, accumulated: int
) -> None:
    """Its second pass meets the first one's gradients only where a step's does: no run that fits is refused."""
    compute_loss, held = NormLlavaTrainer.compute_loss, []

    def look(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(any(parameter.grad is not None for parameter in model.parameters()))
        return compute_loss(trainer, model, *args, **kwargs)

    fields = {**finished, "optim": optim, "weight_decay": 0.1, "max_steps": 3, "lr_scheduler_type": "constant"}
    fields |= {"vision_learning_rate": 1e-3, "dataloader_num_workers": 1, "logging_steps": 1}
    fields |= {"per_device_train_batch_size": 2, "global_batch_size": 2 * accumulated}
    monkeypatch.setattr(NormLlavaTrainer, "compute_loss", look)
    run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "with")})
    assert held[:4] == [False, accumulated == 2] * 2  # the rehearsal's, then a step's
    monkeypatch.setattr(NormLlavaTrainer, "_prepare_for_training", SFTTrainer._prepare_for_training)
    run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "without")})
    assert moved(tmp_path / "with", tmp_path / "without") == set()
    kept = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "norm/ratio")
    got, expected = ([[line.get(name) for name in kept] for line in logged(tmp_path / n)] for n in ("with", "without"))
    assert got == expected


@pytest.mark.parametrize(("name", "limit"), [("pixel_values", 2 * 3 * 28**2), ("input_ids", 400)])
def test_what_does_not_fit_fails_before_the_first_step(
    finished: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    data, compute_loss = Path(finished["dataset_name"]), NormLlavaTrainer.compute_loss
    rows = json.loads(data.read_text())  # the batch with most tokens has one picture
    rows[0] = {"conversations": [{"from": "human", "value": "Say it."}, {"from": "gpt", "value": "so " * 100}]}
    (tmp_path / "rows.json").write_text(json.dumps(rows))

    def limited(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs[name].numel() >= limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute_loss(trainer, model, inputs, *args, **kwargs)

    monkeypatch.setattr(NormLlavaTrainer, "compute_loss", limited)
    fields = {**finished, "dataset_name": str(tmp_path / "rows.json"), "image_folder": str(data.parent)}
    with pytest.raises(UserError, match="largest batch does not fit into memory: lower packed_length or per_device"):
        run(monkeypatch, tmp_path, **{**fields, "output_dir": str(tmp_path / "out")})
