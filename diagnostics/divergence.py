"""Jensen-Shannon divergence between the image and the text tokens of a layer, and how much of it is chance.

MaLoRA (arXiv 2510.26721) standardizes keys, reduces them by PCA and gives their Jensen-Shannon divergence. We have
read its abstract, which leaves the base, the histograms and the number of components open. Here the base is 2, so that
the divergence lies between 0 (the same distribution) and 1 bit (no value in common), and there is a histogram for each
of ten principal components. These are each model's own: the paper doesn't say how it compares two models.
"""

import numpy as np
from scipy.special import rel_entr
from sklearn.decomposition import PCA


COMPONENTS = 10
BINS = 16
# The floor of a distance: so many of the distances between random halves are below.
FLOOR_QUANTILE = 0.95
# Two sets of groups of tokens, for each way to split them: boolean, `(num_ways, num_groups)` each.
Split = tuple[np.ndarray, np.ndarray]


def measure_divergence(heads: np.ndarray, groups: np.ndarray, observed: Split, halves: Split) -> dict[str, float]:
    """Divergence in bits between the modalities, `"jsd"`, and its floor, `"jsd_halves"`; medians over heads.

    The floor is the 95% quantile over random halves of the pictures, within one modality. Few tokens fill histograms
    unevenly, which raises every divergence; halves have the fewest, so the floor is rather too high than too low.

    Args:
        heads: Keys of each head, of image tokens and then of text tokens, `(num_heads, num_tokens, head_dim)`.
        groups: The group of each token, which is one modality of one picture, `(num_tokens,)`.
        observed: The two modalities.
        halves: Random halves of the pictures, within one modality. Without any, there is no `"jsd_halves"`.
    """
    between_modalities = [histogram_divergence(head, groups, observed) for head in heads]
    divergences = {"jsd": float(np.median(between_modalities))}

    if len(halves[0]) > 0:
        within_modalities = [histogram_divergence(head, groups, halves) for head in heads]  # [num_heads][num_ways]
        divergences["jsd_halves"] = float(np.quantile(np.median(within_modalities, axis=0), FLOOR_QUANTILE))

    return divergences


def histogram_divergence(points: np.ndarray, groups: np.ndarray, split: Split) -> np.ndarray:
    """Jensen-Shannon divergence in bits between the two sets of each split, `(num_ways,)`.

    It is the mean over the principal components of all points, weighted by the variance that each explains. On a
    component the sets share the edges of 16 bins. Each bin holds as many of all points, whatever the outliers.

    Args:
        points: One head's keys, `(num_tokens, head_dim)`.
        groups: The group of each token, `(num_tokens,)`.
        split: Which groups are in the first set and which in the second, `(num_ways, num_groups)` each.
    """
    first, second = split
    if (points == points[0]).all():
        return np.zeros(len(first))

    pca = PCA(n_components=min(COMPONENTS, *points.shape), random_state=0).fit(points)
    components = points @ pca.components_.T  # [num_tokens, num_components]

    by_component = []
    for component in components.T:
        inner_edges = np.quantile(component, np.arange(1, BINS) / BINS)
        bins = np.searchsorted(inner_edges, component, side="right")
        counts = np.zeros((first.shape[1], BINS))
        np.add.at(counts, (groups, bins), 1)  # [num_groups, num_bins]
        by_component.append(jensen_shannon(first @ counts, second @ counts))

    return np.average(by_component, axis=0, weights=pca.explained_variance_ratio_)


def jensen_shannon(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence in bits of histograms, counts `(..., num_bins)` each; NaN for an empty one.

    This is the square of scipy's `jensenshannon`, whose root is NaN where rounding makes the divergence negative.
    """
    with np.errstate(invalid="ignore"):
        first = first / first.sum(axis=-1, keepdims=True)
        second = second / second.sum(axis=-1, keepdims=True)
    mixture = (first + second) / 2
    nats = (rel_entr(first, mixture) + rel_entr(second, mixture)).sum(axis=-1) / 2
    return np.maximum(nats, 0) / np.log(2)
