"""Distances between image and text tokens in key space, before rotary embedding, and in value space.

Keys are compared before rotary embedding, because it moves keys at different positions apart even if their
distribution is the same. MaLoRA's abstract (arXiv 2510.26721) names the two distances, MMD and Jensen-Shannon
divergence. The choices that it leaves open are stated on the report's page.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score

from diagnostics.divergence import FLOOR_QUANTILE, Split, measure_divergence
from diagnostics.probe import TINY, Record
from diagnostics.table import jackknife_rows, make_rows
from diagnostics.tokens import Tokens


# About how many tokens of each modality are compared, over all pictures.
MAX_TOKENS = 256
# The smallest number of tokens of each modality from which a distance says something.
MIN_TOKENS = 8
# Bandwidths of the kernel, in multiples of the mean squared distance.
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Number of random splits of the pictures into halves.
HALVES = 200
# Largest number of folds in the linear probe's cross-validation.
MAX_FOLDS = 5


def measure_space(name: str, records: Sequence[Record], seed: int = 0) -> pd.DataFrame | None:
    """Rows of the distances by layer, such as `keys.mmd`; `None` if there are too few tokens to compare.

    Args:
        name: `"keys"` or `"values"`.
        records: The record of each picture.
        seed: Seed of the random halves.
    """
    recorded_layers = [set(getattr(record, name)) for record in records]
    layers = sorted(set.intersection(*recorded_layers))
    points_by_layer = {layer: take_points(name, layer, records) for layer in layers}
    if not layers:
        return None
    # All layers have the same tokens, so the first layer tells whether there are enough tokens.
    if not can_compare(points_by_layer[layers[0]]):
        return None

    splits = make_splits(len(records), np.random.default_rng(seed))
    rows = pd.concat([_measure_layer(layer, points, splits) for layer, points in points_by_layer.items()])
    return rows.assign(measure=f"{name}." + rows["measure"])


def draw_positions(tokens: Tokens, picture: str, count: int) -> torch.Tensor:
    """Random positions of at most `count` image tokens and `count` text tokens of a sample, in order.

    The random numbers depend only on `picture`, the fingerprint of the sample's picture, so that every model gets the
    same numbers.
    """
    generator = torch.Generator().manual_seed(int(picture, 16) % 2**63)  # seeds are below 2^63
    drawn = []
    for mask in (tokens.visual, tokens.text):
        positions = mask.nonzero()[:, 0]
        order = torch.randperm(len(positions), generator=generator)
        drawn.append(positions[order[:count]])
    return torch.cat(drawn).sort().values


class Points(NamedTuple):
    """Keys or values of one layer. Each picture gives as many image tokens as text tokens.

    The picture of `visual[i]` and the picture of `text[i]` are both `pictures[i]`.

    Attributes:
        visual: Keys or values of image tokens, `(n, num_heads, head_dim)`.
        text: Keys or values of text tokens, `(n, num_heads, head_dim)`.
        pictures: Number of the picture of each row, `(n,)`.
        num_pictures: Number of all pictures, including pictures without a row.
    """

    visual: np.ndarray
    text: np.ndarray
    pictures: np.ndarray
    num_pictures: int

    @property
    def groups(self) -> np.ndarray:
        """The group of each image token and then of each text token, `(2n,)`.

        A group is one modality of one picture: the image tokens of picture i are group i, its text tokens are group
        `num_pictures` + i.
        """
        return np.concatenate([self.pictures, self.num_pictures + self.pictures])

    @property
    def scaled(self) -> np.ndarray:
        """All image tokens and then all text tokens, `(2n, num_heads, head_dim)`, standardized.

        Each coordinate has mean 0 and standard deviation 1 over both modalities together.
        """
        pooled = np.concatenate([self.visual, self.text])
        deviation = pooled.std(axis=0)
        return (pooled - pooled.mean(axis=0)) / np.where(deviation > 0, deviation, 1)


def can_compare(points: Points) -> bool:
    """Whether there are enough tokens, and from at least two pictures."""
    num_pictures = len(np.unique(points.pictures))
    return len(points.pictures) >= MIN_TOKENS and num_pictures >= 2


def take_points(name: str, layer: int, records: Sequence[Record]) -> Points:
    """The keys or values of a layer.

    Args:
        name: `"keys"` or `"values"`.
        layer: Number of the layer.
        records: The record of each picture.
    """
    visual = []
    text = []
    pictures: list[int] = []
    for number, record in enumerate(records):
        vectors = getattr(record, name)[layer].transpose(0, 1).numpy()  # [num_kept, num_heads, head_dim]
        image_vectors = vectors[record.tokens.visual[record.key_positions]]
        text_vectors = vectors[record.tokens.text[record.key_positions]]

        count = min(len(image_vectors), len(text_vectors))  # 0 if all tokens of a modality are sinks
        visual.append(take_evenly(image_vectors, count))
        text.append(take_evenly(text_vectors, count))
        pictures += [number] * count

    return Points(
        visual=np.concatenate(visual),
        text=np.concatenate(text),
        pictures=np.array(pictures, dtype=int),
        num_pictures=len(records),
    )


def take_evenly(vectors: np.ndarray, count: int) -> np.ndarray:
    """`count` rows of an array, evenly spread from the first to the last."""
    chosen = np.linspace(0, len(vectors) - 1, count).round().astype(int)
    return vectors[chosen]


class Splits(NamedTuple):
    """The pairs of sets of tokens that are compared, as sets of the groups of [`Points`].

    Attributes:
        observed: The image tokens and the text tokens of all pictures.
        leave_one_out: For each picture, the image tokens and the text tokens of all other pictures.
        halves: Tokens of a random half of the pictures and of the other half, both of the same modality. Empty for
            fewer than four pictures.
    """

    observed: Split
    leave_one_out: Split
    halves: Split


def make_splits(num_pictures: int, rng: np.random.Generator) -> Splits:
    """The sets to compare for this number of pictures."""
    all_pictures = np.ones((1, num_pictures), dtype=bool)
    all_but_one = ~np.eye(num_pictures, dtype=bool)

    # A half needs at least two pictures, because only pairs of tokens from different pictures count.
    half_size = num_pictures // 2
    num_halves = HALVES if half_size > 1 else 0
    # Each row gives the pictures random ranks. With an odd number of pictures, the last rank is in neither half.
    ranks = np.array([rng.permutation(num_pictures) for _ in range(num_halves)]).reshape(-1, num_pictures)
    first_half = ranks < half_size
    second_half = (ranks >= half_size) & (ranks < 2 * half_size)
    halves = (
        np.concatenate([image_groups(first_half), text_groups(first_half)]),
        np.concatenate([image_groups(second_half), text_groups(second_half)]),
    )
    return Splits(
        observed=(image_groups(all_pictures), text_groups(all_pictures)),
        leave_one_out=(image_groups(all_but_one), text_groups(all_but_one)),
        halves=halves,
    )


def image_groups(pictures: np.ndarray) -> np.ndarray:
    """Mask of the groups with the image tokens of some pictures, `(num_ways, 2 * num_pictures)`.

    Args:
        pictures: Mask of the pictures, `(num_ways, num_pictures)`.
    """
    return np.concatenate([pictures, np.zeros_like(pictures)], axis=1)


def text_groups(pictures: np.ndarray) -> np.ndarray:
    """Mask of the groups with the text tokens of some pictures, `(num_ways, 2 * num_pictures)`.

    Args:
        pictures: Mask of the pictures, `(num_ways, num_pictures)`.
    """
    return np.concatenate([np.zeros_like(pictures), pictures], axis=1)


def _measure_layer(layer: int, points: Points, splits: Splits) -> pd.DataFrame:
    """Rows of one layer: MMD², divergence and the linear probe's accuracy, each the median over heads."""
    heads = points.scaled.transpose(1, 0, 2)  # [num_heads, 2n, head_dim]
    kernels = [kernel(head) for head in heads]
    # The groups are numbered as in `Points.groups`: image tokens of all pictures, then text tokens of all pictures.
    picture_of_group = np.arange(2 * points.num_pictures) % points.num_pictures

    def median_mmd(split: Split) -> np.ndarray:
        mmd_by_head = [unbiased_mmd(matrix, points.groups, picture_of_group, split) for matrix in kernels]
        return np.median(mmd_by_head, axis=0)  # [num_ways]

    (mmd,) = median_mmd(splits.observed)
    accuracy = np.median([linear_probe(head, points.groups, points.num_pictures) for head in heads])
    rows = [
        jackknife_rows("mmd", mmd, median_mmd(splits.leave_one_out), layers=[layer]),
        make_rows("probe", layers=[layer], whole=accuracy),
        make_rows("tokens", layers=[layer], whole=len(points.pictures)),
    ]
    divergences = measure_divergence(heads, points.groups, splits.observed, splits.halves)
    for measure, divergence in divergences.items():
        rows.append(make_rows(measure, layers=[layer], whole=divergence))

    mmd_of_halves = median_mmd(splits.halves)
    if len(mmd_of_halves):
        floor = np.quantile(mmd_of_halves, FLOOR_QUANTILE)
        rows.append(make_rows("mmd_halves", layers=[layer], whole=floor))
    return pd.concat(rows)


