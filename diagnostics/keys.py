"""Distances between visual and text tokens in key space, before rotary embedding, and in value space.

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

from diagnostics.divergence import measure_divergence
from diagnostics.probe import Record
from diagnostics.table import jackknife_rows, make_rows
from diagnostics.tokens import Tokens


MAX_TOKENS = 256
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
HALVES = 200
# Two sets of groups of tokens, boolean, `(num_ways, 2 * num_pictures)` each: the visual tokens of each picture are a
# group, then the text tokens of each.
Split = tuple[np.ndarray, ...]


class Splits(NamedTuple):
    """The sets that are compared.

    Attributes:
        observed: Visual and text tokens of all pictures.
        without: The same with each picture left out once.
        halves: Half of the pictures and the other half, within one modality; empty below four pictures.
    """

    observed: Split
    without: Split
    halves: Split


def make_splits(num_pictures: int, rng: np.random.Generator) -> Splits:
    """The sets to compare, for this number of pictures."""

    def modalities(pictures: np.ndarray) -> Split:
        none = np.zeros_like(pictures)
        return np.concatenate([pictures, none], axis=1), np.concatenate([none, pictures], axis=1)

    size = num_pictures // 2
    order = np.array([rng.permutation(num_pictures) for _ in range(HALVES if size > 1 else 0)])
    order = order.reshape(-1, num_pictures)
    (a, text_a), (b, text_b) = modalities(order < size), modalities((order >= size) & (order < 2 * size))
    return Splits(
        observed=modalities(np.ones((1, num_pictures), dtype=bool)),
        without=modalities(~np.eye(num_pictures, dtype=bool)),
        halves=(np.concatenate([a, text_a]), np.concatenate([b, text_b])),
    )


class Points(NamedTuple):
    """Keys or values of one layer: `(n, num_heads, head_dim)` of each modality, equally many of both from each
    picture; the picture of each row, `(n,)`; the number of pictures, some of which may have no row."""

    visual: np.ndarray
    text: np.ndarray
    pictures: np.ndarray
    num_pictures: int

    @property
    def groups(self) -> np.ndarray:
        """The group of each visual and then of each text token, `(2n,)`."""
        return np.concatenate([self.pictures, self.num_pictures + self.pictures])

    @property
    def scaled(self) -> np.ndarray:
        """Visual and then text tokens, `(2n, num_heads, head_dim)`, every coordinate with mean 0 and deviation 1."""
        pooled = np.concatenate([self.visual, self.text])
        spread = pooled.std(axis=0)
        return (pooled - pooled.mean(axis=0)) / np.where(spread > 0, spread, 1)


def draw_positions(tokens: Tokens, picture: str, count: int) -> torch.Tensor:
    """Random positions of at most `count` visual and `count` text tokens of a sample, seeded by the fingerprint of its
    picture, so the same for every model."""
    generator = torch.Generator().manual_seed(int(picture, 16) % 2**63)
    positions = [mask.nonzero()[:, 0] for mask in (tokens.visual, tokens.text)]
    drawn = [of[torch.randperm(len(of), generator=generator)[:count]] for of in positions]
    return torch.cat(drawn).sort().values


def take_points(name: str, layer: int, records: Sequence[Record]) -> Points:
    """A layer's `"keys"` or `"values"`, of one record for each picture."""
    found: dict[str, list[np.ndarray]] = {"visual": [], "text": []}
    for record in records:
        kept = getattr(record, name)[layer].transpose(0, 1).numpy()  # [num_kept, num_heads, head_dim]
        of_picture = {modality: kept[getattr(record.tokens, modality)[record.key_positions]] for modality in found}
        count = min(map(len, of_picture.values()))  # 0 where all of a modality are sinks
        for modality, tokens in of_picture.items():
            found[modality].append(tokens[np.linspace(0, len(tokens) - 1, count).round().astype(int)])
    pictures = np.repeat(np.arange(len(records)), [len(tokens) for tokens in found["visual"]])
    return Points(np.concatenate(found["visual"]), np.concatenate(found["text"]), pictures, len(records))


def kernel(points: np.ndarray) -> np.ndarray:
    """mean_j exp(-‖x-y‖²/(s_j σ²)) of the rows of `points`, `(n, n)`; σ² is their mean squared distance."""
    rows = torch.from_numpy(points).double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    scale = distances.sum() / (len(rows) * (len(rows) - 1))
    return torch.stack([(-distances / (s * scale).clamp(min=1e-30)).exp() for s in BANDWIDTHS]).mean(0).numpy()


def unbiased_mmd(matrix: np.ndarray, groups: np.ndarray, pictures: np.ndarray, split: Split) -> np.ndarray:
    """MMD² between the two sets of each split, `(num_ways,)`; NaN if no pairs are left.

    The U-statistic of Gretton et al. (2012, eq. 3) over pictures: only pairs of tokens of different pictures count,
    since tokens of one picture are correlated, which would raise it above 0 for equal distributions. The kernel's
    matrix is `(N, N)`; `groups` are those of its tokens, `(N,)`, and `pictures` those of the groups, `(num_groups,)`.
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


def linear_probe(points: np.ndarray, groups: np.ndarray, num_pictures: int) -> float:
    """Cross-validated accuracy of telling the modalities of `points`, `(N, head_dim)`, apart by their groups, `(N,)`;
    each picture's tokens are in one fold. Two pictures at least must have tokens."""
    pictures = groups % num_pictures
    model, folds = LogisticRegression(max_iter=1000), GroupKFold(min(5, len(np.unique(pictures))))
    return float(cross_val_score(model, points, groups < num_pictures, groups=pictures, cv=folds).mean())


def measure_space(name: str, records: Sequence[Record], seed: int = 0) -> pd.DataFrame | None:
    """Rows of numbers by layer, such as `keys.mmd`, of `"keys"` or `"values"`, from a record for each picture;
    `None` if fewer than 8 tokens of each modality, or those of a single picture, are left to compare."""
    layers = sorted(set.intersection(*(set(getattr(record, name)) for record in records)))
    points = [take_points(name, layer, records) for layer in layers]
    if not points or len(points[0].pictures) < 8 or len(np.unique(points[0].pictures)) < 2:
        return None
    splits = make_splits(len(records), np.random.default_rng(seed))
    rows = pd.concat([_measure_layer(layer, of, splits) for layer, of in zip(layers, points, strict=True)])
    return rows.assign(measure=f"{name}." + rows["measure"])


def _measure_layer(layer: int, points: Points, splits: Splits) -> pd.DataFrame:
    heads, groups, count = points.scaled.transpose(1, 0, 2), points.groups, points.num_pictures
    matrices, pictures = [kernel(head) for head in heads], np.arange(2 * count) % count
    mmd, without, halves = (
        np.median([unbiased_mmd(matrix, groups, pictures, split) for matrix in matrices], axis=0) for split in splits
    )
    rows = [jackknife_rows("mmd", mmd[0], without, layers=[layer])]
    numbers = {
        "probe": np.median([linear_probe(head, groups, count) for head in heads]),
        "tokens": len(points.pictures),
        **measure_divergence(heads, groups, splits.observed, splits.halves),
    }
    if len(halves):
        numbers["mmd_halves"] = np.quantile(halves, 0.95)
    return pd.concat([*rows, *(make_rows(name, layers=[layer], whole=number) for name, number in numbers.items())])
