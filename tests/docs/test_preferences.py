"""Checks docs/preferences.md: the page's code for DPO and GRPO trains a NormLlava and saves a model that loads."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fences import fences
from PIL import Image
from transformers import AutoModelForImageTextToText


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/preferences.md").read_text(encoding="utf-8")
# The code of the two blocks on the page.
DPO, GRPO = [code for _, code in fences(PAGE)]


@pytest.fixture
def quickstart_folder(make_model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder with a small random model and 64 rows, at the paths where the quickstart writes its model and rows."""
    data = tmp_path / "runs/digits/data"
    data.mkdir(parents=True)
    model_folder = make_model_folder()
    (tmp_path / "runs/digits/stage2").symlink_to(model_folder)
    rows = []
    for number in range(64):
        red = 4 * number  # each picture has another shade of red
        Image.new("RGB", (28, 28), (red, 0, 0)).save(data / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhich digit?"}, {"from": "gpt", "value": "three"}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    (data / "held_out.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path


def run_block(block: str, folder: Path) -> list[dict[str, float]]:
    """Run a block of the page in this folder for three steps. Returns what the trainer logged.

    The log has an entry for each step, then the trainer's summary of the training.
    """
    code = re.sub(r"max_steps=\d+", "max_steps=3, logging_steps=1", block)
    # Each block of the page defines `trainer`.
    code += "\nimport json\nprint('LOG', json.dumps(trainer.state.log_history))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-3000:]

    (log_line,) = [line for line in completed.stdout.splitlines() if line.startswith("LOG ")]
    return json.loads(log_line.removeprefix("LOG "))


def test_dpo_starts_at_the_reference_and_prefers_what_is_chosen(quickstart_folder: Path) -> None:
    first_step, _second_step, last_step, _summary = run_block(DPO, quickstart_folder)
    # In the first step the model is equal to its reference, so the loss is ln 2 (arXiv 2305.18290, eq. 7).
    assert first_step["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert last_step["rewards/margins"] > 0

    trained = AutoModelForImageTextToText.from_pretrained(
        quickstart_folder / "runs/digits/dpo", trust_remote_code=True
    )
    reference = AutoModelForImageTextToText.from_pretrained(
        quickstart_folder / "runs/digits/stage2", trust_remote_code=True
    )
    assert not torch.equal(trained.lm_head.weight, reference.lm_head.weight)


def test_grpo_generates_and_saves(quickstart_folder: Path) -> None:
    first_step, *_others = run_block(GRPO, quickstart_folder)
    assert first_step["completions/mean_length"] > 0
    AutoModelForImageTextToText.from_pretrained(quickstart_folder / "runs/digits/grpo", trust_remote_code=True)
