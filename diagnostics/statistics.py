"""Means and intervals: first within a sample, then over samples, since tokens of one picture are not independent."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap


RESAMPLES = 2000
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Summary:
    """A number per token, summed up.

    Attributes:
        mean: Mean over samples of the mean within each.
        interval: 95% bootstrap interval of that mean, over samples; `None` for a single sample.
        std, median, p95: Over all tokens together.
        num_tokens, num_samples: What these rest on.
    """

    mean: float
    interval: Interval
    std: float
    median: float
    p95: float
    num_tokens: int
    num_samples: int


def summarize(samples: Sequence[torch.Tensor]) -> Summary:
    """Sum up a number per token, one tensor `(num_tokens,)` for each sample."""
    means = np.array([[sample.double().mean().item()] for sample in samples])
    tokens = torch.cat(list(samples)).double().numpy()
    mean, interval = mean_and_interval(means)
    return Summary(
        mean=mean[0],
        interval=interval[0],
        std=float(tokens.std()),
        median=float(np.median(tokens)),
        p95=float(np.quantile(tokens, 0.95)),
        num_tokens=len(tokens),
        num_samples=len(samples),
    )


def mean_and_interval(values: np.ndarray) -> tuple[list[float], list[Interval]]:
    """Mean over samples and its 95% percentile bootstrap interval, of `(num_samples, num_values)`, for each value."""
    return _bootstrap((values,), lambda x, axis: np.mean(x, axis=axis))


def describe(values: np.ndarray) -> dict[str, Any]:
    """What [`mean_and_interval`] returns, under `"mean"` and `"interval"`."""
    mean, interval = mean_and_interval(values)
    return {"mean": mean, "interval": interval}


def ratio_and_interval(numerator: np.ndarray, denominator: np.ndarray) -> tuple[list[float], list[Interval]]:
    """Ratio of the two means over samples, and its interval from samples drawn in pairs; both of the same shape."""
    return _bootstrap(
        (numerator, denominator), lambda x, y, axis: np.mean(x, axis=axis) / np.mean(y, axis=axis), paired=True
    )


def _bootstrap(
    data: tuple[np.ndarray, ...], statistic: object, paired: bool = False
) -> tuple[list[float], list[Interval]]:
    """The statistic with its interval, along the first axis; seeded, so that a report is the same when made again."""
    point = [float(value) for value in statistic(*data, axis=0)]  # type: ignore[operator]
    if len(data[0]) < 2:
        return point, [None] * len(point)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal values have a degenerate distribution, and an interval of no width
        found = bootstrap(
            data, statistic, axis=0, paired=paired, n_resamples=RESAMPLES, method="percentile", rng=0
        ).confidence_interval
    return point, [(float(low), float(high)) for low, high in zip(found.low, found.high, strict=True)]
