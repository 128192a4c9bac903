"""The gains of the arms in trial.jsonl, compared with a count in plain Python, and their figure."""

import json

import pandas as pd
import pytest
from matplotlib.lines import Line2D
from scipy import stats

from examples.emoji.gains import (
    ARMS,
    CONTROL,
    RECORDS,
    differences,
    draw_gains,
    measure_gains,
    read_runs,
    t_interval,
)


def counted_gains(arm: str) -> list[float]:
    """The gain of each pair of an arm's run and its control, in percentage points.

    Right names are counted in the field `hits` of the records, with a digit for each drawing: "1" for a right name.
    """
    hits_by_run: dict[tuple[str, int, str], str] = {}
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "hits" in record:
            hits_by_run[record["arm"], record["seed"], record["processor"]] = record["hits"]

    gains = []
    for (run_arm, seed, processor), hits in hits_by_run.items():
        control = (CONTROL, seed, processor)
        if run_arm == arm and control in hits_by_run:
            more_right = hits.count("1") - hits_by_run[control].count("1")
            gains.append(100 * more_right / len(hits))
    return gains


def test_a_run_is_compared_with_the_control_of_its_seed_and_processor() -> None:
    rows = [
        ("none", 1, "CPU", 30.0),
        ("none", 1, "GPU", 20.0),
        ("none", 2, "CPU", 10.0),
        ("norm", 1, "CPU", 33.0),  # 3 more than its control
        ("norm", 1, "GPU", 27.0),  # 7 more than its control
        ("norm", 2, "GPU", 90.0),  # has no control
        ("norm", 3, "CPU", 90.0),  # has no control
    ]
    runs = pd.DataFrame(rows, columns=["arm", "seed", "processor", "score"])
    assert sorted(differences(runs, "norm", "none", ["seed", "processor"])) == [3.0, 7.0]


def test_the_interval_is_that_of_students_t() -> None:
    values = pd.Series([1.0, 2.5, -0.5, 4.0, 3.0])
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    assert t_interval(values) == pytest.approx((2.0, low, high))  # 2.0 is the mean


def test_gains_are_those_counted_in_the_records() -> None:
    runs = read_runs()
    num_pairs = {}
    for arm in ARMS:
        gains = differences(runs, arm, CONTROL, ["seed", "processor"])
        assert sorted(gains) == pytest.approx(sorted(counted_gains(arm)))
        num_pairs[arm] = len(gains)
    assert num_pairs == {"started at T, no norm": 8, "GWC at T": 16, "GWC at 30 T": 9}


def test_the_figure_shows_each_gain_with_its_interval() -> None:
    (axis,) = draw_gains(measure_gains(read_runs())).axes
    labels = [text.get_text() for text in axis.texts]
    assert labels == [
        "scaled once, half the steps: +6.6 (4.2 to 9.0), 8 pairs",
        "LayerNorm, half the steps: +3.7 (1.6 to 5.8), 16 pairs",
        "held at 30 T, half the steps: −18.1 (−24.4 to −11.7), 9 pairs",
    ]

    def x_values(line: Line2D) -> list[float]:
        return [float(x) for x in line.get_xdata()]

    # The first line is at zero. Then each arm has two lines: its interval and its mean.
    line_at_zero, *lines_of_arms = axis.lines
    assert x_values(line_at_zero) == [0, 0]
    intervals = lines_of_arms[::2]
    means = lines_of_arms[1::2]
    for arm, interval, mean in zip(ARMS, intervals, means, strict=True):
        expected_mean, low, high = t_interval(pd.Series(counted_gains(arm)))
        assert x_values(interval) == pytest.approx([low, high])
        assert x_values(mean) == pytest.approx([expected_mean])
