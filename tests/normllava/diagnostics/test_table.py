"""Tests of means over pictures, layers and thirds of the layers, and of how often intervals hold the truth."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from normllava.diagnostics.table import Estimate, Summary, make_rows, ratio_rows, subtract_rows, summarize_rows


# Each simulated experiment is a layer of the rows, so that one call computes all intervals.
NUM_EXPERIMENTS = 2000
EXPERIMENTS = range(NUM_EXPERIMENTS)


def draw_normal(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of four pictures, with values from a normal distribution of mean 3."""
    return make_rows("x", rng.normal(3, 1, (4, NUM_EXPERIMENTS)), layers=EXPERIMENTS)


def draw_skewed(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of 32 pictures, with values from a gamma distribution of mean 4."""
    return make_rows("x", rng.gamma(4, 1, (32, NUM_EXPERIMENTS)), layers=EXPERIMENTS)


def draw_shares(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of 16 pictures, with values from a beta distribution of mean 4 / (4 + 8)."""
    return make_rows("x", rng.beta(4, 8, (16, NUM_EXPERIMENTS)), layers=EXPERIMENTS)


def draw_difference(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of a second model minus a first model, with means 4 and 1. A picture changes both models' values alike."""
    shape = (12, NUM_EXPERIMENTS)
    effect_of_picture = rng.normal(0, 5, shape)
    first = make_rows("x", effect_of_picture + rng.normal(1, 1, shape), layers=EXPERIMENTS)
    second = make_rows("x", effect_of_picture + rng.normal(4, 1, shape), layers=EXPERIMENTS)
    return subtract_rows(second, first)


def draw_ratio(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of the ratio of two norms with means 12 and 4. A picture multiplies both norms alike."""
    shape = (16, NUM_EXPERIMENTS)
    effect_of_picture = rng.gamma(8, 1 / 8, shape)  # mean 1
    image_norms = effect_of_picture * rng.normal(12, 1, shape)
    text_norms = effect_of_picture * rng.normal(4, 1, shape)
    return ratio_rows("x", image_norms, text_norms, EXPERIMENTS)


@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        pytest.param(draw_normal, 3, id="4 pictures"),
        pytest.param(draw_skewed, 4, id="skewed"),
        pytest.param(draw_shares, 1 / 3, id="shares"),
        pytest.param(draw_difference, 3, id="difference"),
        pytest.param(draw_ratio, 3, id="ratio"),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    draw: Callable[[np.random.Generator], pd.DataFrame], truth: float
) -> None:
    """Of the 95% intervals of 2,000 experiments, between 93% and 97% hold the truth."""
    summary = summarize_rows(draw(np.random.default_rng(0)))
    holds_truth = (summary["low"] <= truth) & (truth <= summary["high"])
    assert 0.93 < holds_truth.mean() < 0.97


def only_estimate(rows: pd.DataFrame) -> Estimate:
    """The estimate of the only measure of some rows."""
    (row,) = summarize_rows(rows).itertuples()
    return Estimate(row.mean, row.low, row.high)


def test_the_ratio_of_values_in_proportion_has_an_interval_without_width() -> None:
    values = np.random.default_rng(0).normal(3, 1, size=20)
    ratio = only_estimate(ratio_rows("x", 3 * values, values))
    assert ratio == pytest.approx([3, 3, 3])  # mean, low and high


def test_a_ratio_by_layer_is_a_ratio_of_means() -> None:
    numerator = np.random.default_rng(0).normal(3, 1, size=(20, 2))  # [num_pictures, num_layers]
    denominator = np.random.default_rng(1).normal(3, 1, size=(20, 2))
    summary = summarize_rows(ratio_rows("x", numerator, denominator, [4, 5]))
    expected = numerator.mean(axis=0) / denominator.mean(axis=0)
    assert summary["layer"].tolist() == [4, 5]
    assert summary["mean"].tolist() == pytest.approx(expected.tolist())


def test_the_ratio_of_a_single_picture_has_no_interval() -> None:
    ratio = only_estimate(ratio_rows("x", np.array([3.0]), np.array([2.0])))
    assert ratio.mean == pytest.approx(1.5)
    assert np.isnan(ratio.low)
    assert np.isnan(ratio.high)


def test_a_picture_without_a_value_is_left_out() -> None:
    """In layer 0 all three pictures have a value, in layer 1 only the last picture."""
    nan = np.nan
    values = [[1, nan], [3, nan], [5, 2.0]]  # [num_pictures, num_layers]
    summary = summarize_rows(make_rows("x", values, layers=[0, 1]))
    assert summary["mean"].tolist() == [3, 2]
    assert summary["n"].tolist() == [3, 1]

    # The 97.5% quantile of Student's t with 2 degrees of freedom is 4.303. The standard deviation of 1, 3, 5 is 2.
    high_of_layer_0, high_of_layer_1 = summary["high"]
    assert high_of_layer_0 == pytest.approx(3 + 4.303 * 2 / 3**0.5, rel=1e-3)
    assert np.isnan(high_of_layer_1)


@pytest.mark.parametrize(
    ("num_layers", "means"),
    [
        (2, {"gap, first layer": 1.5, "gap, last layer": 2.5}),
        (6, {"gap, first third": 2.0, "gap, middle third": 4.0, "gap, last third": 6.0}),
    ],
)
def test_means_over_thirds_of_the_layers(num_layers: int, means: dict[str, float]) -> None:
    """The gap of picture p in layer n is p + n, and the mean of p over the four pictures is 1.5.

    Two layers have no thirds, so there is a mean for each of the two.
    """
    gaps = np.arange(4)[:, None] + np.arange(num_layers)  # [num_pictures, num_layers]
    frame = Summary.of(make_rows("gap", gaps, layers=range(num_layers))).frame
    over_thirds = frame[frame["measure"] != "gap"]  # named "gap, first third" and so on
    assert dict(zip(over_thirds["measure"], over_thirds["mean"], strict=True)) == pytest.approx(means)
