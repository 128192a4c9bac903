"""A trainer and the bare loop beside it learn the same from the same batches, so that their times can be compared."""

import itertools
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
def test_what_is_compared_does_the_same(composed: Callable[..., Path], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "n" * (4 * number + 1)}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    for name in ROWS.values():
        (tmp_path / name).write_text(json.dumps(rows))
    options = {"model": composed(), "data": tmp_path, "steps": 3, "batch_size": 2, "output": tmp_path / "out.json"}
    main([f"--{name}={value}" for name, value in options.items()])

    reports = json.loads((tmp_path / "out.json").read_text())["arms"]
    assert [(report["stage"], report["arm"]) for report in reports] == list(itertools.product(ROWS, ARMS))
    for report in reports:
        assert len(report["steps"]) == 2
        assert report["ratio"] > 0
        assert 0 < report["share_of_peak"] < 1
        assert (report["padding_share"] > 0) == report["arm"].endswith("padded")
        if report["arm"].startswith("ours"):
            assert report["loss"] == pytest.approx(report["bare_loss"], rel=1e-5)
    # In stage 2 TRL tokenizes the same rows in the same batches: the bare loop's loss says so.
    assert reports[5]["bare_loss"] == pytest.approx(reports[3]["bare_loss"])


def test_without_the_real_model_it_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none/config\.json is missing: run `make emoji` first"):
        main(["--model", str(tmp_path / "none")])
