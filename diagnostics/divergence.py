"""Jensen-Shannon divergence between a layer's image and text tokens, and how much of the divergence is chance.

MaLoRA (arXiv 2510.26721) standardizes keys, reduces them by PCA, and measures their Jensen-Shannon divergence. We have
read only its abstract, which leaves the details open. Here the divergence is in bits: 0 for equal distributions, 1 for
distributions without a common value. It is computed from a histogram for each of ten principal components. Each model
has principal components of its own.
"""

import numpy as np
from scipy.special import rel_entr
from sklearn.decomposition import PCA


COMPONENTS = 10
BINS = 16
# The floor of a distance is this quantile of the distances between random halves.
FLOOR_QUANTILE = 0.95
# Several ways to choose a first and a second set of tokens, whose distance is measured. Two boolean arrays,
# `(num_ways, num_groups)` each, tell for each way which groups of tokens are in the first set and in the second set.
Split = tuple[np.ndarray, np.ndarray]


def measure_divergence(heads: np.ndarray, groups: np.ndarray, observed: Split, halves: Split) -> dict[str, float]:
    """Divergence in bits between the modalities, `"jsd"`, and its floor, `"jsd_halves"`; medians over heads.

    The floor is the 95% quantile of the divergences between random halves of the pictures, within one modality. It is
    rather too high than too low: a divergence by chance is larger between fewer tokens, and a half of the pictures has
    fewer tokens than all pictures.

    Args:
        heads: Keys of each head, of image tokens and then of text tokens, `(num_heads, num_tokens, head_dim)`.
        groups: The group of each token, which is one modality of one picture, `(num_tokens,)`.
        observed: The two modalities.
        halves: Random halves of the pictures, within one modality. If there are none, `"jsd_halves"` is left out.
    """
    between_modalities = [histogram_divergence(head, groups, observed) for head in heads]
    divergences = {"jsd": float(np.median(between_modalities))}

    if len(halves[0]) > 0:
        within_modalities = [histogram_divergence(head, groups, halves) for head in heads]
        median_over_heads = np.median(within_modalities, axis=0)  # [num_ways]
        divergences["jsd_halves"] = float(np.quantile(median_over_heads, FLOOR_QUANTILE))

    return divergences


def histogram_divergence(points: np.ndarray, groups: np.ndarray, split: Split) -> np.ndarray:
    """Jensen-Shannon divergence in bits between the two sets of each split, `(num_ways,)`.

    It is the mean over the principal components of all points, weighted by the variance that each component explains.
    Both sets have the same bins, `BINS` for each component. The bins' edges are quantiles of all points, so that each
    bin holds equally many points even if there are outliers.

    Args:
        points: One head's keys, `(num_tokens, head_dim)`.
        groups: The group of each token, `(num_tokens,)`.
        split: Which groups are in the first set and which in the second, `(num_ways, num_groups)` each.
    """
    first, second = split
    # PCA can't explain the variance of points that are all the same.
    if (points == points[0]).all():
        return np.zeros(len(first))

    pca = PCA(n_components=min(COMPONENTS, *points.shape), random_state=0).fit(points)
    components = points @ pca.components_.T  # [num_tokens, num_components]

    divergences = []
    for component in components.T:
        inner_edges = np.quantile(component, np.arange(1, BINS) / BINS)
        bins = np.searchsorted(inner_edges, component, side="right")
        counts = np.zeros((first.shape[1], BINS))  # [num_groups, num_bins]
        np.add.at(counts, (groups, bins), 1)
        divergences.append(jensen_shannon(first @ counts, second @ counts))

    return np.average(divergences, axis=0, weights=pca.explained_variance_ratio_)


def jensen_shannon(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence in bits of two histograms, counts `(..., num_bins)` each; NaN for an empty histogram.

    scipy's `jensenshannon` is the root of this divergence. It isn't used here, because the root is NaN if rounding
    makes the divergence negative.
    """
    with np.errstate(invalid="ignore"):  # 0 / 0 in an empty histogram
        first = first / first.sum(axis=-1, keepdims=True)
        second = second / second.sum(axis=-1, keepdims=True)
    mixture = (first + second) / 2
    nats = (rel_entr(first, mixture) + rel_entr(second, mixture)).sum(axis=-1) / 2
    return np.maximum(nats, 0) / np.log(2)
