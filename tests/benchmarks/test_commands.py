"""Benchmarks whose figures stand in the docs still run, and show what they are there to show."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(name: str, output: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output), *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(output.read_text())


def test_loading_takes_the_memory_of_the_weights_once(tmp_path: Path) -> None:
    report = run("loading", tmp_path / "out.json", "--layers", "1")
    weights = report["weights_gib"]
    assert all(taken > 0.9 * weights for taken in report["each process loads"])
    for way in ("FSDP2", "DDP, DeepSpeed"):
        main, other = report[way]
        assert other < 0.1 * weights < main


def test_a_place_in_a_stream_is_reached_sooner_than_by_dropping(tmp_path: Path) -> None:
    arms = run("stream", tmp_path / "out.json", "--steps", "1000", "--repeats", "1")["arms"]
    assert {(arm["kind"], arm["packed"]) for arm in arms} >= {("tars", True), ("parquet", False), ("JSON", False)}
    for arm in arms:
        assert arm["step"] == 1000
        assert 0 < arm["seconds_at_place"] < arm["seconds_dropping"]


def test_losses_on_keys_keep_more_than_plain_lora(tmp_path: Path) -> None:
    (row,) = run("key_alignment", tmp_path / "out.json", "--lengths", "600", "--rounds", "2")["lengths"]
    assert row["lora"]["kept_mib"] < row["keys"]["kept_mib"] < row["losses"]["kept_mib"]
    assert row["lora"]["ratio"] == 1
