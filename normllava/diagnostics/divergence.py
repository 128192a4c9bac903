"""Jensen-Shannon divergence between a layer's image and text tokens, and how large the divergence is by chance.

MaLoRA (arXiv 2510.26721) standardizes keys, reduces them by PCA, and measures the Jensen-Shannon divergence between
the keys of image and text tokens. We have read only its abstract, which leaves the details open. Here the divergence
is in bits: 0 for equal distributions, 1 for distributions without a common value. It is computed from a histogram of
each of ten principal components, and averaged over the components. Each head of each model has its own components.
"""

import numpy as np
from scipy.special import rel_entr
from sklearn.decomposition import PCA


# Number of principal components.
COMPONENTS = 10
# Number of bins of a component's histogram.
BINS = 16
# Two random halves of the pictures differ only by chance. The floor of the divergence is this quantile of the
# divergences of many pairs of halves. A divergence between modalities that is below the floor says nothing.
FLOOR_QUANTILE = 0.95
# Pairs of sets of tokens, as two masks `(num_pairs, num_groups)`. Row i of the first mask says which groups of tokens
# are in the first set of pair i, and row i of the second mask says which are in the second set.
SetPairs = tuple[np.ndarray, np.ndarray]


def measure_divergence(
    heads: np.ndarray, groups: np.ndarray, observed: SetPairs, halves: SetPairs
) -> dict[str, float]:
    """Divergence in bits between the modalities, `"jsd"`, and its floor, `"jsd_halves"`, as medians over heads.

    The floor is rather too high than too low: half of the pictures have fewer tokens than all pictures, and chance
    makes the divergence between fewer tokens larger.

    Args:
        heads: Keys or values of each head, `(num_heads, num_tokens, head_dim)`.
        groups: The group of each token, `(num_tokens,)`. A group is one modality of one picture.
        observed: One pair: all image tokens and all text tokens.
        halves: Pairs of a random half of the pictures and the other half, within one modality. If there are no such
            pairs, `"jsd_halves"` is left out.
    """
    between_modalities = [histogram_divergence(head, groups, observed) for head in heads]
    divergences = {"jsd": float(np.median(between_modalities))}

    num_pairs_of_halves = len(halves[0])
    if num_pairs_of_halves > 0:
        within_modalities = [histogram_divergence(head, groups, halves) for head in heads]
        median_over_heads = np.median(within_modalities, axis=0)  # [num_pairs]
        divergences["jsd_halves"] = float(np.quantile(median_over_heads, FLOOR_QUANTILE))

    return divergences


def histogram_divergence(points: np.ndarray, groups: np.ndarray, pairs: SetPairs) -> np.ndarray:
    """Jensen-Shannon divergence in bits between the two sets of each pair, `(num_pairs,)`.

    The divergence is the mean over principal components, weighted by the variance that each component explains. Both
    sets have the same bins, `BINS` for each component. The bins' edges are quantiles of all points, so that each bin
    holds equally many points even if there are outliers.

    Args:
        points: One head's keys or values, `(num_tokens, head_dim)`.
        groups: The group of each token, `(num_tokens,)`.
        pairs: The pairs of sets.
    """
    first_sets, second_sets = pairs
    num_pairs, num_groups = first_sets.shape
    # PCA can't explain the variance of points that are all the same.
    if (points == points[0]).all():
        return np.zeros(num_pairs)

    num_components = min(COMPONENTS, *points.shape)  # PCA has at most as many as there are tokens, or coordinates
    pca = PCA(num_components, random_state=0).fit(points)
    # A component needs no centering: its bins end at its own quantiles, so that a shift changes no histogram.
    components = points @ pca.components_.T  # [num_tokens, num_components]

    divergences = []
    for component in components.T:
        inner_edges = np.quantile(component, np.arange(1, BINS) / BINS)  # [BINS - 1]
        bin_of_token = np.searchsorted(inner_edges, component, side="right")
        histograms = np.zeros((num_groups, BINS))
        np.add.at(histograms, (groups, bin_of_token), 1)  # counts the tokens of each group in each bin

        # The histogram of a set is the sum over its groups.
        divergences.append(jensen_shannon(first_sets @ histograms, second_sets @ histograms))

    return np.average(divergences, axis=0, weights=pca.explained_variance_ratio_)


def jensen_shannon(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence in bits of two histograms, which are counts `(..., num_bins)`.

    The divergence is NaN if a histogram is empty. scipy's `jensenshannon` is not used, because it returns the square
    root of the divergence, which is NaN if rounding makes the divergence negative.
    """
    with np.errstate(invalid="ignore"):  # an empty histogram gives 0 / 0
        first_shares = first / first.sum(axis=-1, keepdims=True)
        second_shares = second / second.sum(axis=-1, keepdims=True)
    mixture = (first_shares + second_shares) / 2
    nats = (rel_entr(first_shares, mixture) + rel_entr(second_shares, mixture)).sum(axis=-1) / 2
    return np.maximum(nats, 0) / np.log(2)
