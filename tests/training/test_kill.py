"""A run that is killed at any point of a save, and resumed, ends with exactly the weights of an unbroken run."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from script_runs import FAST, INSTRUCT, PACKED, ROOT, changed_weights, dump_recipe, read_steps


pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

ADAPT = {"stage": "adapt", "load_in_4bit": True, "lora_r": 4}
STREAM = {"dataset_streaming": True, "max_steps": 8, "global_batch_size": None, "gradient_accumulation_steps": 2}
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": "align"},
    "stage 2": INSTRUCT,
    "stage 2, packed": {**INSTRUCT, **PACKED},
    "stage 2, streaming": {**INSTRUCT, **STREAM},
    "stage 2, streaming with two workers": {**INSTRUCT, **STREAM, "dataloader_num_workers": 2},
    "QLoRA, packed": {**ADAPT, **PACKED},
    "MaLoRA-style, packed": {**ADAPT, **PACKED, "lora_dropout": 0.05, "key_mmd_weight": 0.1, "key_gram_weight": 0.1},
}


def drive(kind: str, composed: Callable[..., Path], data: Path, folder: Path, *events: int) -> None:
    """Let kill_driver.py, which documents the events, kill and resume a run at each of them."""
    key_adapter_rank = 4 if "key_mmd_weight" in KINDS[kind] else 0
    fields = {**FAST, **KINDS[kind], "dataset_name": str(data), "save_steps": 3, "logging_steps": 1}
    fields["model_name_or_path"] = str(composed(key_adapter_rank=key_adapter_rank))
    fields["output_dir"] = "overridden by the driver"
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_recipe(**fields))

    driver = Path(__file__).with_name("kill_driver.py")
    numbers = [str(event) for event in events]
    command = [sys.executable, str(driver), str(recipe), str(folder), *numbers]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]


def kill_at(
    kind: str, composed: Callable[..., Path], data: Path, folder: Path, choose: Callable[[int], Iterable[int]]
) -> None:
    """Kill and resume a run at each of some events, and compare it with an unbroken run.

    `choose` picks the events, given how many there are.
    """
    drive(kind, composed, data, folder)
    num_events = len((folder / "unbroken" / "events.txt").read_text().splitlines())
    events = choose(num_events)
    drive(kind, composed, data, folder, *events)

    file = "adapter_model.safetensors" if KINDS[kind]["stage"] == "adapt" else "model.safetensors"
    expected = read_steps(folder / "unbroken")
    assert len(expected) == 8  # steps of 4 rows: more than one epoch of the 30 rows, so a stream has begun anew
    for event in events:
        assert changed_weights(folder / "unbroken", folder / str(event), file) == set(), event
        lines = read_steps(folder / str(event))
        for name in ("step", "epoch", "loss", "num_tokens", "norm/visual"):
            assert [line.get(name) for line in lines] == [line.get(name) for line in expected], (event, name)


@pytest.mark.parametrize("kind", ["stage 2, packed", "stage 2, streaming with two workers"])
def test_killed_at_a_few_points(kind: str, composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    kill_at(kind, composed, data, tmp_path, lambda num_events: [num_events // 4, num_events // 2])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_many_points(kind: str, composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    step = 1 if kind == "stage 2, packed" else 4
    kill_at(kind, composed, data, tmp_path, lambda num_events: range(1, num_events + 1, step))
