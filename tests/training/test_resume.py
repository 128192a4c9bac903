"""Resumed runs: they end with the weights of an unbroken run, or are refused with a reason.

A broken run is a copy of an unbroken run's checkpoint, without what was written later, as if the run had been killed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from script_runs import INSTRUCT, PACKED, changed_weights, read_steps, run
from training.folders.checkpoints import find_checkpoint, steps_done
from training.folders.run import Run


# The recipe fields of each kind of run, besides `INSTRUCT`. `None` takes a field of `INSTRUCT` out of the recipe.
KINDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed, second epoch": {**PACKED, "num_train_epochs": 2, "global_batch_size": 8, "save_steps": 6},
    "packed, workers": {**PACKED, "dataloader_num_workers": 2},
    "checkpointed in bfloat16": {"bf16": True, "gradient_checkpointing": True, "clip_by_module": True},
    "align": {"stage": "align", "vision_learning_rate": None},
    "adapt": {"stage": "adapt", "vision_learning_rate": None, "lora_r": 4, "lora_dropout": 0.1},
    "tied embeddings": PACKED,
    "weights that the Hub names otherwise": {},
    "stream": {"dataset_streaming": True, "max_steps": 6},
}
# Arguments of the fixture `make_model_folder`, for kinds of run that start from another model than the usual one.
MODELS = {"tied embeddings": {"text": "gemma3"}, "weights that the Hub names otherwise": {"vision": "dinov2"}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_gives_the_weights_of_an_unbroken_one(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, kind: str
) -> None:
    fields = {"save_steps": 3, **INSTRUCT, **KINDS[kind], "dataset_name": str(data)}
    fields["model_name_or_path"] = str(make_model_folder(**MODELS.get(kind, {})))
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    run(tmp_path, **fields, output_dir=str(unbroken))

    # The broken run has its first checkpoint, and a line of metrics that was cut off when the run was killed. It also
    # has a newer checkpoint 99, which can't be used because its state is of another step.
    first_checkpoint = f"checkpoint-{fields['save_steps']}"
    shutil.copytree(unbroken / first_checkpoint, broken / first_checkpoint)
    (broken / "metrics.jsonl").write_text('{"step": 99, "lo')
    shutil.copytree(unbroken / first_checkpoint, broken / "checkpoint-99")
    with pytest.raises(ValueError, match="already holds a run"):
        run(tmp_path, **fields, output_dir=str(broken))
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)

    file_name = "adapter_model.safetensors" if kind == "adapt" else "model.safetensors"
    assert changed_weights(unbroken, broken, file_name) == set()
    assert (broken / "superseded" / "1" / "checkpoint-99").is_dir()
    assert not Run.read(unbroken).environment.resumed
    assert Run.read(broken).environment.resumed

    # A logged loss is the mean over the steps since the last log or restart, so losses are not compared.
    for step, expected in zip(read_steps(broken), read_steps(unbroken), strict=True):
        for name in ("step", "norm/image", "num_tokens"):
            # A step without pictures has no "norm/image".
            assert step.get(name) == expected.get(name), name


def test_a_run_packed_with_sdpa_goes_on_with_sdpa(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """The default attention of packed runs is "varlen", but a checkpoint may be of a run with sdpa."""
    fields = {
        **INSTRUCT,
        **PACKED,
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(data),
        "save_steps": 3,
    }
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    new = tmp_path / "new"
    run(tmp_path, **fields, output_dir=str(unbroken), attn_implementation="sdpa")
    shutil.copytree(unbroken / "checkpoint-3", broken / "checkpoint-3")
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert changed_weights(unbroken, broken) == set()
    assert Run.read(broken).arguments["attn_implementation"] == "sdpa"

    # Resuming the finished run with the default attention is not refused either.
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)

    # A new run uses varlen, whose results differ in the last digits.
    run(tmp_path, **fields, output_dir=str(new))
    assert Run.read(new).arguments["attn_implementation"] == "varlen"
    assert changed_weights(unbroken, new) != set()


def test_a_run_goes_on_in_the_arithmetic_that_it_began_with(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run begins on a CPU that is fast at bfloat16, and is resumed on a CPU that isn't."""
    fields = {**INSTRUCT, "model_name_or_path": str(make_model_folder()), "dataset_name": str(data), "save_steps": 3}
    fields["bf16"] = None  # the recipe doesn't say, so the CPU decides
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    # An older torch has no `get_capabilities`, so it need not exist (`raising=False`).
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    run(tmp_path, **fields, output_dir=str(unbroken))

    shutil.copytree(unbroken / "checkpoint-3", broken / "checkpoint-3")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {}, raising=False)
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert Run.read(broken).arguments["bf16"] is True
    assert changed_weights(unbroken, broken) == set()


