"""Data that the tests of training share."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


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
