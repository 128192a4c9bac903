"""Data and runs that the tests of training share.

The fixture `make_model_folder`, in tests/conftest.py, is a function that returns the folder of a tiny model.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from script_runs import INSTRUCT, run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a JSON file of 30 rows in LLaVA's format. The pictures are in the same folder.

    Rows 0 to 3, 12 and 20 have no picture. The other 24 rows have one picture each.
    """
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(24):
        pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)  # noise, 30 x 20 pixels
        Image.fromarray(pixels).save(folder / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"number {number}"}]
        rows.append({"id": number, "image": f"{number}.png", "conversations": turns})

    for position in (0, 1, 2, 3, 12, 20):
        turns = [{"from": "human", "value": "Say."}, {"from": "gpt", "value": f"text {position}"}]
        rows.insert(position, {"id": f"text {position}", "conversations": turns})

    path = folder / "data.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="session")
def finished_fields(
    make_model_folder: Callable[..., Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The recipe fields of a run that has finished.

    The run has trained for eight steps, and has left checkpoints 3, 6 and 8 in its `output_dir`. All tests share this
    folder, so a test must not write to it.
    """
    folder = tmp_path_factory.mktemp("finished")
    fields = {**INSTRUCT, "model_name_or_path": str(make_model_folder()), "dataset_name": str(data), "save_steps": 3}
    fields["output_dir"] = str(folder / "out")
    run(folder, **fields)
    return fields


@pytest.fixture
def killed_dir(finished_fields: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the finished run's output folder, as if the run had been killed after checkpoint 6."""
    finished_dir = Path(finished_fields["output_dir"])
    copy = tmp_path / "out"
    for name in ("checkpoint-3", "checkpoint-6"):
        shutil.copytree(finished_dir / name, copy / name)
    shutil.copy(finished_dir / "metrics.jsonl", copy)
    return copy
