"""A run that goes on: to the weights of an unbroken one, or with the reason why it can't."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from script_runs import INSTRUCT, PACKED, logged, moved, run
from training.checkpoints import find_checkpoint
from training.run import Run


# Runs that are stopped after their first checkpoint; what they train is in tests of its own.
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
    fields = {name: value for name, value in fields.items() if value is not None}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run(tmp_path, **fields, output_dir=str(unbroken))
    first = f"checkpoint-{fields['save_steps']}"
    shutil.copytree(unbroken / first, broken / first)
    shutil.copytree(unbroken / first, broken / "checkpoint-99")  # newer, and not complete
    (broken / "metrics.jsonl").write_text('{"step": 99, "lo')  # torn by the kill
    with pytest.raises(ValueError, match="already holds a run"):
        run(tmp_path, **fields, output_dir=str(broken))
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert moved(unbroken, broken, "adapter_model.safetensors" if kind == "adapt" else "model.safetensors") == set()
    assert (broken / "superseded" / "1" / "checkpoint-99").is_dir()
    assert [Run.read(folder).environment.resumed for folder in (unbroken, broken)] == [False, True]
    lines, expected = ([line for line in logged(folder) if "loss" in line] for folder in (broken, unbroken))
    # Not the loss: its first value after a restart averages over the steps since then, not since the last log.
    for name in ("step", "norm/visual", "num_tokens"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in expected]


def test_a_run_packed_with_sdpa_goes_on_with_it(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    """It was the default of packed rows before "varlen"."""
    fields = {**INSTRUCT, **PACKED, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 3}
    unbroken, broken, anew = tmp_path / "unbroken", tmp_path / "broken", tmp_path / "anew"
    run(tmp_path, **fields, output_dir=str(unbroken), attn_implementation="sdpa")
    shutil.copytree(unbroken / "checkpoint-3", broken / "checkpoint-3")
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert moved(unbroken, broken) == set()
    # Nor is a finished one another run.
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    run(tmp_path, **fields, output_dir=str(anew))
    recorded = [Run.read(folder).arguments["attn_implementation"] for folder in (unbroken, broken, anew)]
    assert recorded == ["sdpa", "sdpa", "varlen"]
    assert moved(unbroken, anew) != set()  # the last digits differ


def test_a_run_goes_on_in_the_arithmetic_that_it_began_with(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another CPU would choose another one."""
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 3}
    fields["bf16"] = None
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    run(tmp_path, **fields, output_dir=str(unbroken))

    shutil.copytree(unbroken / "checkpoint-3", broken / "checkpoint-3")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    run(tmp_path, **fields, output_dir=str(broken), resume_from_checkpoint=True)
    assert Run.read(broken).arguments["bf16"] is True
    assert moved(unbroken, broken) == set()


def test_a_named_checkpoint_is_gone_on_from_and_later_ones_are_moved_away(
    finished: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished["output_dir"], out)
    fields = {**finished, "output_dir": str(out), "learning_rate": 2e-3, "resume_changed": True, "save_steps": 100}
    fields["resume_from_checkpoint"] = str(out / "checkpoint-3")
    run(tmp_path, **fields, max_steps=5)
    away = {"1/checkpoint-6", "1/checkpoint-8", "1/trainer_state.json"}
    assert {str(path.relative_to(out / "superseded")) for path in (out / "superseded").glob("*/*")} == away
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-5"}
    assert Run.read(out).arguments["learning_rate"] == 2e-3
    # Of what was moved away nothing is replaced. The new intervals hold, and the newest are kept.
    fields |= {"save_steps": 1, "logging_steps": 1, "save_total_limit": 2}
    run(tmp_path, **fields, max_steps=6)
    away |= {"2/checkpoint-5", "2/trainer_state.json"}
    assert {str(path.relative_to(out / "superseded")) for path in (out / "superseded").glob("*/*")} == away
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-6"}
    # Another run's checkpoint does not take the folder over.
    with pytest.raises(ValueError, match="already holds a run"):
        find_checkpoint(out, str(Path(finished["output_dir"]) / "checkpoint-3"))


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
    found = {line.split(":")[0].strip() for line in str(error.value).splitlines()[1:-1]}
    assert found == set(CHANGED)


def test_what_an_upgrade_adds_to_the_record_stops_no_run(finished: dict[str, Any], copied: Path, data: Path) -> None:
    """Nor does what the weights don't depend on, or where the same data lies."""
    file = copied / "checkpoint-6" / "run.json"
    record = json.loads(file.read_text())
    del record["arguments"]["neftune_noise_alpha"]  # as if a later version were the first to record it
    record["arguments"]["a_field_of_an_older_version"] = 1
    file.write_text(json.dumps(record))
    elsewhere = Path(shutil.copytree(data.parent, copied.parent / "data")) / data.name
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "dataset_name": str(elsewhere)}
    run(copied, **fields, save_total_limit=5, dataloader_num_workers=1, disable_tqdm=True)
    assert moved(Path(finished["output_dir"]), copied) == set()


def test_data_that_changed_is_another_run(finished: dict[str, Any], copied: Path, data: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(data.parent, tmp_path / "data")) / data.name
    rows = json.loads(changed.read_text())
    rows[6]["image"], rows[7]["image"] = rows[7]["image"], rows[6]["image"]
    changed.write_text(json.dumps(rows))
    fields = {**finished, "output_dir": str(copied), "resume_from_checkpoint": True, "dataset_name": str(changed)}
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: [^\n]*\nRestore these"):
        run(copied, **fields)


LENGTHS = {"one and a half": {"num_train_epochs": 1.5}, "stream": {"dataset_streaming": True, "max_steps": 5}}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_finished_run_is_published_and_not_trained_on(finished: dict[str, Any], tmp_path: Path, length: str) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    # A rate that is not 0 at the end, so that a further step would show.
    fields = {**finished, **LENGTHS[length], "lr_scheduler_type": "constant", "output_dir": str(out)}
    run(tmp_path, **fields)
    for path in out.glob("checkpoint-*"):  # killed before the result was there
        shutil.copytree(path, again / path.name)
    for _ in range(2):
        run(tmp_path, **{**fields, "output_dir": str(again)}, resume_from_checkpoint=True)
    assert moved(out, again) == set()
    steps = 12 if length == "one and a half" else 5
    assert json.loads((again / "trainer_state.json").read_text())["global_step"] == steps
    assert {path.name for path in again.iterdir()} == {path.name for path in out.iterdir()}
    assert Run.read(again).arguments == Run.read(out).arguments


def test_a_finished_run_without_checkpoints_is_not_started_again(finished: dict[str, Any], tmp_path: Path) -> None:
    fields = {**finished, "save_strategy": "no", "output_dir": str(tmp_path / "out")}
    run(tmp_path, **fields)
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    run(tmp_path, **fields, resume_from_checkpoint=True)
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before
    fields |= {"num_train_epochs": 2, "resume_from_checkpoint": True, "resume_changed": True}
    with pytest.raises(ValueError, match="a run of 8 steps, but no checkpoint to continue from to step 16"):
        run(tmp_path, **fields)
