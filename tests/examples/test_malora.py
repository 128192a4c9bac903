"""The MaLoRA-style arms: committed results are what the report writes and reads; seeds and tokens are paired."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from diagnostics.results import from_json, to_json


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "malora.json"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "digits"))
    return importlib.import_module("malora_report")


def read_cases(report: ModuleType) -> Any:
    return from_json(report.MaloraResults, json.loads(RESULTS.read_text()), RESULTS)


def test_the_committed_results_are_readable_and_on_the_page(report: ModuleType) -> None:
    summary = read_cases(report)
    assert to_json(summary) == json.loads(RESULTS.read_text())
    page = (ROOT / "examples" / "digits" / "MALORA.md").read_text()
    assert all(table in page for table in report.make_tables(summary.cases).values())
    assert "{" not in page


def test_what_is_asked_of_keys_is_done(report: ModuleType) -> None:
    gap = report.apart("keys", "mmd")
    for case in read_cases(report).cases:
        if {"lora", "mmd"} <= case.models.keys():
            assert gap(case.models["mmd"]) < 0.8 * gap(case.models["lora"])


def test_rescaling_reaches_visual_tokens_behind_the_first_layer(report: ModuleType) -> None:
    rescaled = [case.rescaled for case in read_cases(report).cases if case.norm == "none"]
    assert len(rescaled) == 3
    for cosines in (cosines for of in rescaled for cosines in (of.keys, of.values)):
        assert cosines.visual[0] == pytest.approx(1, abs=1e-4)  # the layer norms what it gets
        assert cosines.text[:2] == pytest.approx([1, 1], abs=1e-3)  # text has seen that layer's keys and values
        assert cosines.visual[1] < 0.5


def test_arms_are_compared_with_plain_lora_of_the_same_seed(report: ModuleType) -> None:
    case = read_cases(report).cases[0]
    start, lora = case.models["stage1"], case.models["lora"]

    def with_attention(value: float) -> Any:
        return replace(lora, attention=[value] * 3)

    cases = [
        replace(case, models={"stage1": start, "lora": with_attention(lora), "keys": with_attention(keys)})
        for lora, keys in ((0.1, 0.2), (0.5, 0.8))
    ]
    cases.append(replace(case, models={"stage1": start, "lora": with_attention(0.9)}))
    assert report.to_lora(report.attention, 2)(cases, "keys") == "0.20 ± 1.27"
    assert report.to_lora(report.attention, 2)(cases[:1], "keys") == "0.10"
    assert report.to_lora(report.attention, 2)(cases, "mmd") == "–"
    assert report.plain(report.LOSS, 2)(cases, "stage1") == "–"


def test_cosines_are_of_the_same_tokens_of_a_modality_without_sinks(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = importlib.import_module("malora_measure")
    visual = torch.tensor([True, True, True, False, False])

    def record(sink: int | None, keys: torch.Tensor) -> SimpleNamespace:
        ordinary = torch.arange(5) != (-1 if sink is None else sink)
        tokens = SimpleNamespace(visual=visual & ordinary, text=~visual & ordinary)
        return SimpleNamespace(tokens=tokens, key_positions=torch.tensor([0, 1, 3, 4]), keys={0: keys, 1: keys.abs()})

    # Of the kept tokens the first turns by 180 degrees, the second is a sink after, the third turns by 90.
    before = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [2.0, 1.0]]])
    after = torch.tensor([[[-3.0, 0.0], [5.0, 5.0], [0.0, 2.0], [4.0, 2.0]]])
    pair = [record(None, before)], [record(1, after)]
    assert measure.mean_cosine(*pair, "keys", "visual") == pytest.approx([-1.0, 1.0])
    assert measure.mean_cosine(*pair, "keys", "text") == pytest.approx([0.5, 0.5])
