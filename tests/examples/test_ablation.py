"""The committed results of the ablation are what its report writes and reads."""

import importlib
import json
from pathlib import Path

import pytest

from diagnostics.results import from_json, to_json


ROOT = Path(__file__).parents[2]


def test_the_committed_results_are_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "digits"))
    ablation_report = importlib.import_module("ablation_report")
    path = ROOT / "benchmarks" / "results" / "ablation.json"
    written = json.loads(path.read_text())
    summary = from_json(ablation_report.AblationResults, written, path)
    assert to_json(summary) == written
    by_arm = {run.arm: run for run in summary.runs if run.seed == 42}
    assert by_arm["none"].stage2.visual_over_text_norm > 20 > 2 > by_arm["gwc"].stage2.visual_over_text_norm
