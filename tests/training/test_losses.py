"""The losses of ten steps of each stage, stored, so that a change of numerics is seen.

In float32 on one thread, processors differ by rounding alone, which ten steps leave far below the tolerance. If the
losses change on purpose, copy the new ones from the message of the test.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from script_runs import INSTRUCT, PACKED, read_steps, run


# The recipe fields of each run, and the losses that it had.
RUNS: dict[str, dict[str, Any]] = {
    "align": {"stage": "align"},
    "instruct": INSTRUCT,
    "instruct, packed": {**INSTRUCT, **PACKED},
    "adapt": {"stage": "adapt", "lora_r": 4},
}
LOSSES = {
    "align": [5.80414, 5.76316, 5.76131, 5.77593, 5.77285, 5.75329, 5.76482, 5.77944, 5.75062, 5.75348],
    "instruct": [5.78732, 5.68987, 5.60981, 5.55524, 5.54398, 5.45047, 5.44944, 5.36655, 5.42848, 5.36273],
    "instruct, packed": [5.78732, 5.68987, 5.60981, 5.55524, 5.54398, 5.45047, 5.44944, 5.36656, 5.42848, 5.36273],
    "adapt": [5.78732, 5.74698, 5.72085, 5.70436, 5.71507, 5.66406, 5.67413, 5.64086, 5.67697, 5.63667],
}


@pytest.fixture
def one_thread() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", RUNS)
def test_ten_steps_have_the_losses_that_they_had(
    name: str, make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    fields = {"model_name_or_path": str(make_model_folder()), "dataset_name": str(data), "seed": 7}
    run(tmp_path, **fields, **RUNS[name], max_steps=10, logging_steps=1, output_dir=str(tmp_path / "out"))
    losses = [round(step["loss"], 5) for step in read_steps(tmp_path / "out")]
    assert losses == pytest.approx(LOSSES[name], rel=1e-3), losses
