"""Means over pictures and their intervals: how often they hold the truth, and means over layers and thirds."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from diagnostics.table import Estimate, Summary, make_rows, ratio_rows, subtract_rows, summarize_rows


def estimate(rows: pd.DataFrame) -> Estimate:
    """The estimate in the only row of a summary."""
    (row,) = summarize_rows(rows).itertuples()
    return Estimate(row.mean, row.low, row.high)


# Each simulated experiment is a layer, so that one call computes all their intervals.
EXPERIMENTS = range(2000)
Draw = Callable[[np.random.Generator], pd.DataFrame]


def draw_means(draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray], num_pictures: int) -> Draw:
    """A function that draws the rows of a measure that is a mean over pictures."""
    return lambda rng: make_rows("x", draw(rng, (num_pictures, len(EXPERIMENTS))), layers=EXPERIMENTS)


def paired_difference(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of the difference of two models on the same pictures. A picture changes both models' values alike."""
    shape = (12, len(EXPERIMENTS))
    of_picture = rng.normal(0, 5, shape)
    first = make_rows("x", of_picture + rng.normal(1, 1, shape), layers=EXPERIMENTS)
    second = make_rows("x", of_picture + rng.normal(4, 1, shape), layers=EXPERIMENTS)
    return subtract_rows(second, first)


def ratio_of_means(rng: np.random.Generator) -> pd.DataFrame:
    """Rows of the ratio of two norms. A picture multiplies both norms alike."""
    shape = (16, len(EXPERIMENTS))
    of_picture = rng.gamma(8, 1 / 8, shape)
    image_norms = of_picture * rng.normal(12, 1, shape)
    text_norms = of_picture * rng.normal(4, 1, shape)
    return ratio_rows("x", image_norms, text_norms, EXPERIMENTS)


@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        (draw_means(lambda rng, shape: rng.normal(3, 1, shape), 4), 3),
        (draw_means(lambda rng, shape: rng.gamma(4, 1, shape), 32), 4),
        (draw_means(lambda rng, shape: rng.beta(4, 8, shape), 16), 1 / 3),
        (paired_difference, 3),
        (ratio_of_means, 3),
    ],
    ids=["4 pictures", "skewed", "shares", "difference", "ratio"],
)
def test_intervals_hold_the_truth_as_often_as_they_say(draw: Draw, truth: float) -> None:
    summary = summarize_rows(draw(np.random.default_rng(0)))
    holds_truth = (summary["low"] <= truth) & (truth <= summary["high"])
    assert 0.93 < holds_truth.mean() < 0.97


def test_the_ratio_of_values_in_proportion_has_an_interval_without_width() -> None:
    values = np.random.default_rng(0).normal(3, 1, size=20)
    assert estimate(ratio_rows("x", 3 * values, values)) == pytest.approx([3, 3, 3])


def test_a_ratio_by_layer_is_a_ratio_of_means() -> None:
    numerator = np.random.default_rng(0).normal(3, 1, size=(20, 2))
    denominator = np.random.default_rng(1).normal(3, 1, size=(20, 2))
    summary = summarize_rows(ratio_rows("x", numerator, denominator, [4, 5]))
    expected = numerator.mean(axis=0) / denominator.mean(axis=0)
    assert summary["layer"].tolist() == [4, 5]
    assert summary["mean"].tolist() == pytest.approx(expected.tolist())


def test_the_ratio_of_a_single_picture_has_no_interval() -> None:
    assert np.isnan(estimate(ratio_rows("x", np.array([3.0]), np.array([2.0]))).low)


def test_a_picture_without_a_value_is_left_out() -> None:
    nan = np.nan
    layers = summarize_rows(make_rows("x", [[1, nan], [3, nan], [5, 2.0]], layers=[0, 1]))
    assert layers["mean"].tolist() == [3, 2]
    assert layers["n"].tolist() == [3, 1]
    # The 97.5% quantile of Student's t with 2 degrees of freedom is 4.303, and the standard deviation is 2.
    assert layers["high"][0] == pytest.approx(3 + 4.303 * 2 / 3**0.5, rel=1e-3)
    assert np.isnan(layers["high"][1])


@pytest.mark.parametrize(
    ("num_layers", "means"),
    [
        (2, {"gap, first layer": 1.5, "gap, last layer": 2.5}),
        (6, {"gap, first third": 2.0, "gap, middle third": 4.0, "gap, last third": 6.0}),
    ],
)
def test_means_over_thirds_of_the_layers(num_layers: int, means: dict[str, float]) -> None:
    """The gap of picture p in layer n is p + n, and the mean of p over the four pictures is 1.5."""
    gaps = np.arange(4)[:, None] + np.arange(num_layers)
    frame = Summary.of(make_rows("gap", gaps, layers=range(num_layers))).frame
    over_thirds = frame[frame["measure"] != "gap"]
    assert dict(zip(over_thirds["measure"], over_thirds["mean"], strict=True)) == pytest.approx(means)
