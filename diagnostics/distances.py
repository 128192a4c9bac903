"""Distances between two sets of tokens grouped by picture: MMD², Jensen-Shannon divergence, and a linear probe."""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from scipy.spatial.distance import jensenshannon
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score


BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
PERMUTATIONS = 999
BINS = 16
HALVES = 20
# Two sets of groups of tokens, boolean, `(num_ways, 2 * num_pictures)` each: the visual tokens of each picture are a
# group, then the text tokens of each.
Split = tuple[np.ndarray, np.ndarray]


class Splits(NamedTuple):
    """The sets that are compared.

    Attributes:
        observed: Visual and text tokens of all pictures.
        without: The same with each picture left out once.
        exchanged: The modalities of some pictures swapped; in the first split, of none.
        halves: Half of the pictures and the other half, within one modality; empty below four pictures.
    """

    observed: Split
    without: Split
    exchanged: Split
    halves: Split


def make_splits(num_pictures: int, rng: np.random.Generator) -> Splits:
    """The sets to compare, for this number of pictures."""

    def modalities(pictures: np.ndarray) -> Split:
        none = np.zeros_like(pictures)
        return np.concatenate([pictures, none], axis=1), np.concatenate([none, pictures], axis=1)

    if 2 ** (num_pictures - 1) <= PERMUTATIONS + 1:
        # All swaps. The first picture is never swapped, because swapping all others instead is equivalent.
        ways = np.array([(False, *way) for way in itertools.product((False, True), repeat=num_pictures - 1)])
    else:
        ways = np.concatenate([np.zeros((1, num_pictures)), rng.random((PERMUTATIONS, num_pictures)) < 0.5]) > 0
    exchanged = np.concatenate([~ways, ways], axis=1)
    size = num_pictures // 2
    order = np.array([rng.permutation(num_pictures) for _ in range(HALVES if size > 1 else 0)]).reshape(
        -1, num_pictures
    )
    (a, text_a), (b, text_b) = modalities(order < size), modalities((order >= size) & (order < 2 * size))
    return Splits(
        observed=modalities(np.ones((1, num_pictures), dtype=bool)),
        without=modalities(~np.eye(num_pictures, dtype=bool)),
        exchanged=(exchanged, ~exchanged),
        halves=(np.concatenate([a, text_a]), np.concatenate([b, text_b])),
    )


def kernel(points: np.ndarray) -> np.ndarray:
    """mean_j exp(-‖x-y‖²/(s_j σ²)) of the rows of `points`, `(n, n)`; σ² is their mean squared distance."""
    rows = torch.from_numpy(points).double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    scale = distances.sum() / (len(rows) * (len(rows) - 1))
    return torch.stack([(-distances / (s * scale).clamp(min=1e-30)).exp() for s in BANDWIDTHS]).mean(0).numpy()


def unbiased_mmd(matrix: np.ndarray, groups: np.ndarray, pictures: np.ndarray, split: Split) -> np.ndarray:
    """MMD² between the two sets of each split, `(num_ways,)`.

    The U-statistic of Gretton et al. (2012, eq. 3) over pictures: only pairs of tokens of different pictures count,
    since tokens of one picture are correlated, which would raise it above 0 for equal distributions. NaN if no pairs
    are left.

    Args:
        matrix: Kernel matrix `(N, N)`.
        groups: Group of each token, `(N,)`.
        pictures: Picture of each group, `(num_groups,)`.
        split: Of the groups.
    """
    members = np.eye(len(pictures))[groups]  # [N, num_groups]
    apart = pictures[:, None] != pictures
    counts = members.sum(axis=0)
    sums, pairs = members.T @ matrix @ members * apart, np.outer(counts, counts) * apart

    def mean(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.einsum("ij,ij->i", one @ sums, other) / np.einsum("ij,ij->i", one @ pairs, other)

    a, b = (part.astype(float) for part in split)
    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


def js_divergence(points: np.ndarray, weights: np.ndarray, groups: np.ndarray, split: Split) -> np.ndarray:
    """Jensen-Shannon divergence in bits by column, averaged with `weights`, between the two sets of each split,
    `(num_ways,)`.

    Args:
        points: `(N, num_columns)`.
        weights: `(num_columns,)`.
        groups: Group of each token, `(N,)`.
        split: Of the groups.
    """
    members = np.eye(split[0].shape[1])[groups]
    by_column = []
    for column in points.T:
        inner = np.histogram_bin_edges(column, bins=BINS)[1:-1]
        counts = members.T @ np.eye(BINS)[np.searchsorted(inner, column, side="right")]  # [num_groups, BINS]
        by_column.append(jensenshannon(*(part @ counts for part in split), base=2, axis=1) ** 2)
    return np.average(by_column, axis=0, weights=weights)


def linear_probe(points: np.ndarray, groups: np.ndarray, num_pictures: int) -> float:
    """Cross-validated accuracy of telling the modalities apart; each picture's tokens are in one fold.

    Args:
        points: `(N, head_dim)`.
        groups: Group of each token, `(N,)`.
        num_pictures: How many; two at least must have tokens.
    """
    pictures = groups % num_pictures
    model, folds = LogisticRegression(max_iter=1000), GroupKFold(min(5, len(np.unique(pictures))))
    return float(cross_val_score(model, points, groups < num_pictures, groups=pictures, cv=folds).mean())