def kernel(points: np.ndarray) -> np.ndarray:
    """The kernel of all pairs of rows x and y of `points`, `(N, N)`.

    It is the mean over the bandwidths s of exp(-‖x-y‖²/(s σ²)), where σ² is the mean squared distance of two rows.
    """
    rows = torch.from_numpy(points).double()
    # cdist's faster mode, by matrix products, has large rounding errors at small distances.
    squared_distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    num_pairs = len(rows) * (len(rows) - 1)
    mean_squared_distance = squared_distances.sum() / num_pairs

    kernels = []
    for bandwidth in BANDWIDTHS:
        scale = (bandwidth * mean_squared_distance).clamp(min=TINY)
        kernels.append((-squared_distances / scale).exp())
    return torch.stack(kernels).mean(dim=0).numpy()


def unbiased_mmd(matrix: np.ndarray, groups: np.ndarray, pictures: np.ndarray, split: Split) -> np.ndarray:
    """MMD² between the two sets of each split, `(num_ways,)`; NaN if a set has no pairs of tokens.

    It is the U-statistic of Gretton et al. (2012, eq. 3), but only pairs of tokens from different pictures count.
    Tokens of one picture are correlated, and their pairs would raise MMD² above 0 even for equal distributions.

    Args:
        matrix: The kernel of all pairs of tokens, `(N, N)`.
        groups: The group of each token, `(N,)`.
        pictures: The picture of each group, `(num_groups,)`.
        split: The two sets of groups.
    """
    is_member = np.eye(len(pictures))[groups]  # [N, num_groups]
    are_apart = pictures[:, None] != pictures  # [num_groups, num_groups]
    group_sizes = is_member.sum(axis=0)

    # For any two groups, the sum of the kernel over their pairs of tokens, and the number of these pairs.
    sums = is_member.T @ matrix @ is_member * are_apart
    counts = np.outer(group_sizes, group_sizes) * are_apart

    def mean_kernel(groups_a: np.ndarray, groups_b: np.ndarray) -> np.ndarray:
        """Mean of the kernel over the pairs of tokens of two sets of groups, for each way to split."""
        total = np.einsum("ij,ij->i", groups_a @ sums, groups_b)
        num_pairs = np.einsum("ij,ij->i", groups_a @ counts, groups_b)
        with np.errstate(invalid="ignore"):  # 0 / 0 without pairs
            return total / num_pairs

    first = split[0].astype(float)
    second = split[1].astype(float)
    return mean_kernel(first, first) + mean_kernel(second, second) - 2 * mean_kernel(first, second)


def linear_probe(points: np.ndarray, groups: np.ndarray, num_pictures: int) -> float:
    """Cross-validated accuracy of a logistic regression that tells image tokens from text tokens.

    All tokens of a picture are in the same fold.

    Args:
        points: Keys or values of one head, `(N, head_dim)`, from at least two pictures.
        groups: The group of each token as in [`Points`], `(N,)`.
        num_pictures: Number of pictures.
    """
    pictures = groups % num_pictures
    is_image_token = groups < num_pictures
    classifier = LogisticRegression(max_iter=1000)
    folds = GroupKFold(min(MAX_FOLDS, len(np.unique(pictures))))
    scores = cross_val_score(classifier, points, is_image_token, groups=pictures, cv=folds)
    return float(scores.mean())
