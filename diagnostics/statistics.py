"""Means and intervals: first within a sample, then over samples, since tokens of one picture are not independent."""

import warnings
from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch
from scipy.stats import bootstrap

from diagnostics.results import Curve, Estimate, Summary


RESAMPLES = 2000


def summarize(samples: Sequence[torch.Tensor], width: int) -> Summary:
    """Sum up a norm per token, one tensor `(num_tokens,)` for each sample, of tokens with `width` coordinates."""
    within = estimate(np.array([[sample.double().mean().item()] for sample in samples]))
    tokens = torch.cat(list(samples)).double().numpy()
    return Summary(
        mean=within.mean,
        interval=within.interval,
        std=float(tokens.std()),
        median=float(np.median(tokens)),
        p95=float(np.quantile(tokens, 0.95)),
        num_tokens=len(tokens),
        num_samples=len(samples),
        width=width,
        rms=within.mean / sqrt(width),
    )


def curve(values: np.ndarray) -> Curve:
    """Mean over samples and its 95% percentile bootstrap interval, of `(num_samples, num_values)`, for each value."""
    return _bootstrap((values,), lambda x, axis: np.mean(x, axis=axis))


def estimate(values: np.ndarray) -> Estimate:
    """The same of a single value, `(num_samples, 1)`."""
    return _single(curve(values))


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> Estimate:
    """Ratio of the means of two values over samples, `(num_samples, 1)` each, and its interval from samples drawn in
    pairs."""
    return _single(
        _bootstrap(
            (numerator, denominator), lambda x, y, axis: np.mean(x, axis=axis) / np.mean(y, axis=axis), paired=True
        )
    )


def _single(curve: Curve) -> Estimate:
    (mean,), (interval,) = curve.mean, curve.interval
    return Estimate(mean, interval)


def _bootstrap(data: tuple[np.ndarray, ...], statistic: object, paired: bool = False) -> Curve:
    """The statistic with its interval, along the first axis; seeded, so that a report is the same when made again."""
    point = [float(value) for value in statistic(*data, axis=0)]  # type: ignore[operator]
    if len(data[0]) < 2:
        return Curve(point, [None] * len(point))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal values have a degenerate distribution, and an interval of no width
        found = bootstrap(
            data, statistic, axis=0, paired=paired, n_resamples=RESAMPLES, method="percentile", rng=0
        ).confidence_interval
    return Curve(point, [(float(low), float(high)) for low, high in zip(found.low, found.high, strict=True)])
