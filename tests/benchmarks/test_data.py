"""What the benchmark of opening and checking rows compares is the same rows."""

from pathlib import Path

import datasets
import pytest

from benchmarks import data
from conversations.loading import load_rows


def test_the_figures_are_of_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = data.write_rows(tmp_path, 200, with_pictures=True)
    assert list(data.parse(path)) == list(load_rows(str(path)))
    rows, lengths = data.check(path, 1)()
    assert len(rows) == len(lengths) == 200
    assert lengths.min() > 8
    for name in ("parse", "open", "check"):
        figures = data.run_task(name, path, 1)
        assert figures.keys() == {"seconds", "cpu_seconds", "held_bytes"}
        assert 0 < figures["cpu_seconds"] < 60
