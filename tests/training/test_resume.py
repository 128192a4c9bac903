"""Resumed runs: they end with the weights of an unbroken run, or are refused for a reason that is told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from script_runs import INSTRUCT, PACKED, changed_weights, read_steps, run
from training.checkpoints import find_checkpoint
from training.run import Run


# Runs that are stopped after their first checkpoint, and resumed. `vision` and `text` choose the model; all other
# entries are fields of the recipe.
KINDS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed, second epoch": {**PACKED, "num_train_epochs": 2, "global_batch_size": 8, "save_steps": 6},
    "packed, workers": {**PACKED, "dataloader_num_workers": 2},
    "checkpointed in bfloat16": {"bf16": True, "gradient_checkpointing": True, "clip_by_module": True},
    "align": {"stage": "align", "vision_learning_rate": None},
    "adapt": {"stage": "adapt", "vision_learning_rate": None, "lora_r": 4, "lora_dropout": 0.1},
    "tied embeddings": {**PACKED, "text": "gemma3"},
    "weights that the Hub names otherwise": {"vision": "dinov2"},
    "stream": {"dataset_streaming": True, "max_steps": 6},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_gives_the_weights_of_an_unbroken_one(
    composed: Callable[..., Path], data: Path, tmp_path: Path, kind: str
) -> None:
    fields = {"save_steps": 3, **INSTRUCT, "dataset_name": str(data), **KINDS[kind]}
    fields["model_name_or_path"] = str(composed(fields.pop("vision", "siglip"), fields.pop("text", "qwen2")))
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    run(tmp_path, **fields, output_dir=str(unbroken))

    # The broken run has the first checkpoint, a newer one that is not complete, since its state is of another step
    # than its name, and a line of metrics that the kill cut off.
    first = f"checkpoint-{fields['save_steps']}"
    shutil.copytree(unbroken / first, broken / first)
    shutil.copytree(unbroken / first, broken / "checkpoint-99")
    (broken / "metrics.jsonl").write_text('{"step": 99, "lo')
    with pytest.raises(ValueError, match="already holds a run"):
        run(tmp_path, **fields, output_dir=str(broken))
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)

    file = "adapter_model.safetensors" if kind == "adapt" else "model.safetensors"
    assert changed_weights(unbroken, broken, file) == set()
    assert (broken / "superseded" / "1" / "checkpoint-99").is_dir()
    assert not Run.read(unbroken).environment.resumed
    assert Run.read(broken).environment.resumed

    # The loss is not compared: the first value after a restart is the mean since the restart, not since the last log.
    lines = read_steps(broken)
    expected = read_steps(unbroken)
    for name in ("step", "norm/visual", "num_tokens"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in expected]


def test_a_run_packed_with_sdpa_goes_on_with_it(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """Packed runs of earlier versions used sdpa, which was their default attention before "varlen"."""
    fields = {**INSTRUCT, **PACKED, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 3}
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    anew = tmp_path / "anew"
    run(tmp_path, **fields, output_dir=str(unbroken), attn_implementation="sdpa")
    shutil.copytree(unbroken / "checkpoint-3", broken / "checkpoint-3")
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert changed_weights(unbroken, broken) == set()
    assert Run.read(broken).arguments["attn_implementation"] == "sdpa"

    # When it is finished, resuming it once more is not refused as a different run.
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)

    # A new run uses varlen, whose results differ in the last digits.
    run(tmp_path, **fields, output_dir=str(anew))
    assert Run.read(anew).arguments["attn_implementation"] == "varlen"
    assert changed_weights(unbroken, anew) != set()


def test_a_run_goes_on_in_the_arithmetic_that_it_began_with(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run begins on a CPU that is fast at bfloat16, and is resumed on one that isn't."""
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 3}
    fields["bf16"] = None  # the machine chooses
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    run(tmp_path, **fields, output_dir=str(unbroken))

    shutil.copytree(unbroken / "checkpoint-3", broken / "checkpoint-3")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert Run.read(broken).arguments["bf16"] is True
    assert changed_weights(unbroken, broken) == set()


def list_superseded(out: Path) -> set[str]:
    """The paths, below `superseded`, of what resumed runs moved away."""
    superseded = out / "superseded"
    return {str(path.relative_to(superseded)) for path in superseded.glob("*/*")}


def test_a_run_resumes_from_a_checkpoint_given_by_path_and_moves_later_ones_away(
    finished: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished["output_dir"], out)
    fields = {**finished, "output_dir": str(out), "learning_rate": 2e-3, "resume_changed": True, "save_steps": 100}
    fields["resume_from_checkpoint"] = str(out / "checkpoint-3")
    run(tmp_path, **fields, max_steps=5)
    first_move = {"1/checkpoint-6", "1/checkpoint-8", "1/trainer_state.json"}
    assert list_superseded(out) == first_move
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-5"}
    assert Run.read(out).arguments["learning_rate"] == 2e-3

    # From checkpoint 3 again. What is moved away now goes into a folder of its own. The new save_steps holds, and
    # save_total_limit keeps the newest two checkpoints.
    fields |= {"save_steps": 1, "logging_steps": 1, "save_total_limit": 2}
    run(tmp_path, **fields, max_steps=6)
    assert list_superseded(out) == first_move | {"2/checkpoint-5", "2/trainer_state.json"}
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-6"}

    # From a checkpoint of another folder, no run may start in this one.
    with pytest.raises(ValueError, match="already holds a run"):
        find_checkpoint(out, str(Path(finished["output_dir"]) / "checkpoint-3"))


