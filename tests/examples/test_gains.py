"""The gains of the first study's arms against a count by hand, and what the figures show of them."""

import json

import pandas as pd
import pytest
from matplotlib.lines import Line2D
from scipy import stats

from examples.emoji.gains import (
    ARMS,
    CONTROL,
    RECORDS,
    SCALES,
    differences,
    draw_gains,
    draw_norms,
    read_runs,
    t_interval,
)


def gains_by_hand(arm: str) -> list[float]:
    """The difference of each pair in percentage points, counted from the digits of single drawings."""
    hits_by_run: dict[tuple[str, int, str], str] = {}
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "hits" in record:
            hits_by_run[record["arm"], record["seed"], record["processor"]] = record["hits"]

    gains = []
    for (run_arm, seed, processor), hits in hits_by_run.items():
        control_hits = hits_by_run.get((CONTROL, seed, processor))
        if run_arm == arm and control_hits is not None:
            more_right = hits.count("1") - control_hits.count("1")
            gains.append(100 * more_right / len(hits))
    return gains


def test_a_pair_shares_seed_and_processor() -> None:
    columns = ["arm", "seed", "processor", "score"]
    rows = [
        ("none", 1, "CPU", 30.0), ("none", 1, "GPU", 20.0), ("none", 2, "CPU", 10.0),
        ("norm", 1, "CPU", 33.0), ("norm", 1, "GPU", 27.0), ("norm", 2, "GPU", 90.0), ("norm", 3, "CPU", 90.0),
    ]  # fmt: skip
    runs = pd.DataFrame(rows, columns=columns)
    # Only two runs of "norm" have a control: 33 - 30 on the CPU, and 27 - 20 on the GPU.
    assert sorted(differences(runs, "norm", "none", ["seed", "processor"])) == [3.0, 7.0]


def test_the_interval_is_that_of_students_t() -> None:
    values = pd.Series([1.0, 2.5, -0.5, 4.0, 3.0])
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    assert t_interval(values) == pytest.approx((2.0, low, high))


def test_the_records_hold_every_pair_that_the_chart_shows() -> None:
    pairs = {arm: differences(read_runs(), arm, CONTROL, ["seed", "processor"]) for arm in ARMS}
    assert {arm: len(gains) for arm, gains in pairs.items()} == {
        "started at T, no norm": 8,
        "GWC at T": 16,
        "GWC at 30 T": 9,
    }
    for arm, gains in pairs.items():
        assert sorted(gains) == pytest.approx(sorted(gains_by_hand(arm)))


def test_the_chart_shows_each_gain_with_its_interval() -> None:
    (axis,) = draw_gains(read_runs()).axes
    labels = [text.get_text() for text in axis.texts]
    assert labels == [
        "scaled once, no norm: +6.6 (4.2 to 9.0), 8 pairs",
        "LayerNorm at T: +3.7 (1.6 to 5.8), 16 pairs",
        "LayerNorm, held at 30 T: −18.1 (−24.4 to −11.7), 9 pairs",
    ]

    def x_values(line: Line2D) -> list[float]:
        return [float(x) for x in line.get_xdata()]

    # The axis holds the line at zero, and then for each arm its interval and its mean.
    line_at_zero, *lines = axis.lines
    intervals = lines[::2]
    means = lines[1::2]
    assert x_values(line_at_zero) == [0, 0]
    for arm, interval, mean in zip(ARMS, intervals, means, strict=True):
        expected, low, high = t_interval(pd.Series(gains_by_hand(arm)))
        assert x_values(interval) == pytest.approx([low, high])
        assert x_values(mean) == pytest.approx([expected])


def test_right_names_are_drawn_over_the_norm_tested_at() -> None:
    """Of a curve the point at scale 1 is checked: its norm is that of training, and it is a mean over seeds."""
    runs = read_runs()
    (axis,) = draw_norms(runs).axes
    curves = {}
    for line in axis.lines:
        label = str(line.get_label())
        if not label.startswith("_"):  # matplotlib's names of lines without a label
            curves[label] = line
    assert list(curves) == ["no norm", *ARMS.values()]

    arm_runs = runs[runs["arm"] == "GWC at T"]
    norms, scores = curves["LayerNorm at T"].get_data()
    at_one = SCALES.index(1)
    assert norms[at_one] == pytest.approx(arm_runs["norm"].mean())
    # A seed that ran on two processors counts once.
    means_by_seed = [seed_runs["names, x 1"].mean() for _, seed_runs in arm_runs.groupby("seed")]
    assert scores[at_one] == pytest.approx(sum(means_by_seed) / len(means_by_seed))
