"""Means over pictures, and their 95% intervals.

Tokens of one picture are correlated, and so are questions about it: each picture counts once, with the mean over its
samples. Intervals are Student's t over pictures. Statistics that are not means, such as ratios, use the jackknife:
Student's t over pseudo-values (Tukey, 1958; Efron and Stein, 1981). A percentile bootstrap over few pictures is too
narrow.
"""

import warnings
from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch
from scipy.special import stdtrit

from diagnostics.results import ByLayer, Estimate, Interval, Summary


LEVEL = 0.95


def number_pictures(pictures: Sequence[str]) -> np.ndarray:
    """The number of each sample's picture, in order of appearance, `(num_samples,)`."""
    numbers = {picture: number for number, picture in enumerate(dict.fromkeys(pictures))}
    return np.array([numbers[picture] for picture in pictures])


def by_picture(values: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """Mean over the samples of each picture; NaN is left out.

    Args:
        values: One row for each sample, `(num_samples, ...)`.
        pictures: Number of each sample's picture, `(num_samples,)`.

    Returns:
        `(num_pictures, ...)`.
    """
    return np.stack([_mean(values[pictures == picture]) for picture in np.unique(pictures)])


def estimate(values: np.ndarray, level: float = LEVEL) -> Estimate:
    """Mean of one value for each picture, `(num_pictures,)`."""
    return _estimate(_mean(values), values, level)


def by_layer(values: np.ndarray) -> ByLayer:
    """Mean over pictures at each layer, `(num_pictures, num_layers)`; NaN is left out."""
    return _by_layer(_mean(values), values)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> Estimate:
    """Ratio of the means of two values over pictures, `(num_pictures,)` each."""
    point, pseudo = _ratio(numerator, denominator)
    return _estimate(point, pseudo)


def ratio_by_layer(numerator: np.ndarray, denominator: np.ndarray) -> ByLayer:
    """The same at each layer, `(num_pictures, num_layers)` each."""
    return _by_layer(*_ratio(numerator, denominator))


def jackknife(points: np.ndarray, without: np.ndarray) -> ByLayer:
    """Any statistic of pictures by layer.

    Args:
        points: Of all pictures, `(num_layers,)`.
        without: With each picture left out once, `(num_pictures, num_layers)`.
    """
    count = len(without)
    return _by_layer(points, points[None] if count == 1 else count * points - (count - 1) * without)


def difference(first: Estimate, second: Estimate) -> Estimate:
    """First minus second, paired: both are of the same pictures in the same order."""
    pairs = np.array(first.by_picture) - np.array(second.by_picture)
    # If a picture has no value for one of the two, only the others can be compared.
    return _estimate(first.mean - second.mean if np.isfinite(pairs).all() else _mean(pairs), pairs)


def summarize(samples: Sequence[torch.Tensor], pictures: np.ndarray, width: int) -> Summary:
    """Summarize norms of tokens with `width` coordinates, given as a tensor `(num_tokens,)` for each sample."""
    within = estimate(by_picture(sample_means(samples), pictures))
    tokens = torch.cat(list(samples)).double().numpy()
    return Summary(
        mean=within.mean,
        interval=within.interval,
        by_picture=within.by_picture,
        std=float(tokens.std()),
        median=float(np.median(tokens)),
        p95=float(np.quantile(tokens, 0.95)),
        num_tokens=len(tokens),
        num_pictures=len(within.by_picture),
        width=width,
        rms=within.mean / sqrt(width),
    )


def sample_means(samples: Sequence[torch.Tensor]) -> np.ndarray:
    """Mean of each sample's values, `(num_samples,)`."""
    return np.array([sample.double().mean().item() for sample in samples])


def _mean(values: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a mean of nothing is NaN
        return np.nanmean(values, axis=0)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ratio of sums, and its pseudo-values."""
    count, above, below = len(numerator), numerator.sum(axis=0), denominator.sum(axis=0)
    point = above / below
    if count == 1:
        return point, point[None]
    return point, count * point - (count - 1) * (above - numerator) / (below - denominator)


def _estimate(point: np.ndarray | float, pseudo: np.ndarray, level: float = LEVEL) -> Estimate:
    return Estimate(float(point), _interval(float(point), pseudo, level), [float(value) for value in pseudo])


def _by_layer(points: np.ndarray, pseudo: np.ndarray) -> ByLayer:
    """`(num_layers,)` and `(num_pictures, num_layers)`."""
    intervals = [_interval(float(point), column, LEVEL) for point, column in zip(points, pseudo.T, strict=True)]
    return ByLayer(points.astype(float).tolist(), intervals, _estimate(_mean(points), _mean(pseudo.T)))


def _interval(point: float, pseudo: np.ndarray, level: float) -> Interval:
    known = pseudo[np.isfinite(pseudo)]
    if len(known) < 2:
        return None
    half = float(stdtrit(len(known) - 1, (1 + level) / 2) * known.std(ddof=1) / sqrt(len(known)))
    return point - half, point + half
