"""The study's gains against counting the answers by hand, and what the chart shows of them."""

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
    """Each pair's difference in points, counted from the answers to the single drawings."""
    records = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    named = {(row["arm"], row["seed"], row["processor"]): row["hits"] for row in records if "hits" in row}

    gains = []
    for (name, seed, processor), hits in named.items():
        control = named.get((CONTROL, seed, processor))
        if name == arm and control is not None:
            gains.append(100 * (hits.count("1") - control.count("1")) / len(hits))
    return gains


def test_a_pair_shares_seed_and_processor() -> None:
    columns = ["arm", "seed", "processor", "score"]
    rows = [
        ("none", 1, "CPU", 30.0), ("none", 1, "GPU", 20.0), ("none", 2, "CPU", 10.0),
        ("norm", 1, "CPU", 33.0), ("norm", 1, "GPU", 27.0), ("norm", 2, "GPU", 90.0), ("norm", 3, "CPU", 90.0),
    ]  # fmt: skip
    runs = pd.DataFrame(rows, columns=columns)
    assert sorted(differences(runs, "norm", "none", ["seed", "processor"])) == [3.0, 7.0]


def test_the_interval_is_students() -> None:
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

    def ends(line: Line2D) -> list[float]:
        return [float(x) for x in line.get_xdata()]

    at_zero, *lines = axis.lines  # then an interval and its mean for each arm
    assert ends(at_zero) == [0, 0]
    for arm, interval, mean in zip(ARMS, lines[::2], lines[1::2], strict=True):
        expected, low, high = t_interval(pd.Series(gains_by_hand(arm)))
        assert ends(interval) == pytest.approx([low, high])
        assert ends(mean) == pytest.approx([expected])


def test_right_names_are_drawn_over_the_norm_tested_at() -> None:
    """A seed that ran on two processors counts once, and an arm's curve lies around the norm it was trained at."""
    runs = read_runs()
    (axis,) = draw_norms(runs).axes
    curves = {line.get_label(): line for line in axis.lines if not str(line.get_label()).startswith("_")}
    assert list(curves) == ["no norm", *ARMS.values()]

    of_arm = runs[runs["arm"] == "GWC at T"]
    norms, shares = curves["LayerNorm at T"].get_data()
    at_one = SCALES.index(1)
    assert norms[at_one] == pytest.approx(of_arm["length"].mean())
    by_seed = {seed: rows["names, x 1"].mean() for seed, rows in of_arm.groupby("seed")}
    assert shares[at_one] == pytest.approx(sum(by_seed.values()) / len(by_seed))
