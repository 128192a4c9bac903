"""How far apart the keys of visual and text tokens are, before rotary embedding.

After rotary embedding, keys of the same distribution at different positions look apart. The measures are those that
MaLoRA's abstract names (arXiv 2510.26721); what it leaves open is chosen here and stated in `DEFINITIONS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from scipy.spatial.distance import jensenshannon
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.model_selection import GroupKFold, cross_val_score

from diagnostics.probe import Record
from diagnostics.results import HeadDistance, KeySpace


BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
MAX_TOKENS = 256
PERMUTATIONS = 500
BINS = 16
COMPONENTS = 10
HALVES = 5
DEFINITIONS = {
    "keys": "per key-value head, before rotary embedding, standardised on both modalities together; equally many of "
    f"each, at most {MAX_TOKENS}; medians over heads",
    "mmd": "unbiased squared maximum mean discrepancy, kernel mean_j exp(-‖x-y‖²/(s_j σ²)), s = ¼, ½, 1, 2, 4, σ² the "
    "mean squared distance over both sets; about 0 for equal distributions, and can fall below",
    "p_value": f"share of {PERMUTATIONS} permutations of the modalities with at least this mmd, the observed one "
    "included. Tokens of one picture are alike, so small values overstate the evidence: compare mmd with its baseline",
    "js": f"Jensen-Shannon divergence in bits between histograms of {BINS} shared bins, on each of at most "
    f"{COMPONENTS} principal components, weighted by explained variance; components are those of the first model "
    "given, where the width is the same. Biased upwards: compare with its baseline",
    "baseline": f"the same between random halves of one modality, mean over both modalities and {HALVES} splits; its "
    "halves have half as many tokens, which raises js",
    "probe": "accuracy of a logistic regression that tells visual from text keys, cross-validated over samples, so "
    "that no picture is in both parts; 0.5 is chance",
}


@dataclass(frozen=True)
class Basis:
    """Principal components of one head, `(num_components, head_dim)`, and their shares of the variance."""

    components: np.ndarray
    weights: np.ndarray


# By layer and head.
Bases = dict[tuple[int, int], Basis]


def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The multi-kernel matrix over the rows of `x` and `y` together, `(n + m, n + m)`; see `DEFINITIONS`."""
    points = torch.from_numpy(np.concatenate([x, y])).double()
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    scale = distances.sum() / (len(points) * (len(points) - 1))
    return torch.stack([(-distances / (s * scale).clamp(min=1e-30)).exp() for s in BANDWIDTHS]).mean(0).numpy()