# Other values for arguments that the weights depend on.
CHANGED: dict[str, Any] = {
    "learning_rate": 2e-3, "adam_beta2": 0.95, "lr_scheduler_kwargs": {"num_cycles": 2}, "data_seed": 3,
    "neftune_noise_alpha": 5.0, "loss_type": "dft", "warmup_steps": 3,
    "attn_implementation": "eager", "bf16": True, "seed": 5, "weight_decay": 0.1, "max_grad_norm": 0.5,
}  # fmt: skip


def test_another_run_is_refused_with_the_differences(finished: dict[str, Any], copied: Path) -> None:
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, **CHANGED}
    with pytest.raises(ValueError, match="belongs to a different run") as error:
        run(copied, **fields)
    assert "  learning_rate: 0.001 before, 0.002 now" in str(error.value)
    differences = str(error.value).splitlines()[1:-1]  # between the first and the last sentence
    names = {line.split(":")[0].strip() for line in differences}
    assert names == set(CHANGED)


def test_a_run_resumes_after_changes_that_leave_its_weights_alone(
    finished: dict[str, Any], copied: Path, data: Path
) -> None:
    """Such as another version of this code, data moved to another folder, and fields for saving and loading."""
    file = copied / "checkpoint-6" / "run.json"
    record = json.loads(file.read_text())
    del record["arguments"]["neftune_noise_alpha"]  # as if a later version were the first to record it
    record["arguments"]["a_field_of_an_older_version"] = 1
    file.write_text(json.dumps(record))

    shutil.copytree(data.parent, copied.parent / "data")
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True}
    fields["dataset_name"] = str(copied.parent / "data" / data.name)
    run(copied, **fields, save_total_limit=5, dataloader_num_workers=1, disable_tqdm=True)
    assert changed_weights(Path(finished["output_dir"]), copied) == set()


def test_a_run_whose_data_has_changed_is_refused(
    finished: dict[str, Any], copied: Path, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(data.parent, tmp_path / "data")
    changed = tmp_path / "data" / data.name
    rows = json.loads(changed.read_text())
    rows[6]["image"], rows[7]["image"] = rows[7]["image"], rows[6]["image"]
    changed.write_text(json.dumps(rows))
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "dataset_name": str(changed)}
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: [^\n]*\nRestore these"):
        run(copied, **fields)


# Fields that give the length of a run, and the steps that it then takes.
LENGTHS: dict[str, tuple[dict[str, Any], int]] = {
    "one and a half epochs": ({"num_train_epochs": 1.5}, 12),
    "stream": ({"dataset_streaming": True, "max_steps": 5}, 5),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_finished_run_is_published_and_not_trained_on(finished: dict[str, Any], tmp_path: Path, length: str) -> None:
    out = tmp_path / "out"
    again = tmp_path / "again"
    length_fields, num_steps = LENGTHS[length]
    # With a constant learning rate a further step would change the weights. By default the rate has fallen to 0.
    fields = {**finished, **length_fields, "lr_scheduler_type": "constant"}
    run(tmp_path, **{**fields, "output_dir": str(out)})

    # A run that was killed after its last checkpoint and before its result. The first start publishes the result, and
    # the second finds it.
    for path in out.glob("checkpoint-*"):
        shutil.copytree(path, again / path.name)
    for _ in range(2):
        run(tmp_path, **{**fields, "output_dir": str(again)}, resume_from_checkpoint=True)

    assert changed_weights(out, again) == set()
    assert json.loads((again / "trainer_state.json").read_text())["global_step"] == num_steps
    assert {path.name for path in again.iterdir()} == {path.name for path in out.iterdir()}
    assert Run.read(again).arguments == Run.read(out).arguments


def test_a_finished_run_without_checkpoints_is_not_started_again(finished: dict[str, Any], tmp_path: Path) -> None:
    fields = {**finished, "save_strategy": "no", "output_dir": str(tmp_path / "out")}
    run(tmp_path, **fields)
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    run(tmp_path, **fields, resume_from_checkpoint=True)
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before

    # More epochs would need a checkpoint to continue from.
    fields |= {"num_train_epochs": 2, "resume_from_checkpoint": True, "resume_changed": True}
    with pytest.raises(ValueError, match="a run of 8 steps, but no checkpoint to continue from to step 16"):
        run(tmp_path, **fields)
