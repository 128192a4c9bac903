"""A trainer and the bare loop beside it learn the same from the same batches, so that their times can be compared."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.real import ARMS, ROWS, main


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two would wait for each other longer than they compute, on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_what_is_compared_does_the_same(
    composed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "n" * (4 * number + 1)}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    for name in ROWS.values():
        (tmp_path / name).write_text(json.dumps(rows))
    options = {"model": composed(), "data": tmp_path, "steps": 3, "batch_size": 2, "output": tmp_path / "out.json"}
    main([part for name, value in options.items() for part in (f"--{name}", str(value))])

    results = json.loads((tmp_path / "out.json").read_text())
    assert results["threads"] > 0
    arms = {(report["stage"], report["arm"]): report for report in results["arms"]}
    assert list(arms) == [(stage, arm) for stage in ROWS for arm in ARMS]
    for (_, arm), report in arms.items():
        assert len(report["steps"]) == 2
        assert report["ratio"] > 0
        assert 0 < report["share"] < 1
        if arm.startswith("ours"):
            assert report["loss"] == pytest.approx(report["bare_loss"], rel=1e-5)
    for stage in ROWS:
        # TRL tokenizes the same rows in the same batches: the model's FLOPs say so.
        assert arms[stage, "TRL, padded"]["gigaflops"] == pytest.approx(arms[stage, "ours, padded"]["gigaflops"])
        assert arms[stage, "TRL, padded"]["bare_loss"] == pytest.approx(arms[stage, "ours, padded"]["bare_loss"])
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(arms)
