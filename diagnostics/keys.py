"""Distances between image and text tokens in key space, before rotary embedding, and in value space.

Rotary embedding separates keys of the same distribution at different positions. MMD and Jensen-Shannon divergence are
what MaLoRA's abstract names (arXiv 2510.26721); what it leaves open is chosen here and stated on the report's page.
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


# Tokens of each modality, over all pictures, about.
MAX_TOKENS = 256
# Fewer tokens of each modality say nothing.
MIN_TOKENS = 8
# Of the kernel, in multiples of the mean squared distance.
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Random splits of the pictures into halves.
HALVES = 200
MAX_FOLDS = 5


def measure_space(name: str, records: Sequence[Record], seed: int = 0) -> pd.DataFrame | None:
    """Rows of numbers by layer, such as `keys.mmd`, of `"keys"` or `"values"`, from a record for each picture;
    `None` if fewer than 8 tokens of each modality, or those of a single picture, are left to compare."""
    layers = sorted(set.intersection(*(set(getattr(record, name)) for record in records)))
    points = [take_points(name, layer, records) for layer in layers]
    if not points or not can_compare(points[0]):
        return None

    splits = make_splits(len(records), np.random.default_rng(seed))
    rows = [_measure_layer(layer, of_layer, splits) for layer, of_layer in zip(layers, points, strict=True)]
    table = pd.concat(rows)
    return table.assign(measure=f"{name}." + table["measure"])


def draw_positions(tokens: Tokens, picture: str, count: int) -> torch.Tensor:
    """Random positions of at most `count` image and `count` text tokens of a sample, seeded by the fingerprint of its
    picture, so the same for every model."""
    generator = torch.Generator().manual_seed(int(picture, 16) % 2**63)
    drawn = []
    for mask in (tokens.visual, tokens.text):
        positions = mask.nonzero()[:, 0]
        order = torch.randperm(len(positions), generator=generator)
        drawn.append(positions[order[:count]])
    return torch.cat(drawn).sort().values


class Points(NamedTuple):
    """Keys or values of one layer: as many of image tokens as of text tokens from each picture.

    Attributes:
        visual: Of image tokens, `(n, num_heads, head_dim)`.
        text: Of text tokens, `(n, num_heads, head_dim)`.
        pictures: The picture of each row of either, `(n,)`.
        num_pictures: Some of which may have no row.
    """

    visual: np.ndarray
    text: np.ndarray
    pictures: np.ndarray
    num_pictures: int

    @property
    def groups(self) -> np.ndarray:
        """The group of each image and then of each text token, `(2n,)`."""
        return np.concatenate([self.pictures, self.num_pictures + self.pictures])

    @property
    def scaled(self) -> np.ndarray:
        """Image and then text tokens, `(2n, num_heads, head_dim)`, every coordinate with mean 0 and deviation 1."""
        pooled = np.concatenate([self.visual, self.text])
        deviation = pooled.std(axis=0)
        return (pooled - pooled.mean(axis=0)) / np.where(deviation > 0, deviation, 1)


def can_compare(points: Points) -> bool:
    """Whether enough tokens are left, of two pictures at least."""
    return len(points.pictures) >= MIN_TOKENS and len(np.unique(points.pictures)) >= 2


def take_points(name: str, layer: int, records: Sequence[Record]) -> Points:
    """A layer's `"keys"` or `"values"`, of one record for each picture."""
    visual, text, pictures = [], [], []
    for number, record in enumerate(records):
        kept = getattr(record, name)[layer].transpose(0, 1).numpy()  # [num_kept, num_heads, head_dim]
        of_image = kept[record.tokens.visual[record.key_positions]]
        of_text = kept[record.tokens.text[record.key_positions]]

        count = min(len(of_image), len(of_text))  # 0 where all of a modality are sinks
        visual.append(take_evenly(of_image, count))
        text.append(take_evenly(of_text, count))
        pictures += [number] * count
    return Points(np.concatenate(visual), np.concatenate(text), np.array(pictures, dtype=int), len(records))


def take_evenly(tokens: np.ndarray, count: int) -> np.ndarray:
    """So many rows, evenly spread from the first to the last."""
    chosen = np.linspace(0, len(tokens) - 1, count).round().astype(int)
    return tokens[chosen]


class Splits(NamedTuple):
    """The sets that are compared. The image tokens of each picture are a group, then the text tokens of each.

    Attributes:
        observed: Image and text tokens of all pictures.
        without: The same with each picture left out once.
        halves: Half of the pictures and the other half, within one modality; empty below four pictures.
    """

    observed: Split
    without: Split
    halves: Split


