"""Checks docs/preferences.md: its DPO and GRPO train a NormLlava, and a user can load the models that they save."""

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
# The page has two blocks of code.
DPO, GRPO = [code for _, code in fences(PAGE)]


@pytest.fixture
def quickstart(composed: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder with a small random model and rows, in the places where the quickstart puts its model and rows."""
    data = tmp_path / "runs/digits/data"
    data.mkdir(parents=True)
    (tmp_path / "runs/digits/stage2").symlink_to(composed())
    rows = []
    for number in range(64):
        Image.new("RGB", (28, 28), (4 * number, 0, 0)).save(data / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhich digit?"}, {"from": "gpt", "value": "three"}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    (data / "held_out.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path


def run_block(block: str, folder: Path) -> list[dict[str, float]]:
    """Run a block of the page for three steps. Returns what the trainer logged."""
    code = re.sub(r"max_steps=\d+", "max_steps=3, logging_steps=1", block)
    code += "\nprint('LOG', json.dumps(trainer.state.log_history))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("LOG ")]
    return json.loads(line.removeprefix("LOG "))


def test_dpo_starts_at_the_reference_and_prefers_what_is_chosen(quickstart: Path) -> None:
    first_step, *_, last_step, _ = run_block(DPO, quickstart)  # the last entry sums up the training
    # In the first step the model is equal to its reference, so the loss is ln 2 (arXiv 2305.18290, eq. 7).
    assert first_step["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert last_step["rewards/margins"] > 0

    trained = AutoModelForImageTextToText.from_pretrained(quickstart / "runs/digits/dpo", trust_remote_code=True)
    before = AutoModelForImageTextToText.from_pretrained(quickstart / "runs/digits/stage2", trust_remote_code=True)
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)


def test_grpo_generates_and_saves(quickstart: Path) -> None:
    first_step, *_ = run_block(GRPO, quickstart)
    assert first_step["completions/mean_length"] > 0
    AutoModelForImageTextToText.from_pretrained(quickstart / "runs/digits/grpo", trust_remote_code=True)
