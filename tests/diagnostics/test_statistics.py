"""Intervals: do they hold the truth as often as they say, and is a picture counted once?"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from diagnostics.results import Estimate
from diagnostics.statistics import (
    by_layer,
    by_picture,
    difference,
    estimate,
    jackknife,
    number_pictures,
    ratio,
    ratio_by_layer,
    summarize,
)


def test_means_are_within_samples_then_within_pictures() -> None:
    samples = [torch.tensor([1.0]), torch.tensor([2.0, 4.0, 6.0]), torch.tensor([10.0])]
    summary = summarize(samples, number_pictures(["a", "a", "b"]), width=4)
    assert summary.by_picture == [2.5, 10]  # of 1 and 4, not of four tokens
    assert summary.mean == 6.25
    assert summary.median == 4
    assert summary.std == pytest.approx(np.std([1, 2, 4, 6, 10]))
    assert summary.p95 == pytest.approx(np.quantile([1, 2, 4, 6, 10], 0.95))
    assert (summary.num_tokens, summary.num_pictures) == (5, 2)
    assert (summary.width, summary.rms) == (4, 3.125)
    assert summarize(samples[:2], number_pictures(["a", "a"]), width=4).interval is None


Draw = Callable[[np.random.Generator], Estimate]


def repeated_pictures(rng: np.random.Generator) -> Estimate:
    """Eight questions about each of eight pictures, which differ far more than the questions do."""
    rows = np.repeat(rng.normal(3, 1, 8), 8) + rng.normal(0, 0.2, 64)
    return estimate(by_picture(rows, np.repeat(np.arange(8), 8)))


def paired_difference(rng: np.random.Generator) -> Estimate:
    """Two models on the same pictures, which move both."""
    shared = rng.normal(0, 5, 12)
    return difference(estimate(shared + rng.normal(4, 1, 12)), estimate(shared + rng.normal(1, 1, 12)))


def ratio_of_means(rng: np.random.Generator) -> Estimate:
    """Norms of two modalities that rise and fall together."""
    brightness = rng.gamma(8, 1 / 8, 16)
    return ratio(brightness * rng.normal(12, 1, 16), brightness * rng.normal(4, 1, 16))


@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        (lambda rng: estimate(rng.normal(3, 1, 4)), 3),
        (lambda rng: estimate(rng.normal(3, 1, 8)), 3),
        (lambda rng: estimate(rng.gamma(4, 1, 32)), 4),
        (lambda rng: estimate(rng.beta(4, 8, 16)), 1 / 3),
        (repeated_pictures, 3),
        (paired_difference, 3),
        (ratio_of_means, 3),
    ],
    ids=["4 pictures", "8 pictures", "skewed", "shares", "repeated pictures", "difference", "ratio"],
)
def test_intervals_hold_the_truth_as_often_as_they_say(draw: Draw, truth: float) -> None:
    rng = np.random.default_rng(0)
    intervals = np.array([draw(rng).interval for _ in range(2000)])
    assert 0.93 < ((intervals[:, 0] <= truth) & (truth <= intervals[:, 1])).mean() < 0.97


def test_rows_of_one_picture_are_not_samples() -> None:
    """Taken for 64 samples, the same rows would hold the truth half as often."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(400):
        rows = np.repeat(rng.normal(3, 1, 8), 8) + rng.normal(0, 0.2, 64)
        low, high = estimate(rows).interval or (0, 0)
        held.append(low <= 3 <= high)
    assert np.mean(held) < 0.6


def test_a_ratio_of_what_moves_together_is_certain() -> None:
    values = np.random.default_rng(0).normal(3, 1, size=(20, 2))
    certain = ratio(3 * values[:, 0], values[:, 0])
    assert certain.mean == pytest.approx(3)
    assert certain.interval == pytest.approx((3, 3))
    layers = ratio_by_layer(values, values[:, ::-1])
    assert layers.mean[0] == pytest.approx(values[:, 0].mean() / values[:, 1].mean())
    assert layers.mean[1] == pytest.approx(1 / layers.mean[0])


def test_the_jackknife_of_a_mean_is_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=(9, 3))
    without = np.stack([np.delete(values, picture, axis=0).mean(axis=0) for picture in range(9)])
    one, other = jackknife(values.mean(axis=0), without), by_layer(values)
    assert one.mean == pytest.approx(other.mean)
    assert np.array(one.interval) == pytest.approx(np.array(other.interval))
    assert one.overall.by_picture == pytest.approx(other.overall.by_picture)


def test_what_a_picture_does_not_say_is_left_out() -> None:
    values = np.array([[1, np.nan], [3, np.nan], [5, 2.0]])
    layers = by_layer(values)
    assert layers.mean == [3, 2]
    assert layers.interval[0] == pytest.approx((3 - 4.303 * 2 / 3**0.5, 3 + 4.303 * 2 / 3**0.5), rel=1e-3)  # t of 2
    assert layers.interval[1] is None
    assert np.isnan(by_layer(values[:2]).mean[1])


def test_a_level_for_many_is_wider() -> None:
    values = np.random.default_rng(0).normal(size=10)
    (low, high), (lower, higher) = estimate(values).interval, estimate(values, level=1 - 0.05 / 12).interval
    assert lower < low < high < higher
