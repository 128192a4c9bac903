"""Intervals: do they hold the truth as often as they say, and are means over layers and differences paired?"""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from diagnostics.table import Estimate, Summary, make_rows, ratio_rows, subtract_rows, summarize_rows


def estimate(rows: pd.DataFrame) -> Estimate:
    """The only row of a summary."""
    (found,) = summarize_rows(rows).itertuples()
    return Estimate(found.mean, found.low, found.high)


DRAWS = range(2000)  # each as a layer
Draw = Callable[[np.random.Generator], pd.DataFrame]


def draw_means(draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray], num_pictures: int) -> Draw:
    return lambda rng: make_rows("x", draw(rng, (num_pictures, len(DRAWS))), layers=DRAWS)


def paired_difference(rng: np.random.Generator) -> pd.DataFrame:
    """Two models on the same pictures, which move both."""
    shape = (12, len(DRAWS))
    shared = rng.normal(0, 5, shape)
    first, second = (make_rows("x", shared + rng.normal(mean, 1, shape), layers=DRAWS) for mean in (1, 4))
    return subtract_rows(second, first)


def ratio_of_means(rng: np.random.Generator) -> pd.DataFrame:
    """Norms of two modalities that rise and fall together."""
    shape = (16, len(DRAWS))
    brightness = rng.gamma(8, 1 / 8, shape)
    return ratio_rows("x", brightness * rng.normal(12, 1, shape), brightness * rng.normal(4, 1, shape), DRAWS)


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
    found = summarize_rows(draw(np.random.default_rng(0)))
    assert 0.93 < ((found["low"] <= truth) & (truth <= found["high"])).mean() < 0.97


def test_a_ratio_of_what_moves_together_is_certain() -> None:
    values = np.random.default_rng(0).normal(3, 1, size=(20, 2))
    assert estimate(ratio_rows("x", 3 * values[:, 0], values[:, 0])) == pytest.approx([3, 3, 3])
    layers = summarize_rows(ratio_rows("x", values, values[:, ::-1], [4, 5]))["mean"]
    assert layers[0] == pytest.approx(values[:, 0].mean() / values[:, 1].mean()) == pytest.approx(1 / layers[1])
    assert np.isnan(estimate(ratio_rows("x", values[:1, 0], values[:1, 1])).low)


def test_what_a_picture_does_not_say_is_left_out() -> None:
    layers = summarize_rows(make_rows("x", [[1, np.nan], [3, np.nan], [5, 2.0]], layers=[0, 1]))
    assert layers["mean"].tolist() == [3, 2]
    assert layers["n"].tolist() == [3, 1]
    assert layers["high"][0] == pytest.approx(3 + 4.303 * 2 / 3**0.5, rel=1e-3)  # t of 2
    assert np.isnan(layers["high"][1])


def test_thirds_are_those_of_the_model() -> None:
    """A model of two layers has no middle third, whatever model stands beside it."""
    for count, names in ((2, ["first layer", "last layer"]), (6, ["first third", "middle third", "last third"])):
        summary = Summary.of(make_rows("gap", np.arange(4)[:, None] + np.arange(count), "", range(count)))
        found = summary.frame[summary.frame["measure"] != "gap"]
        assert found["measure"].tolist() == [f"gap, {name}" for name in names]
        width = count // len(names)
        expected = [1.5 + np.arange(number * width, (number + 1) * width).mean() for number in range(len(names))]
        assert found["mean"].tolist() == pytest.approx(expected)
