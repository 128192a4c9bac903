"""Checks that a trainer and the bare loop train alike on the same batches, so that their times can be compared."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.real import ARMS, ROW_FILES, main


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread. On a busy machine, two threads wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_rows(folder: Path, num_rows: int) -> None:
    """Write rows with a picture each, for both stages. Answers have different lengths, so that rows are padded."""
    rows: list[dict[str, Any]] = []
    for number in range(num_rows):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        answer = "n" * (4 * number + 1)
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": answer}]
        rows.append({"image": f"{number}.png", "conversations": turns})
    for file_name in ROW_FILES.values():
        (folder / file_name).write_text(json.dumps(rows))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_trainers_and_the_bare_loop_train_alike(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    write_rows(tmp_path, num_rows=6)  # for three steps of two rows
    model_folder = make_model_folder()
    options = {"model": model_folder, "data": tmp_path, "steps": 3, "batch_size": 2, "output": tmp_path / "out.json"}
    main([f"--{name}={value}" for name, value in options.items()])

    reports = {}
    for report in json.loads((tmp_path / "out.json").read_text())["arms"]:
        reports[report["stage"], report["arm"]] = report
    assert list(reports) == list(itertools.product(ROW_FILES, ARMS))

    for (_, arm), report in reports.items():
        assert len(report["steps"]) == 2  # three steps, of which the first is not timed
        assert report["ratio"] > 0
        assert 0 < report["share_of_peak"] < 1
        if arm == "ours, packed":
            assert report["padding_share"] == 0
        else:
            assert report["padding_share"] > 0
        if arm != "TRL, padded":  # TRL trains a plain Llava, and the loop a NormLlava
            assert report["loss"] == pytest.approx(report["bare_loss"], rel=1e-5)

    # In stage 2 TRL makes the same batches as our command, so the loop has the same loss on the batches of both.
    bare_loss_on_ours = reports["instruct", "ours, padded"]["bare_loss"]
    bare_loss_on_trl = reports["instruct", "TRL, padded"]["bare_loss"]
    assert bare_loss_on_trl == pytest.approx(bare_loss_on_ours)


def test_without_the_real_model_it_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none/config\.json is missing: run `make emoji` first"):
        main(["--model", str(tmp_path / "none")])
