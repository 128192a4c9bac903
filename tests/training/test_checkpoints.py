"""Checkpoints and runs that fail: what can be resumed, what is left behind, and that too large batches fail early."""

import errno
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

from normllava.errors import UserError
from script_runs import changed_weights, read_steps, run
from training.folders import checkpoints
from training.folders.checkpoints import find_checkpoint, steps_done
from training.loop import rehearsal
from training.loop.trainer import NormLlavaTrainer


def tear_file(path: Path) -> None:
    """Cut a file to two thirds, as if its writing had been interrupted."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


# Ways to damage the folder of a checkpoint. Checkpoint 3 lies beside this folder.
FAULTS: dict[str, Callable[[Path], object]] = {
    "state torn": lambda folder: tear_file(folder / "trainer_state.json"),
    "state of another step": lambda folder: shutil.copy(folder.parent / "checkpoint-3" / "trainer_state.json", folder),
    "record of a run by another version": lambda folder: (folder / "run.json").write_text('{"data": "a"}'),
    "saved by save_only_model": lambda folder: (folder / "scheduler.pt").unlink(),
    "an empty folder": empty_folder,
}


def test_without_a_checkpoint_a_run_starts_from_the_beginning_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_checkpoint(tmp_path, resume=True) is None
    assert "holds no checkpoint: the run starts from the beginning" in caplog.text


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_passed_over(killed_dir: Path, fault: str) -> None:
    FAULTS[fault](killed_dir / "checkpoint-6")
    assert find_checkpoint(killed_dir, resume=True) == killed_dir / "checkpoint-3"
    with pytest.raises(ValueError, match="checkpoint-6 can't be resumed from"):
        find_checkpoint(killed_dir, str(killed_dir / "checkpoint-6"))

    # With checkpoint 3 broken too, no checkpoint is left.
    tear_file(killed_dir / "checkpoint-3" / "run.json")
    with pytest.raises(ValueError, match="no complete checkpoint to resume from"):
        find_checkpoint(killed_dir, resume=True)


def test_other_users_may_read_what_a_run_writes(finished_fields: dict[str, Any]) -> None:
    """safetensors by itself writes files that only their owner can read, whatever the user's umask allows."""
    out = Path(finished_fields["output_dir"])
    expected_mode = (out / ".lock").stat().st_mode  # Python's `open` made this file, and follows the umask
    for path in (out / "model.safetensors", out / "checkpoint-6" / "model.safetensors"):
        assert path.stat().st_mode == expected_mode


