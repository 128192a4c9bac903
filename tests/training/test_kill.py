"""A run killed at any point of a save goes on to the weights of a run that was never stopped, to the bit."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from script_runs import FAST, INSTRUCT, PACKED, ROOT, dump_recipe, logged, moved


pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

ADAPT = {"stage": "adapt", "load_in_4bit": True, "lora_r": 4}
STREAM = {"dataset_streaming": True, "max_steps": 8, "global_batch_size": None, "gradient_accumulation_steps": 2}
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": "align"},
    "stage 2": INSTRUCT,
    "stage 2, packed": {**INSTRUCT, **PACKED},
    "stage 2, streaming and packed": {**INSTRUCT, **PACKED, **STREAM},
    "stage 2, streaming": {**INSTRUCT, **STREAM},
    "stage 2, streaming with two workers": {**INSTRUCT, **STREAM, "dataloader_num_workers": 2},
    "stage 2, streaming and packed with two workers": {**INSTRUCT, **PACKED, **STREAM, "dataloader_num_workers": 2},
    "QLoRA, packed": {**ADAPT, **PACKED},
    "MaLoRA-style, packed": {**ADAPT, **PACKED, "lora_dropout": 0.05, "key_mmd_weight": 0.1, "key_gram_weight": 0.1},
}
# The state file is longer than the first, the weights are longer than the next two, the optimizer's state than all.
BYTES = ["bytes:4096", "bytes:60000", "bytes:150000", "bytes:300000"]


def drive(kind: str, composed: Callable[..., Path], data: Path, folder: Path, *points: str) -> None:
    recipe = folder / "recipe.yaml"
    start = composed(key_adapter_rank=4 if "key_mmd_weight" in KINDS[kind] else 0)
    fields = {**FAST, **KINDS[kind], "model_name_or_path": str(start), "dataset_name": str(data)}
    recipe.write_text(dump_recipe(**{**fields, "save_steps": 3, "logging_steps": 1, "output_dir": "given below"}))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kill_driver.py")), str(recipe), str(folder), *points],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]


def kill_at(
    kind: str, composed: Callable[..., Path], data: Path, folder: Path, choose: Callable[[int], list[str]]
) -> None:
    drive(kind, composed, data, folder)
    points = choose(len((folder / "unbroken" / "events.txt").read_text().splitlines()))
    drive(kind, composed, data, folder, *points)
    file = "adapter_model.safetensors" if KINDS[kind]["stage"] == "adapt" else "model.safetensors"
    expected = [line for line in logged(folder / "unbroken") if "loss" in line]
    assert len(expected) == 8  # which is more than the rows of an epoch of the streams
    for point in points:
        assert moved(folder / "unbroken", folder / point, file) == set(), point
        got = [line for line in logged(folder / point) if "loss" in line]
        for name in ("step", "epoch", "loss", "num_tokens", "norm/visual"):
            assert [line.get(name) for line in got] == [line.get(name) for line in expected], (point, name)


@pytest.mark.parametrize("kind", ["stage 2, packed", "stage 2, streaming with two workers"])
def test_killed_at_a_few_points(kind: str, composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    kill_at(kind, composed, data, tmp_path, lambda n: [f"event:{n // 4}", f"event:{n // 2}", BYTES[1]])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_many_points(kind: str, composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    step = 1 if kind == "stage 2, packed" else 4
    torn = BYTES if KINDS[kind]["stage"] == "instruct" else BYTES[:1]  # other optimizer states are small
    kill_at(kind, composed, data, tmp_path, lambda n: [f"event:{point}" for point in range(1, n + 1, step)] + torn)
