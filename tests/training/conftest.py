"""Data that the tests of training share."""

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
    """LLaVA JSON of 24 rows with pictures and 6 without, four of these in a row."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(24):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"number {number}"}]
        rows.append({"id": number, "image": f"{number}.png", "conversations": turns})
    for number in (0, 1, 2, 3, 12, 20):
        turns = [{"from": "human", "value": "Say."}, {"from": "gpt", "value": f"text {number}"}]
        rows.insert(number, {"id": f"t{number}", "conversations": turns})
    (folder / "data.json").write_text(json.dumps(rows))
    return folder / "data.json"


@pytest.fixture(scope="session")
def finished(composed: Callable[..., Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fields of a run of eight steps, finished, with checkpoints 3, 6 and 8 in `output_dir`. Read-only."""
    folder = tmp_path_factory.mktemp("finished")
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(data), "save_steps": 3}
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, folder, **fields, output_dir=str(folder / "out"))
    return {**fields, "output_dir": str(folder / "out")}


@pytest.fixture
def copied(finished: dict[str, Any], tmp_path: Path) -> Path:
    """The finished run's folder as it was when it had checkpoints 3 and 6."""
    for name in ("checkpoint-3", "checkpoint-6"):
        shutil.copytree(Path(finished["output_dir"]) / name, tmp_path / "out" / name)
    shutil.copy(Path(finished["output_dir"]) / "metrics.jsonl", tmp_path / "out")
    return tmp_path / "out"