def test_a_checkpoint_whose_weights_do_not_fit_is_refused(finished_fields: dict[str, Any], killed_dir: Path) -> None:
    path = killed_dir / "checkpoint-6" / "model.safetensors"
    tensors = load_file(path)
    tensors["renamed"] = tensors.pop("lm_head.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    fields = {**finished_fields, "output_dir": str(killed_dir), "resume_from_checkpoint": True}
    with pytest.raises(ValueError, match=r"Missing: \['lm_head.weight'\]; unexpected: \['renamed'\]"):
        run(killed_dir, **fields)


def test_two_runs_do_not_share_a_folder(finished_fields: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    fork = multiprocessing.get_context("fork")
    locked = fork.Event()

    def hold_lock() -> None:
        with checkpoints.lock_output_dir(out):
            locked.set()
            time.sleep(60)  # seconds; this process is killed earlier

    other_process = fork.Process(target=hold_lock)
    other_process.start()
    assert locked.wait(timeout=60)
    fields = {**finished_fields, "output_dir": str(out), "max_steps": 1}
    with pytest.raises(ValueError, match="out is in use"):
        run(tmp_path, **fields)
    assert [path.name for path in out.iterdir()] == [".lock"]

    # The lock ends with the process that holds it, even if the process is killed.
    other_process.kill()
    other_process.join()
    run(tmp_path, **fields)


def test_a_refused_run_leaves_no_folder_behind(finished_fields: dict[str, Any], tmp_path: Path) -> None:
    fields = {**finished_fields, "dataset_name": "none.json", "output_dir": str(tmp_path / "new")}
    with pytest.raises(ValueError, match=r"none\.json: there is no such file"):
        run(tmp_path, **fields)
    assert not (tmp_path / "new").exists()


def test_a_disk_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fcntl.lockf", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with checkpoints.lock_output_dir(tmp_path / "out"):
        assert (tmp_path / "out").is_dir()
    assert "can't be locked" in caplog.text


@pytest.mark.parametrize(
    ("function_name", "last_checkpoint"),
    [("publish_checkpoint", "checkpoint-3"), ("publish_result", "checkpoint-8")],
)
def test_after_an_error_in_writing_the_run_goes_on_from_its_last_checkpoint(
    finished_fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function_name: str,
    last_checkpoint: str,
) -> None:
    """The disk fills up while checkpoint 6 is written, or while the result is written into the output folder."""
    out = tmp_path / "out"
    fields = {**finished_fields, "output_dir": str(out)}
    publish = getattr(checkpoints, function_name)

    def publish_on_a_disk_that_fills_up(folder: Path, destination: Path) -> None:
        if destination in (out / "checkpoint-6", out):  # the result goes into `out`
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(folder, destination)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, function_name, publish_on_a_disk_that_fills_up)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path, **fields)
    assert find_checkpoint(out, resume=True) == out / last_checkpoint
    assert not (out / "config.json").exists()  # with this file the folder would look like a model

    run(tmp_path, **fields, resume_from_checkpoint=True)
    assert changed_weights(Path(finished_fields["output_dir"]), out) == set()
    assert steps_done(out) == 8


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_checkpoint(
    finished_fields: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fields = {**finished_fields, "output_dir": str(out), "save_steps": 1}
    # With this learning rate, step 1 makes the weights explode, so step 2 has no finite loss.
    fields |= {"learning_rate": 1e30, "lr_scheduler_type": "constant"}
    with pytest.raises(UserError, match="was not finite in step 2;"):
        run(tmp_path, **fields)
    assert find_checkpoint(out, resume=True) == out / "checkpoint-1"
    assert "NaN" not in (out / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("settings", "expected_steps"),
    [
        ({"logging_steps": 3}, "one of the steps 1 to 3"),
        ({"logging_steps": 100, "save_steps": 4}, "one of the steps 1 to 4"),
        ({"logging_steps": 100, "eval_strategy": "steps", "eval_steps": 5}, "one of the steps 1 to 5"),
        ({"logging_steps": 100}, "one of the steps 1 to 8"),
    ],
    ids=["logging", "saving", "evaluating", "ending"],
)
def test_a_loss_that_is_not_finite_is_found_before_anything_is_written(
    finished_fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    expected_steps: str,
) -> None:
    original_training_step = SFTTrainer.training_step

    def training_step_with_nan(trainer: SFTTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = original_training_step(trainer, *args, **kwargs)
        completed_steps = trainer.state.global_step
        if completed_steps == 1:  # the second step
            return loss * torch.nan
        return loss

    monkeypatch.setattr(SFTTrainer, "training_step", training_step_with_nan)
    fields = {**finished_fields, "save_steps": 100, "output_dir": str(tmp_path / "out"), **settings}
    if "eval_strategy" in settings:
        fields["eval_dataset_name"] = finished_fields["dataset_name"]
    with pytest.raises(UserError, match=f"was not finite in {expected_steps};"):
        run(tmp_path, **fields)
    assert find_checkpoint(tmp_path / "out", resume=True) is None
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_a_gradient_that_is_not_finite_stops_the_run(
    finished_fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_grad_norm: float
) -> None:
    original_training_step = SFTTrainer.training_step

    def training_step_with_inf(trainer: SFTTrainer, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = original_training_step(trainer, model, *args, **kwargs)
        model.model.multi_modal_projector.linear_1.weight.grad[0] = torch.inf
        return loss

    monkeypatch.setattr(SFTTrainer, "training_step", training_step_with_inf)
    with pytest.raises(UserError, match="The loss or the gradient's norm was not finite in one of the steps 1 to 2;"):
        run(tmp_path, **{**finished_fields, "output_dir": str(tmp_path / "out"), "max_grad_norm": max_grad_norm})


def test_the_optimizer_holds_the_trained_parameters_and_decays_no_norms_and_biases(
    finished_fields: dict[str, Any], tmp_path: Path
) -> None:
    fields = {**finished_fields, "output_dir": str(tmp_path / "out")}
    fields |= {"weight_decay": 0.1, "max_steps": 1, "save_steps": 1}
    run(tmp_path, **fields)
    optimizer_state = torch.load(tmp_path / "out" / "checkpoint-1" / "optimizer.pt", weights_only=False)

    # For each module and weight decay, the number of the module's tensors that have this weight decay.
    num_tensors: dict[tuple[str, float], int] = {}
    for group in optimizer_state["param_groups"]:
        num_tensors[group["module"], group["weight_decay"]] = len(group["params"])
    modules = {module for module, _ in num_tensors}
    assert modules == {
        "multi_modal_projector", "multi_modal_projector.norm", "language_model", "lm_head", "vision_tower",
    }  # fmt: skip
    assert num_tensors["multi_modal_projector", 0.1] == 2  # the weights of two linear layers
    assert num_tensors["multi_modal_projector", 0.0] == 2  # the biases of two linear layers
    assert num_tensors["multi_modal_projector.norm", 0.0] == 2  # the norm's weight and bias
    assert ("multi_modal_projector.norm", 0.1) not in num_tensors
    # Llava reads the output of the encoder's second layer, so only the embeddings and two layers are trained. A layer
    # has 16 tensors, and the embeddings have 3.
    num_vision_tensors = num_tensors["vision_tower", 0.1] + num_tensors["vision_tower", 0.0]
    assert num_vision_tensors == 2 * 16 + 3


@pytest.mark.parametrize(
    ("optim", "accumulation_steps"),
    [("adamw_torch_fused", 1), ("sgd", 2)],
    ids=["one pass a step", "two passes a step"],
)
def test_the_rehearsal_leaves_no_trace(
    finished_fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optim: str,
    accumulation_steps: int,
) -> None:
    """A run begins with a rehearsal, which tries whether the largest batches fit into memory.

    The rehearsal has two passes: one over the batch with most tokens, and one over the batch with most pictures. The
    second pass keeps the gradients of the first pass only if training accumulates gradients too. Otherwise the
    rehearsal would need more memory than training, and refuse runs that fit.
    """
    original_compute_loss = NormLlavaTrainer.compute_loss
    starts_with_gradients = []  # for each pass, whether any gradients exist at its start

    def record_and_compute_loss(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        starts_with_gradients.append(any(parameter.grad is not None for parameter in model.parameters()))
        return original_compute_loss(trainer, model, *args, **kwargs)

    fields = {**finished_fields, "optim": optim, "weight_decay": 0.1, "max_steps": 3, "lr_scheduler_type": "constant"}
    fields |= {"vision_learning_rate": 1e-3, "dataloader_num_workers": 1, "logging_steps": 1}
    fields |= {"per_device_train_batch_size": 2, "global_batch_size": 2 * accumulation_steps}
    with_rehearsal = tmp_path / "with rehearsal"
    without_rehearsal = tmp_path / "without rehearsal"
    monkeypatch.setattr(NormLlavaTrainer, "compute_loss", record_and_compute_loss)
    run(tmp_path, **{**fields, "output_dir": str(with_rehearsal)})

    accumulates = accumulation_steps > 1
    assert starts_with_gradients[:2] == [False, accumulates]  # the two passes of the rehearsal
    assert starts_with_gradients[2:4] == [False, accumulates]  # the first two passes of training

    monkeypatch.setattr(NormLlavaTrainer, "_rehearse", lambda *args: None)
    run(tmp_path, **{**fields, "output_dir": str(without_rehearsal)})
    assert changed_weights(with_rehearsal, without_rehearsal) == set()
    steps = read_steps(with_rehearsal)
    expected_steps = read_steps(without_rehearsal)
    for step, expected in zip(steps, expected_steps, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "norm/ratio"):
            # A step without pictures has no "norm/ratio".
            assert step.get(name) == expected.get(name), name


@pytest.mark.parametrize(
    ("input_name", "too_many_elements"),
    [
        pytest.param("pixel_values", 2 * 3 * 28**2, id="two pictures"),
        pytest.param("input_ids", 400, id="a batch with the long row"),
    ],
)
def test_a_run_that_does_not_fit_into_memory_fails_before_the_first_step(
    finished_fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    input_name: str,
    too_many_elements: int,
) -> None:
    """A pass over an input of `too_many_elements` or more elements runs out of simulated memory."""
    data = Path(finished_fields["dataset_name"])

    # One row is long and has no picture, so that one batch has most tokens, and another batch has most pictures.
    rows = json.loads(data.read_text())
    rows[0] = {"conversations": [{"from": "human", "value": "Say it."}, {"from": "gpt", "value": "so " * 100}]}
    (tmp_path / "rows.json").write_text(json.dumps(rows))

    original_compute_loss = NormLlavaTrainer.compute_loss

    def compute_loss_in_little_memory(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs[input_name].numel() >= too_many_elements:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original_compute_loss(trainer, model, inputs, *args, **kwargs)

    monkeypatch.setattr(NormLlavaTrainer, "compute_loss", compute_loss_in_little_memory)
    fields = {**finished_fields, "dataset_name": str(tmp_path / "rows.json"), "image_folder": str(data.parent)}
    with pytest.raises(UserError, match="largest batch does not fit into memory: lower packed_length or per_device"):
        run(tmp_path, **{**fields, "output_dir": str(tmp_path / "out")})


def test_weights_and_states_that_do_not_fit_are_told_from_a_large_batch(
    finished_fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate_in_little_memory(optimizer: torch.optim.Optimizer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rehearsal, "allocate_states", allocate_in_little_memory)
    with pytest.raises(UserError, match=r"optimizer's states do not fit into memory, .* optim: adamw_bnb_8bit"):
        run(tmp_path, **{**finished_fields, "output_dir": str(tmp_path / "out")})
