"""What needs a GPU, rehearsed on the CPU with a small model, so that no minute of a GPU is lost to a slip."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import gpu
from benchmarks.real import ROWS


@pytest.fixture
def rehearse(composed: Callable[..., Path], picture: Image.Image, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a part without a GPU, on 12 rows about one picture; its figures."""
    picture.save(tmp_path / "0.png")
    question = {"from": "human", "value": "<image>\nWhat?"}
    answers = [[question, {"from": "gpt", "value": "n" * count}] for count in range(1, 13)]
    for name in ROWS.values():
        (tmp_path / name).write_text(json.dumps([{"image": "0.png", "conversations": turns} for turns in answers]))

    def run_part(name: str) -> dict[str, Any]:
        options = {"model": composed(), "data": tmp_path, "steps": 3, "batch_size": 2, "results": tmp_path / "results"}
        gpu.main(["--cpu", "--parts", name, *(f"--{option}={value}" for option, value in options.items())])
        return json.loads((tmp_path / "results" / f"{name}-{composed().parent.name}.json").read_text())

    return run_part


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs(rehearse: Callable[..., dict[str, Any]]) -> None:
    assert rehearse("norm")["gradient_relative_error_float64"] < 1e-12
    assert rehearse("norm") == rehearse("norm")  # the figures that there are
    assert all(arm["tokens_per_second"] > 0 for arm in rehearse("training")["arms"])
    pytest.importorskip("bitsandbytes")
    losses = [line["loss"] for line in rehearse("qlora")["log"] if "loss" in line]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
