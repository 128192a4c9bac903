"""Measures how far the keys of image tokens lie from the keys of text tokens in a layer, and the same for values.

The measures are two distances, MMD² (squared maximum mean discrepancy) and Jensen-Shannon divergence, and the accuracy
of a linear probe. The distances are those that MaLoRA's abstract (arXiv 2510.26721) names. The choices that the
abstract leaves open are stated on the report's page.

Keys are compared as they are before rotary embedding. The embedding rotates keys by an angle that grows with their
position, and so moves keys at different positions apart even if their distribution is the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score

from normllava.diagnostics.divergence import FLOOR_QUANTILE, SetPairs, measure_divergence
from normllava.diagnostics.probe import TINY, Record
from normllava.diagnostics.table import jackknife_rows, make_rows
from normllava.kernels import gaussian_kernel
from normllava.tokens import Tokens


# Largest number of tokens of each modality that are compared, over all pictures. With more pictures than this, one
# token of each modality is compared for each picture.
MAX_TOKENS = 256
# With fewer tokens of each modality than this, no distance is measured, because the distance would say nothing.
MIN_TOKENS = 8
# Number of times that the pictures are split into random halves, whose tokens differ only by chance.
HALVES = 200
# Largest number of folds in the linear probe's cross-validation.
MAX_FOLDS = 5


def measure_space(name: str, records: Sequence[Record], seed: int = 0) -> pd.DataFrame | None:
    """Rows of the measures of keys or of values, by layer, such as `keys.mmd`; `None` if there are too few tokens.

    Args:
        name: `"keys"` or `"values"`.
        records: The record of each picture.
        seed: Seed of the random halves.
    """
    # `record.keys` and `record.values` are dictionaries by layer. Only layers that all records have are compared.
    layers_of_records = [set(getattr(record, name)) for record in records]
    layers = sorted(set.intersection(*layers_of_records))
    if not layers:
        return None

    points_by_layer = {layer: take_points(name, layer, records) for layer in layers}
    # All layers have the same tokens, so the first layer tells whether there are enough tokens.
    if not can_compare(points_by_layer[layers[0]]):
        return None

    set_pairs = make_set_pairs(len(records), np.random.default_rng(seed))
    rows = pd.concat([_measure_layer(layer, points, set_pairs) for layer, points in points_by_layer.items()])
    return rows.assign(measure=f"{name}." + rows["measure"])  # "mmd" becomes "keys.mmd"


class Points(NamedTuple):
    """Keys or values of one layer: of `n` image tokens and `n` text tokens, equally many of both from each picture.

    Attributes:
        image: Keys or values of image tokens, `(n, num_heads, head_dim)`.
        text: Keys or values of text tokens, `(n, num_heads, head_dim)`.
        pictures: The number of the picture that `image[i]` and `text[i]` both come from, for each i, `(n,)`.
        num_pictures: Number of all pictures, including pictures from which no token is taken.
    """

    image: np.ndarray
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
        both_modalities = np.concatenate([self.image, self.text])
        centered = both_modalities - both_modalities.mean(axis=0)
        deviation = both_modalities.std(axis=0)
        return centered / np.where(deviation > 0, deviation, 1)  # a coordinate without deviation is 0


def take_points(name: str, layer: int, records: Sequence[Record]) -> Points:
    """The keys or values of a layer.

    Args:
        name: `"keys"` or `"values"`.
        layer: Number of the layer.
        records: The record of each picture.
    """
    image = []
    text = []
    pictures: list[int] = []
    for number, record in enumerate(records):
        vectors_by_layer = getattr(record, name)
        vectors = vectors_by_layer[layer].transpose(0, 1).numpy()  # [num_kept, num_heads, head_dim]
        is_image_token = record.tokens.image[record.key_positions]  # [num_kept]
        is_text_token = record.tokens.text[record.key_positions]  # [num_kept]
        image_vectors = vectors[is_image_token]
        text_vectors = vectors[is_text_token]

        # The count is 0 if all kept tokens of a modality are sinks, which are in neither mask.
        count = min(len(image_vectors), len(text_vectors))
        image.append(take_evenly(image_vectors, count))
        text.append(take_evenly(text_vectors, count))
        pictures += [number] * count

    return Points(
        image=np.concatenate(image),
        text=np.concatenate(text),
        pictures=np.array(pictures, dtype=int),
        num_pictures=len(records),
    )


def take_evenly(vectors: np.ndarray, count: int) -> np.ndarray:
    """`count` vectors of an array `(num_vectors, ...)`, evenly spread from the first to the last."""
    chosen = np.linspace(0, len(vectors) - 1, count).round().astype(int)
    return vectors[chosen]


def can_compare(points: Points) -> bool:
    """Whether there are enough tokens, and from at least two pictures."""
    num_pictures_with_tokens = len(np.unique(points.pictures))
    return len(points.pictures) >= MIN_TOKENS and num_pictures_with_tokens >= 2


class AllSetPairs(NamedTuple):
    """The pairs of sets of tokens that are compared. A set consists of groups, which are numbered as in [`Points`].

    Attributes:
        observed: One pair: all image tokens and all text tokens.
        leave_one_out: A pair for each picture: image tokens and text tokens of all other pictures.
        halves: Pairs of a random half of the pictures and the other half, within one modality. There are none for
            fewer than four pictures.
    """

    observed: SetPairs
    leave_one_out: SetPairs
    halves: SetPairs


def make_set_pairs(num_pictures: int, rng: np.random.Generator) -> AllSetPairs:
    """The pairs of sets to compare for this number of pictures."""
    all_pictures = np.ones((1, num_pictures), dtype=bool)
    all_but_one = ~np.eye(num_pictures, dtype=bool)

    # A half needs at least two pictures, because only pairs of tokens from different pictures count.
    half_size = num_pictures // 2
    num_splits = HALVES if half_size > 1 else 0
    # For each split, a random rank of each picture. The pictures with the lowest ranks are the first half, the next
    # pictures are the second half. With an odd number of pictures, the picture with the last rank is in neither half.
    ranks = np.zeros((num_splits, num_pictures), dtype=int)
    for split in range(num_splits):
        ranks[split] = rng.permutation(num_pictures)

    first_half = ranks < half_size
    second_half = (ranks >= half_size) & (ranks < 2 * half_size)
    halves = (
        np.concatenate([image_groups(first_half), text_groups(first_half)]),
        np.concatenate([image_groups(second_half), text_groups(second_half)]),
    )
    return AllSetPairs(
        observed=(image_groups(all_pictures), text_groups(all_pictures)),
        leave_one_out=(image_groups(all_but_one), text_groups(all_but_one)),
        halves=halves,
    )


def image_groups(pictures: np.ndarray) -> np.ndarray:
    """Masks of the groups that hold the image tokens of chosen pictures, `(num_pairs, 2 * num_pictures)`.

    Args:
        pictures: For each pair of sets, a mask of the chosen pictures, `(num_pairs, num_pictures)`.
    """
    return np.concatenate([pictures, np.zeros_like(pictures)], axis=1)


def text_groups(pictures: np.ndarray) -> np.ndarray:
    """Masks of the groups that hold the text tokens of chosen pictures, in the same form as [`image_groups`]."""
    return np.concatenate([np.zeros_like(pictures), pictures], axis=1)


def _measure_layer(layer: int, points: Points, set_pairs: AllSetPairs) -> pd.DataFrame:
    """Rows of one layer's measures. MMD², divergence and the linear probe's accuracy are medians over heads."""
    heads = points.scaled.transpose(1, 0, 2)  # [num_heads, 2n, head_dim]
    kernels = [kernel_matrix(head) for head in heads]
    # The first groups are the image tokens of each picture, the others the text tokens of each picture.
    picture_of_group = np.tile(np.arange(points.num_pictures), 2)

    def median_mmd(pairs: SetPairs) -> np.ndarray:
        """MMD² between the two sets of each pair, as the median over heads."""
        mmd_by_head = [unbiased_mmd(kernel, points.groups, picture_of_group, pairs) for kernel in kernels]
        return np.median(mmd_by_head, axis=0)  # [num_pairs]

    (mmd,) = median_mmd(set_pairs.observed)
    mmd_without_each_picture = median_mmd(set_pairs.leave_one_out)
    accuracy = np.median([linear_probe(head, points.groups, points.num_pictures) for head in heads])
    # The rows with `whole` have one value over all pictures, and none for a single picture.
    rows = [
        jackknife_rows("mmd", mmd, mmd_without_each_picture, layers=[layer]),
        make_rows("probe", layers=[layer], whole=accuracy),
        make_rows("tokens", layers=[layer], whole=len(points.pictures)),
    ]
    divergences = measure_divergence(heads, points.groups, set_pairs.observed, set_pairs.halves)
    for measure, divergence in divergences.items():
        rows.append(make_rows(measure, layers=[layer], whole=divergence))

    mmd_of_halves = median_mmd(set_pairs.halves)
    if len(mmd_of_halves) > 0:  # there are enough pictures for halves
        floor = np.quantile(mmd_of_halves, FLOOR_QUANTILE)
        rows.append(make_rows("mmd_halves", layers=[layer], whole=floor))
    return pd.concat(rows)


def kernel_matrix(points: np.ndarray) -> np.ndarray:
    """MMD's kernel between each two tokens, `(num_tokens, num_tokens)`.

    For the keys x and y of two tokens, the kernel is the mean of exp(-‖x-y‖²/(s σ²)) over the bandwidths s. σ² is the
    mean of ‖x-y‖² over all pairs of different tokens.

    Args:
        points: One head's keys or values, `(num_tokens, head_dim)`.
    """
    vectors = torch.from_numpy(points).double()
    # cdist's faster mode, by matrix products, has large rounding errors at small distances.
    squared_distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
    num_token_pairs = len(vectors) * (len(vectors) - 1)
    mean_squared_distance = squared_distances.sum() / num_token_pairs
    return gaussian_kernel(squared_distances, mean_squared_distance.clamp(min=TINY)).numpy()


def unbiased_mmd(kernel: np.ndarray, groups: np.ndarray, picture_of_group: np.ndarray, pairs: SetPairs) -> np.ndarray:
    """MMD² between the two sets of each pair, `(num_pairs,)`; NaN where a set has no two tokens to compare.

    This is the U-statistic of Gretton et al. (2012, eq. 3): the mean kernel within the first set, plus the mean kernel
    within the second set, minus twice the mean kernel between the two. Unlike in their statistic, tokens of the same
    picture are not compared: they are correlated, and would raise MMD² above 0 even for equal distributions.

    Args:
        kernel: The kernel between each two tokens, `(num_tokens, num_tokens)`.
        groups: The group of each token, `(num_tokens,)`.
        picture_of_group: The picture of each group, `(num_groups,)`.
        pairs: The pairs of sets.
    """
    num_groups = len(picture_of_group)
    is_in_group = np.eye(num_groups)[groups]  # one-hot, [num_tokens, num_groups]
    group_sizes = is_in_group.sum(axis=0)
    # Two groups are compared if they are of different pictures, [num_groups, num_groups].
    are_compared = picture_of_group[:, None] != picture_of_group[None, :]

    # For each two groups, the sum of the kernel over all pairs of their tokens, and the number of these token pairs.
    # Both are [num_groups, num_groups].
    kernel_sums = (is_in_group.T @ kernel @ is_in_group) * are_compared
    token_pair_counts = np.outer(group_sizes, group_sizes) * are_compared

    def mean_kernel(sets_a: np.ndarray, sets_b: np.ndarray) -> np.ndarray:
        """Mean kernel between set a and set b of each pair, `(num_pairs,)`, from masks `(num_pairs, num_groups)`."""
        # For each pair, both are sums over all groups of set a and all groups of set b.
        total_kernel = ((sets_a @ kernel_sums) * sets_b).sum(axis=1)
        total_count = ((sets_a @ token_pair_counts) * sets_b).sum(axis=1)
        with np.errstate(invalid="ignore"):  # 0 / 0 if all tokens are of one picture
            return total_kernel / total_count

    first_sets = pairs[0].astype(float)
    second_sets = pairs[1].astype(float)
    within = mean_kernel(first_sets, first_sets) + mean_kernel(second_sets, second_sets)
    return within - 2 * mean_kernel(first_sets, second_sets)


def linear_probe(points: np.ndarray, groups: np.ndarray, num_pictures: int) -> float:
    """Cross-validated accuracy of a logistic regression that tells image tokens from text tokens.

    All tokens of a picture are in the same fold.

    Args:
        points: Keys or values of one head, `(num_tokens, head_dim)`, from at least two pictures.
        groups: The group of each token as in [`Points`], `(num_tokens,)`.
        num_pictures: Number of pictures.
    """
    # Group i holds the image tokens of picture i, and group `num_pictures` + i its text tokens.
    pictures = groups % num_pictures
    is_image_token = groups < num_pictures
    num_folds = min(MAX_FOLDS, len(np.unique(pictures)))
    classifier = LogisticRegression(max_iter=1000)  # scikit-learn's default of 100 is often too few to converge
    scores = cross_val_score(classifier, points, is_image_token, groups=pictures, cv=GroupKFold(num_folds))
    return float(scores.mean())


def draw_positions(tokens: Tokens, fingerprint: str, count: int) -> torch.Tensor:
    """Random positions of a sample's tokens, at most `count` of each modality, in ascending order.

    The random numbers depend on the picture alone, so that the positions are drawn in the same way for every model.

    Args:
        tokens: The type of each token of the sample.
        fingerprint: The fingerprint of the sample's picture, a hexadecimal number.
        count: Largest number of tokens of each modality.
    """
    seed = int(fingerprint, 16) % 2**63  # torch takes no larger seeds
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for mask in (tokens.image, tokens.text):
        positions = mask.nonzero()[:, 0]
        order = torch.randperm(len(positions), generator=generator)
        drawn.append(positions[order[:count]])
    return torch.cat(drawn).sort().values
