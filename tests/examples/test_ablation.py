"""The committed results of the ablation are what its report writes and reads."""

import importlib
import json
import resource
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from diagnostics.results import from_json, to_json


ROOT = Path(__file__).parents[2]


def imported(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "digits"))
    return importlib.import_module(name)


def test_the_committed_results_are_readable_and_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    ablation_report = imported(monkeypatch, "ablation_report")
    path = ROOT / "benchmarks" / "results" / "ablation.json"
    written = json.loads(path.read_text())
    summary = from_json(ablation_report.AblationResults, written, path)
    assert to_json(summary) == written
    by_arm = {run.arm: run for run in summary.runs if run.seed == 42}
    assert by_arm["none"].stage2.visual_over_text_norm > 20 > 2 > by_arm["gwc"].stage2.visual_over_text_norm
    results: dict[str, list[Any]] = defaultdict(list)
    for run in summary.runs:
        results[run.arm].append(run)
    page = (ROOT / "examples" / "digits" / "ABLATION.md").read_text()
    for name in ("benchmark", "parameter", "dynamics", "optimizer"):
        assert getattr(ablation_report, f"{name}_table")(results) in page


def test_what_was_made_from_a_missing_step_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ablation = imported(monkeypatch, "ablation")
    arm = ablation.ARMS[0]
    folder = ablation.arm_folder(tmp_path, arm, 42)
    results = [result for result, _ in ablation.commands(arm, 42, folder)] + [folder / "evaluation.json"]
    for result in results:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.touch()
    monkeypatch.setattr(ablation.subprocess, "run", lambda *args, **options: pytest.fail("a step was run"))
    made = [result.parent for result in results[:-1]] + results[-1:]
    for number, missing in enumerate(results[:-1]):
        missing.unlink()
        with pytest.raises(SystemExit, match=rf"incomplete: {missing.parent}\. Made from an earlier one: ") as refused:
            ablation.run_arm(arm, 42, tmp_path)
        assert all(str(path) in str(refused.value) for path in made[number + 1 :])
        missing.touch()


def test_pictures_do_not_stay_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = imported(monkeypatch, "report")
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    question = report.SceneQuestion("What?", "red", "colour", tmp_path / "0.png", "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        prompts = [report.with_image(question) for _ in range(400)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert prompts[-1][0]["content"][0]["image"].getpixel((0, 0)) == (0, 0, 0)
