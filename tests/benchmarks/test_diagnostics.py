"""What probing costs, as the README states it."""

import pytest

from benchmarks.diagnostics import time_passes


@pytest.mark.slow
def test_probing_costs_at_most_twice_a_plain_pass() -> None:
    assert time_passes(length=300, repetitions=10)["ratio"] < 2
