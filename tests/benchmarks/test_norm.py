"""The norm's speed is a ratio that does not depend on what else the machine does."""

import math
from itertools import count
from types import SimpleNamespace

import pytest

from benchmarks import norm


def test_a_machine_that_slows_down_favours_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every measurement takes 1.5 times as long as the one before, whatever is measured.
    readings = (time for number in count() for time in (0.0, 1.5**number))
    monkeypatch.setattr(norm, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    ratios = norm.time_ratios(repeats=6, device="cpu", num_tokens=4)
    assert math.prod(ratios) == pytest.approx(1)