def unbiased_mmd(matrix: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Unbiased MMD² (Gretton et al., 2012, eq. 3) for each row of `first`, which says what belongs to the first set.

    Args:
        matrix: Kernel matrix `(N, N)` over both sets.
        first: Boolean, `(num_splits, N)`.
    """
    a = first.astype(float)
    b = 1 - a
    n, m = a.sum(1), b.sum(1)
    diagonal = matrix.diagonal()
    within_a = (np.einsum("ij,ij->i", a @ matrix, a) - a @ diagonal) / (n * (n - 1))
    within_b = (np.einsum("ij,ij->i", b @ matrix, b) - b @ diagonal) / (m * (m - 1))
    return within_a + within_b - 2 * np.einsum("ij,ij->i", a @ matrix, b) / (n * m)


def mmd_test(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Unbiased MMD² between two sets of points, and its permutation p-value."""
    matrix = kernel(x, y)
    labels = np.arange(len(matrix)) < len(x)
    permuted = np.stack([rng.permutation(labels) for _ in range(PERMUTATIONS)])
    observed = unbiased_mmd(matrix, labels[None])[0]
    return float(observed), float((1 + (unbiased_mmd(matrix, permuted) >= observed).sum()) / (1 + PERMUTATIONS))


def js_divergence(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """Jensen-Shannon divergence in bits by column, averaged with `weights`; see `DEFINITIONS`."""
    values = []
    for column in range(x.shape[1]):
        edges = np.histogram_bin_edges(np.concatenate([x[:, column], y[:, column]]), bins=BINS)
        counts = [np.histogram(points[:, column], edges)[0] for points in (x, y)]
        values.append(jensenshannon(*counts, base=2) ** 2)
    return float(np.average(values, weights=weights))


def balanced_keys(
    records: Sequence[Record], layer: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """As many keys of either modality as there are of both, at most `MAX_TOKENS`.

    Returns:
        Visual and text keys `(n, num_heads, head_dim)`, and the number of the sample that each is of, `(n,)` each.
    """
    found = []
    for modality in ("visual", "text"):
        keys, samples = [], []
        for number, record in enumerate(records):
            mask = getattr(record.tokens, modality)[record.key_positions]
            keys.append(record.keys[layer][:, mask].transpose(0, 1).numpy())
            samples += [number] * int(mask.sum())
        found.append((np.concatenate(keys), np.array(samples)))
    count = min(MAX_TOKENS, *(len(samples) for _, samples in found))
    chosen = [np.sort(rng.permutation(len(samples))[:count]) for _, samples in found]
    (visual, visual_samples), (text, text_samples) = found
    return visual[chosen[0]], text[chosen[1]], visual_samples[chosen[0]], text_samples[chosen[1]]


def measure_key_space(records: Sequence[Record], bases: Bases, seed: int = 0) -> KeySpace | None:
    """The numbers of `DEFINITIONS` by layer, medians over heads; `None` where keys were not recorded, or too few.

    Args:
        records: One for each sample.
        bases: Principal components by layer and head: used if they fit, filled in where there are none.
        seed: Of subsets, permutations and splits.
    """
    layers = sorted(records[0].keys)
    rng = np.random.default_rng(seed)
    counts, per_head = [], []
    medians: dict[str, list[float]] = {field.name: [] for field in fields(_Head)}
    for layer in layers:
        visual, text, *samples = balanced_keys(records, layer, rng)
        count = len(visual)
        if count < 8:
            return None
        pooled = _scaled(np.concatenate([visual, text]))
        heads = [
            _measure_head(
                pooled[:count, head], pooled[count:, head], np.concatenate(samples), bases, (layer, head), rng
            )
            for head in range(visual.shape[1])
        ]
        counts.append(count)
        per_head.append([HeadDistance(head.mmd, head.p_value, head.js) for head in heads])
        for name, values in medians.items():
            values.append(float(np.median([getattr(head, name) for head in heads])))
    return KeySpace(layers=layers, num_tokens=counts, per_head=per_head, **medians) if layers else None


def _scaled(points: np.ndarray) -> np.ndarray:
    """Every coordinate with mean 0 and standard deviation 1 over the first axis."""
    spread = points.std(axis=0, keepdims=True)
    return (points - points.mean(axis=0, keepdims=True)) / np.where(spread > 0, spread, 1)


@dataclass(frozen=True)
class _Head(HeadDistance):
    """What is measured of one head of one layer."""

    mmd_baseline: float
    js_baseline: float
    probe: float


def _measure_head(
    visual: np.ndarray,
    text: np.ndarray,
    samples: np.ndarray,
    bases: Bases,
    place: tuple[int, int],
    rng: np.random.Generator,
) -> _Head:
    pooled = np.concatenate([visual, text])
    basis = bases.get(place)
    if basis is None or basis.components.shape[1] != pooled.shape[1]:
        pca = PCA(min(COMPONENTS, *pooled.shape), random_state=0).fit(pooled)
        basis = Basis(pca.components_, pca.explained_variance_ratio_)
        bases.setdefault(place, basis)
    mmd, p_value = mmd_test(visual, text, rng)
    mmd_halves, js_halves = [], []
    for points in (visual, text):
        for _ in range(HALVES):
            order = rng.permutation(len(points))
            first, second = points[order[: len(points) // 2]], points[order[len(points) // 2 :]]
            labels = np.arange(len(points)) < len(first)
            mmd_halves.append(unbiased_mmd(kernel(first, second), labels[None])[0])
            js_halves.append(js_divergence(first @ basis.components.T, second @ basis.components.T, basis.weights))
    return _Head(
        mmd=mmd,
        p_value=p_value,
        js=js_divergence(visual @ basis.components.T, text @ basis.components.T, basis.weights),
        mmd_baseline=float(np.mean(mmd_halves)),
        js_baseline=float(np.mean(js_halves)),
        probe=linear_probe(pooled, np.arange(len(pooled)) < len(visual), samples),
    )


def linear_probe(points: np.ndarray, is_visual: np.ndarray, samples: np.ndarray) -> float:
    """Cross-validated accuracy of telling the modalities apart; a sample's tokens stay together. NaN for one."""
    folds = min(5, len(np.unique(samples)))
    if folds < 2:
        return float("nan")
    scores = cross_val_score(
        LogisticRegression(max_iter=1000), points, is_visual, groups=samples, cv=GroupKFold(folds)
    )
    return float(scores.mean())


def project(records: Sequence[Record], layer: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """t-SNE of a layer's keys, all heads side by side, for a picture only: distances in it mean nothing.

    Returns:
        Visual and text tokens, `(n, 2)` each.
    """
    visual, text, *_ = balanced_keys(records, layer, np.random.default_rng(seed))
    pooled = _scaled(np.concatenate([visual, text]).reshape(2 * len(visual), -1))
    reduced = PCA(min(50, *pooled.shape), random_state=seed).fit_transform(pooled)
    placed = TSNE(perplexity=min(30, len(pooled) / 4), random_state=seed).fit_transform(reduced)
    return placed[: len(visual)], placed[len(visual) :]
