"""A run that is killed at any point of a save, and resumed, ends with exactly the weights of an unbroken run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from script_runs import FAST, INSTRUCT, PACKED, ROOT, changed_weights, dump_recipe, read_steps


pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

ADAPT = {"stage": "adapt", "load_in_4bit": True, "lora_r": 4}
# `None` takes a field of `FAST` out of the recipe.
STREAM = {"dataset_streaming": True, "max_steps": 8, "global_batch_size": None, "gradient_accumulation_steps": 2}
# The recipe fields of each kind of run. The last kind has a model with key adapters, and trains them.
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": "align"},
    "stage 2": INSTRUCT,
    "stage 2, packed": {**INSTRUCT, **PACKED},
    "stage 2, streaming": {**INSTRUCT, **STREAM},
    "stage 2, streaming with two workers": {**INSTRUCT, **STREAM, "dataloader_num_workers": 2},
    "QLoRA, packed": {**ADAPT, **PACKED},
    "key adapters, packed": {**ADAPT, **PACKED, "lora_dropout": 0.05, "key_mmd_weight": 0.1, "key_gram_weight": 0.1},
}


def run_driver(kind: str, make_model_folder: Callable[..., Path], data: Path, folder: Path, *events: int) -> None:
    """Run kill_driver.py, in which an operation on a file of the run's output folder is an event.

    For each event N, the driver kills and resumes a run in `folder/N`. Without events, it trains an unbroken run.
    """
    key_adapter_rank = 4 if "key_mmd_weight" in KINDS[kind] else 0
    fields = {**FAST, **KINDS[kind], "dataset_name": str(data), "save_steps": 3, "logging_steps": 1}
    fields["model_name_or_path"] = str(make_model_folder(key_adapter_rank=key_adapter_rank))
    fields["output_dir"] = "unused"  # the driver's command line overrides this
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**fields))

    driver = Path(__file__).with_name("kill_driver.py")
    command = [sys.executable, str(driver), str(recipe), str(folder), *map(str, events)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]


def train_unbroken(kind: str, make_model_folder: Callable[..., Path], data: Path, folder: Path) -> int:
    """Train a run that isn't killed, in `folder/unbroken`, and return the number of its events."""
    run_driver(kind, make_model_folder, data, folder)
    events = (folder / "unbroken" / "events.txt").read_text().splitlines()
    return len(events)


def assert_same_as_unbroken(kind: str, folder: Path, event: int) -> None:
    """Check that the run killed at an event, and resumed, has the weights and metrics of the unbroken run."""
    unbroken = folder / "unbroken"
    killed = folder / str(event)
    file_name = "adapter_model.safetensors" if KINDS[kind]["stage"] == "adapt" else "model.safetensors"
    assert changed_weights(unbroken, killed, file_name) == set(), event

    steps = read_steps(killed)
    expected_steps = read_steps(unbroken)
    # 30 rows make 8 steps of 4 rows. The last step has only 2 rows, except in a stream, which begins anew at its end.
    assert len(expected_steps) == 8
    for step, expected in zip(steps, expected_steps, strict=True):
        for name in ("step", "epoch", "loss", "num_tokens", "norm/image"):
            # A step without pictures has no "norm/image".
            assert step.get(name) == expected.get(name), (event, name)


@pytest.mark.parametrize("kind", ["stage 2, packed", "stage 2, streaming with two workers"])
def test_a_run_killed_at_two_points_ends_like_the_unbroken_run(
    kind: str, make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    num_events = train_unbroken(kind, make_model_folder, data, tmp_path)
    events = [num_events // 4, num_events // 2]
    run_driver(kind, make_model_folder, data, tmp_path, *events)
    for event in events:
        assert_same_as_unbroken(kind, tmp_path, event)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_many_points_ends_like_the_unbroken_run(
    kind: str, make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    num_events = train_unbroken(kind, make_model_folder, data, tmp_path)
    # One kind of run is killed at every event, the other kinds at every fourth, to save time.
    interval = 1 if kind == "stage 2, packed" else 4
    events = range(1, num_events + 1, interval)
    run_driver(kind, make_model_folder, data, tmp_path, *events)
    for event in events:
        assert_same_as_unbroken(kind, tmp_path, event)