def make_splits(num_pictures: int, rng: np.random.Generator) -> Splits:
    """The sets to compare, for this number of pictures."""
    all_pictures = np.ones((1, num_pictures), dtype=bool)
    all_but_one = ~np.eye(num_pictures, dtype=bool)

    # A half has two pictures at least, since only pairs of tokens of different pictures count.
    size = num_pictures // 2
    num_halves = HALVES if size > 1 else 0
    order = np.array([rng.permutation(num_pictures) for _ in range(num_halves)]).reshape(-1, num_pictures)
    first_half = order < size
    second_half = (order >= size) & (order < 2 * size)
    halves = (
        np.concatenate([image_groups(first_half), text_groups(first_half)]),
        np.concatenate([image_groups(second_half), text_groups(second_half)]),
    )
    return Splits(
        observed=(image_groups(all_pictures), text_groups(all_pictures)),
        without=(image_groups(all_but_one), text_groups(all_but_one)),
        halves=halves,
    )


def image_groups(pictures: np.ndarray) -> np.ndarray:
    """The groups of the image tokens of some pictures, `(num_ways, num_pictures)`, among those of both modalities."""
    return np.concatenate([pictures, np.zeros_like(pictures)], axis=1)


def text_groups(pictures: np.ndarray) -> np.ndarray:
    """The groups of the text tokens of some pictures, `(num_ways, num_pictures)`, among those of both modalities."""
    return np.concatenate([np.zeros_like(pictures), pictures], axis=1)


def _measure_layer(layer: int, points: Points, splits: Splits) -> pd.DataFrame:
    """Medians over heads: of MMD² with its jackknife, of the divergence, both between halves too, and of the probe's
    accuracy."""
    heads = points.scaled.transpose(1, 0, 2)  # [num_heads, 2n, head_dim]
    kernels = [kernel(head) for head in heads]
    picture_of_group = np.arange(2 * points.num_pictures) % points.num_pictures

    def median_mmd(split: Split) -> np.ndarray:
        by_head = [unbiased_mmd(matrix, points.groups, picture_of_group, split) for matrix in kernels]
        return np.median(by_head, axis=0)  # [num_ways]

    (mmd,) = median_mmd(splits.observed)
    accuracy = np.median([linear_probe(head, points.groups, points.num_pictures) for head in heads])
    rows = [
        jackknife_rows("mmd", mmd, median_mmd(splits.without), layers=[layer]),
        make_rows("probe", layers=[layer], whole=accuracy),
        make_rows("tokens", layers=[layer], whole=len(points.pictures)),
    ]
    divergences = measure_divergence(heads, points.groups, splits.observed, splits.halves)
    rows += [make_rows(measure, layers=[layer], whole=divergence) for measure, divergence in divergences.items()]

    halves = median_mmd(splits.halves)
    if len(halves):
        rows.append(make_rows("mmd_halves", layers=[layer], whole=np.quantile(halves, FLOOR_QUANTILE)))
    return pd.concat(rows)


def kernel(points: np.ndarray) -> np.ndarray:
    """mean_j exp(-‖x-y‖²/(s_j σ²)) of the rows of `points`, `(n, n)`; σ² is their mean squared distance."""
    rows = torch.from_numpy(points).double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    mean_distance = distances.sum() / (len(rows) * (len(rows) - 1))

    kernels = [(-distances / (bandwidth * mean_distance).clamp(min=TINY)).exp() for bandwidth in BANDWIDTHS]
    return torch.stack(kernels).mean(dim=0).numpy()


def unbiased_mmd(matrix: np.ndarray, groups: np.ndarray, pictures: np.ndarray, split: Split) -> np.ndarray:
    """MMD² between the two sets of each split, `(num_ways,)`; NaN if no pairs are left.

    The U-statistic of Gretton et al. (2012, eq. 3) over pictures: only pairs of tokens of different pictures count,
    since tokens of one picture are correlated, which would raise it above 0 for equal distributions.

    Args:
        matrix: The kernel of all pairs of tokens, `(N, N)`.
        groups: The group of each token, `(N,)`.
        pictures: The picture of each group, `(num_groups,)`.
        split: The two sets of groups.
    """
    is_member = np.eye(len(pictures))[groups]  # [N, num_groups]
    are_apart = pictures[:, None] != pictures  # [num_groups, num_groups]
    group_sizes = is_member.sum(axis=0)

    # Sum of the kernel over the pairs of tokens of two groups, and how many pairs.
    sums = is_member.T @ matrix @ is_member * are_apart
    counts = np.outer(group_sizes, group_sizes) * are_apart

    def mean_kernel(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        total = np.einsum("ij,ij->i", one @ sums, other)
        num_pairs = np.einsum("ij,ij->i", one @ counts, other)
        with np.errstate(invalid="ignore"):
            return total / num_pairs

    a = split[0].astype(float)
    b = split[1].astype(float)
    return mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)


def linear_probe(points: np.ndarray, groups: np.ndarray, num_pictures: int) -> float:
    """Cross-validated accuracy of telling the modalities of `points`, `(N, head_dim)`, apart by their groups, `(N,)`;
    each picture's tokens are in one fold. Two pictures at least must have tokens."""
    pictures = groups % num_pictures
    is_image_token = groups < num_pictures
    classifier = LogisticRegression(max_iter=1000)
    folds = GroupKFold(min(MAX_FOLDS, len(np.unique(pictures))))
    scores = cross_val_score(classifier, points, is_image_token, groups=pictures, cv=folds)
    return float(scores.mean())
