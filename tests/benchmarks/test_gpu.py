"""Every part that needs a GPU, rehearsed on the CPU at a tiny size, so that no minute of a GPU is lost to a slip."""

import _thread
import json
import math
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu


pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


def rehearse(name: str, results: Path) -> dict[str, Any]:
    gpu.run_part(name, gpu.REHEARSAL, results)
    return json.loads((results / f"{name}.json").read_text())


def test_the_norm_is_as_exact_as_the_formula(tmp_path: Path) -> None:
    figures = rehearse("norm", tmp_path)
    assert figures["gradient_relative_error_float64"] < 1e-12
    assert all(figures["time_over_layernorm"][name]["median"] > 0 for name in ("eager", "compiled"))


@pytest.mark.parametrize("model", ["tiny", "tiny Llama"])
def test_ways_of_mixing_precision_learn_alike(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "REHEARSAL", replace(gpu.REHEARSAL, models=(model,)))
    losses = [rehearse(name, tmp_path)["losses"] for name in gpu.parts(gpu.REHEARSAL) if "precision" in name]
    assert len(losses) == 3
    for found in losses:
        assert len(found) == gpu.REHEARSAL.steps
        assert found == pytest.approx(losses[0], rel=0.02)


def test_probing_changes_no_more_than_the_time(tmp_path: Path) -> None:
    assert rehearse("probe", tmp_path)["ratio"] > 0


def test_waits_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has nothing to wait for, so what CUDA says of a wait is said here."""

    def wait(*args: Any) -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(gpu, "run_arm", wait)
    ((place, count),) = rehearse("waits", tmp_path)["waits"].items()
    assert (place.split(":")[0], count) == ("test_gpu.py", 3)


def test_qlora_trains_by_its_recipe(tmp_path: Path) -> None:
    figures = rehearse("qlora-tiny", tmp_path)
    assert len(figures["losses"]) == gpu.REHEARSAL.steps
    assert all(map(math.isfinite, figures["losses"]))
    assert figures["tokens"] > 100


def test_an_eight_bit_optimizer_trains(tmp_path: Path) -> None:
    assert math.isfinite(rehearse("adamw_bnb_8bit", tmp_path)["train_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training-tiny-align", "training-tiny-instruct"])
def test_training_is_compared_with_plain_trl(name: str, tmp_path: Path) -> None:
    figures = rehearse(name, tmp_path)
    assert figures["ours"]["padding_share"] == 0 < figures["plain"]["padding_share"]
    assert figures["ours"]["train_loss"] == pytest.approx(figures["plain"]["train_loss"], rel=0.05)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    figures = rehearse("resume", tmp_path)
    assert figures["largest difference, another"] == figures["largest difference, killed"] == 0


def test_a_part_runs_once_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "norm.json").write_text("{}")
    monkeypatch.setattr(gpu, "missing", lambda part: list(part.needs))
    assert list(gpu.run_all(["norm", "qlora-tiny"], gpu.REHEARSAL, tmp_path, ["--rehearsal"])) == []
    assert "norm                                 has figures" in caplog.text
    assert "skipped: needs bitsandbytes, peft" in caplog.text


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LIMIT", 2)
    child = f"import time; time.sleep(4); open({str(tmp_path / 'late')!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert "took more than 2 s" in gpu.run_process([sys.executable, "-c", code], tmp_path / "log")
    time.sleep(4)
    assert not (tmp_path / "late").exists()


def test_ctrl_c_ends_a_part_and_all_that_it_started(tmp_path: Path) -> None:
    code = f"import time; time.sleep(4); open({str(tmp_path / 'late')!r}, 'w')"
    threading.Timer(1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        gpu.run_process([sys.executable, "-c", code], tmp_path / "log")
    time.sleep(4)
    assert not (tmp_path / "late").exists()


def test_too_little_memory_is_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(scale: gpu.Scale) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB. And more.")

    monkeypatch.setattr(gpu, "measure_norm", fill)
    assert rehearse("norm", tmp_path)["out_of_memory"] == "CUDA out of memory"
    arms = {"plain": {"out_of_memory": "CUDA out of memory"}, "ours": {"peak_memory_gib": 70}}
    monkeypatch.setattr(gpu, "compare", lambda *args: arms)
    trained = rehearse("training-tiny-align", tmp_path)
    assert {arm: trained[arm] for arm in arms} == arms
    monkeypatch.setattr(gpu, "ROOT", tmp_path)  # where there is no such module: a part that fails
    assert list(gpu.run_all(["probe"], gpu.REHEARSAL, tmp_path, ["--rehearsal"])) == ["probe"]