def list_superseded(out: Path) -> set[str]:
    """The files and folders that resumed runs have moved into `superseded`, such as "1/checkpoint-6"."""
    superseded = out / "superseded"
    return {str(path.relative_to(superseded)) for path in superseded.glob("*/*")}


def test_a_run_resumes_from_a_checkpoint_given_by_path_and_moves_later_ones_away(
    finished_fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The finished run has checkpoints 3, 6 and 8. Resume it from checkpoint 3, to step 5, and save only at the end.
    out = tmp_path / "out"
    shutil.copytree(finished_fields["output_dir"], out)
    fields = {**finished_fields, "output_dir": str(out), "resume_from_checkpoint": str(out / "checkpoint-3")}
    fields |= {"learning_rate": 2e-3, "resume_changed": True, "save_steps": 100}
    run(tmp_path, **fields, max_steps=5)
    assert f"Going on after step 3, from {out / 'checkpoint-3'}" in caplog.text
    moved_by_first_resume = {"1/checkpoint-6", "1/checkpoint-8", "1/trainer_state.json"}
    assert list_superseded(out) == moved_by_first_resume
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-5"}
    assert Run.read(out).arguments["learning_rate"] == 2e-3

    # Resume from checkpoint 3 again, to step 6. Save after each step, and keep only the newest two checkpoints.
    fields |= {"save_steps": 1, "logging_steps": 1, "save_total_limit": 2}
    run(tmp_path, **fields, max_steps=6)
    moved_by_second_resume = {"2/checkpoint-5", "2/trainer_state.json"}
    assert list_superseded(out) == moved_by_first_resume | moved_by_second_resume
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-6"}


def test_a_resumed_run_takes_the_rates_and_options_that_it_is_given_now(
    finished_fields: dict[str, Any], killed_dir: Path
) -> None:
    fields = {**finished_fields, "output_dir": str(killed_dir), "resume_from_checkpoint": True, "resume_changed": True}
    changes = {"learning_rate": 2e-3, "norm_learning_rate": 5e-4, "adam_beta2": 0.95}
    run(killed_dir, **{**fields, **changes, "logging_steps": 1})

    # The rates fall to 0 in the eight steps of the run, which goes on with step 7.
    for step, part in zip(read_steps(killed_dir)[-2:], (2 / 8, 1 / 8), strict=True):
        assert step["learning_rate"] == pytest.approx(part * 2e-3)
        assert step["learning_rate/multi_modal_projector.norm"] == pytest.approx(part * 5e-4)
        assert step["learning_rate/vision_tower"] == pytest.approx(part * 2e-4)

    optimizer = torch.load(killed_dir / "checkpoint-8" / "optimizer.pt")
    assert {tuple(group["betas"]) for group in optimizer["param_groups"]} == {(0.9, 0.95)}


def test_a_checkpoint_elsewhere_is_refused_if_the_output_folder_holds_another_run(
    finished_fields: dict[str, Any], killed_dir: Path
) -> None:
    checkpoint_elsewhere = Path(finished_fields["output_dir"]) / "checkpoint-3"
    with pytest.raises(ValueError, match="already holds a run"):
        find_checkpoint(killed_dir, str(checkpoint_elsewhere))


# Arguments on which the weights depend, with other values than in the finished run.
CHANGED: dict[str, Any] = {
    "learning_rate": 2e-3, "adam_beta2": 0.95, "lr_scheduler_kwargs": {"num_cycles": 2}, "data_seed": 3,
    "neftune_noise_alpha": 5.0, "loss_type": "dft", "warmup_steps": 3,
    "attn_implementation": "eager", "bf16": True, "seed": 5, "weight_decay": 0.1, "max_grad_norm": 0.5,
}  # fmt: skip


def test_a_run_with_other_arguments_is_refused_with_the_differences(
    finished_fields: dict[str, Any], killed_dir: Path
) -> None:
    fields = {**finished_fields, "output_dir": str(killed_dir), "resume_from_checkpoint": True, **CHANGED}
    with pytest.raises(ValueError, match="belongs to a different run") as error:
        run(killed_dir, **fields)
    assert "  learning_rate: 0.001 before, 0.002 now" in str(error.value)
    # Each difference has an indented line, and no other line of the message is indented.
    differences = [line for line in str(error.value).splitlines() if line.startswith("  ")]
    names = {line.split(":")[0].strip() for line in differences}
    assert names == set(CHANGED)


def test_a_run_resumes_after_changes_that_leave_its_weights_alone(
    finished_fields: dict[str, Any], killed_dir: Path, data: Path
) -> None:
    """The checkpoint is of an older version of this code, the data has moved, and some fields have changed.

    The fields concern saving, workers and the progress bar.
    """
    record_file = killed_dir / "checkpoint-6" / "run.json"
    record = json.loads(record_file.read_text())
    del record["arguments"]["neftune_noise_alpha"]  # as if the older version didn't have this field
    record["arguments"]["a_field_of_an_older_version"] = 1
    record_file.write_text(json.dumps(record))

    shutil.copytree(data.parent, killed_dir.parent / "data")
    fields = {**finished_fields, "output_dir": str(killed_dir), "resume_from_checkpoint": True}
    fields["dataset_name"] = str(killed_dir.parent / "data" / data.name)
    run(killed_dir, **fields, save_total_limit=5, dataloader_num_workers=1, disable_tqdm=True)
    assert changed_weights(Path(finished_fields["output_dir"]), killed_dir) == set()


def test_a_run_whose_data_has_changed_is_refused(
    finished_fields: dict[str, Any], killed_dir: Path, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(data.parent, tmp_path / "data")
    changed_data = tmp_path / "data" / data.name
    rows = json.loads(changed_data.read_text())
    rows[6]["image"] = rows[7]["image"]  # another picture
    changed_data.write_text(json.dumps(rows))
    fields = {**finished_fields, "output_dir": str(killed_dir), "resume_from_checkpoint": True}
    fields["dataset_name"] = str(changed_data)
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: [^\n]*\nRestore these"):
        run(killed_dir, **fields)


@pytest.mark.parametrize(
    ("duration", "num_steps"),
    [
        pytest.param({"num_train_epochs": 1.5}, 12, id="one and a half epochs"),
        pytest.param({"dataset_streaming": True, "max_steps": 5}, 5, id="stream"),
    ],
)
def test_a_run_killed_after_its_last_checkpoint_is_finished_without_another_step(
    finished_fields: dict[str, Any], tmp_path: Path, duration: dict[str, Any], num_steps: int
) -> None:
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    # The learning rate is constant, so that another step would change weights. The default rate is 0 at the end.
    fields = {**finished_fields, **duration, "lr_scheduler_type": "constant"}
    run(tmp_path, **{**fields, "output_dir": str(unbroken)})

    # The broken run has all checkpoints, but no result.
    for path in unbroken.glob("checkpoint-*"):
        shutil.copytree(path, broken / path.name)

    # The first start writes the result into the output folder, and the second start finds the result there.
    for _ in range(2):
        run(tmp_path, **{**fields, "output_dir": str(broken)}, resume_from_checkpoint=True)
        assert changed_weights(unbroken, broken) == set()
        assert steps_done(broken) == num_steps

    assert {path.name for path in broken.iterdir()} == {path.name for path in unbroken.iterdir()}
    assert Run.read(broken).arguments == Run.read(unbroken).arguments


def test_a_finished_run_without_checkpoints_is_not_started_again(
    finished_fields: dict[str, Any], tmp_path: Path
) -> None:
    fields = {**finished_fields, "save_strategy": "no", "output_dir": str(tmp_path / "out")}
    run(tmp_path, **fields)
    metrics_file = tmp_path / "out" / "metrics.jsonl"
    metrics_before = metrics_file.read_text()
    run(tmp_path, **fields, resume_from_checkpoint=True)
    assert metrics_file.read_text() == metrics_before

    # More epochs would need a checkpoint to continue from.
    fields |= {"num_train_epochs": 2, "resume_from_checkpoint": True, "resume_changed": True}
    with pytest.raises(ValueError, match="a run of 8 steps, but no checkpoint to continue from to step 16"):
        run(tmp_path, **fields)
