"""MFU is read from a peak that was measured beside the run, and what can't be is refused."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import training
from benchmarks.training import describe, peak_flops, summarise
from training.stages import Stage


ROOT = Path(__file__).parents[2]


def run(flops: float, before: float, after: float) -> dict[str, float]:
    return {
        "tokens_per_second": flops / 10,
        "model_flops_per_second": flops,
        "peak_flops_before": before,
        "peak_flops_after": after,
    }


def test_a_machine_that_slows_down_keeps_its_mfu() -> None:
    # At half speed from the second repeat on. Over a peak taken once at the end, the medians give 120%.
    plain = [run(60, 100, 100), run(60, 100, 100), run(30, 50, 50)]
    ours = [run(80, 100, 100), run(40, 50, 50), run(40, 50, 50)]
    report = summarise({"plain": plain, "ours": ours})
    assert report["plain"]["mfu"] == pytest.approx(0.6)
    assert report["ours"]["mfu"] == pytest.approx(0.8)
    assert report["speed_ratio"]["all"] == pytest.approx([4 / 3, 2 / 3, 4 / 3])


def test_load_beside_one_measurement_of_the_peak_does_not_count() -> None:
    for before, after in ((100, 40), (40, 100)):
        report = summarise({"plain": [run(60, before, after)], "ours": [run(60, before, after)]})
        assert report["ours"]["mfu"] == pytest.approx(0.6)


def test_more_than_the_peak_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"MFU of 117% is impossible: .*117 FLOP/s.* 90 just before it and 100 right after"
    ):
        summarise({"plain": [run(60, 100, 100)], "ours": [run(117, 90, 100)]})


def test_the_peak_is_read_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # Products of 4, 2 and then 8 seconds: the best counts.
    readings = iter([0, 4, 10, 12, *[time for _ in range(8) for time in (20, 28)]])
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    monkeypatch.setattr(training.torch.cuda, "is_available", lambda: False)
    assert peak_flops(cuda=False) == 2 * 2048**3 / 2


def test_a_device_of_unknown_peak_has_no_mfu() -> None:
    runs = [{**run(60, 100, 100), "peak_flops_before": None, "peak_flops_after": None}]
    report = summarise({"plain": runs, "ours": runs})
    assert report["ours"]["mfu"] is None
    assert report["ours"]["tokens_per_second"] == 6
    report["ours"] |= {"supervised_tokens_per_second": 3, "peak_memory_gib": 1, "padding_share": 0}
    report["plain"] = report["ours"]
    assert "?" in describe(Stage.ALIGN, report)


def test_repeats_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 30.0, 61.0])  # a third one would end after 91 seconds
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    calls = []

    def finished(command: list[str], **options: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(stdout=json.dumps(run(60, 100, 100)), stderr="", returncode=0)

    monkeypatch.setattr(training.subprocess, "run", finished)
    training.compare(Stage.ALIGN, training.Comparison("tiny", 3, 5, seconds=90), {})
    assert len(calls) == 4


def test_an_arm_that_runs_out_of_memory_leaves_the_other_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def finished(command: list[str], **options: object) -> SimpleNamespace:
        arm = command[command.index("--arm") + 1]
        calls.append(arm)
        if arm == "plain":
            error = "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 80 GiB. And more.\n"
            return SimpleNamespace(stdout="", stderr=error, returncode=1)
        figures = run(60, 100, 100) | {"supervised_tokens_per_second": 3, "peak_memory_gib": 70, "padding_share": 0}
        return SimpleNamespace(stdout=json.dumps(figures), stderr="", returncode=0)

    monkeypatch.setattr(training.subprocess, "run", finished)
    report = training.compare(Stage.ALIGN, training.Comparison("tiny", 3, 2), {})
    assert calls == ["plain", "ours", "ours"]
    assert report["plain"] == {"out_of_memory": "CUDA out of memory"}
    assert report["ours"]["peak_memory_gib"] == 70
    assert "speed_ratio" not in report
    assert describe(Stage.ALIGN, report).splitlines()[1:] == [
        "plain       CUDA out of memory",
        "ours                           6                     3                   0.6                    70"
        "                     0",
    ]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.training", "--steps", "3", "--repeats", "1"]
    result = subprocess.run(
        [*command, "--output", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    for stage in ("align", "instruct"):
        for arm in ("plain", "ours"):
            assert 0 < report[stage][arm]["mfu"] <= 1
            assert report[stage][arm]["peak_flops_before"] > 0
