"""Distances between visual and text tokens in key space, before rotary embedding, and in value space.

Rotary embedding separates keys of the same distribution at different positions. The measures are those that MaLoRA's
abstract names (arXiv 2510.26721); what it leaves open is chosen here and stated in `DEFINITIONS`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from diagnostics.distances import (
    BINS,
    HALVES,
    PERMUTATIONS,
    Splits,
    js_divergence,
    kernel,
    linear_probe,
    make_splits,
    unbiased_mmd,
)
from diagnostics.parts import DiagnosticsError
from diagnostics.probe import Record
from diagnostics.results import ByLayer, Curve, Modalities, Space
from diagnostics.statistics import by_layer, by_picture, jackknife
from diagnostics.tokens import Tokens


MAX_TOKENS = 256
COMPONENTS = 10
DEFINITIONS = {
    "tokens": "keys before rotary embedding, and values as attention gets them, per head, standardised over both "
    f"modalities together; equally many of each modality from each picture, about {MAX_TOKENS} in all, sampled with a "
    "seed per picture that is the same for every model; medians over heads",
    "mmd": "squared maximum mean discrepancy, kernel mean_j exp(-‖x-y‖²/(s_j σ²)), s = ¼, ½, 1, 2, 4, σ² the "
    "mean squared distance over both sets; over pairs of tokens of different pictures, so that it is about 0 for "
    "equal distributions, and can be negative. The text tokens are those of the question. Interval: jackknife",
    "p_value": "permutation test: share of swaps of the modalities of whole pictures that give at least the observed "
    f"MMD²: all swaps, or {PERMUTATIONS} random ones and the observed one. Not given if pictures share a question, "
    "since their texts are then not independent samples",
    "js": f"Jensen-Shannon divergence in bits between histograms of {BINS} shared bins, on each of at most "
    f"{COMPONENTS} principal components, weighted by explained variance. Biased upwards: compare with its baseline. "
    "Each model has its own components, so two models share no axis; checkpoints use the first one's",
    "baseline": "95% quantile of the same over random splits of the pictures into halves, within one modality "
    f"({HALVES} splits of each); halves have half as many tokens, which raises js",
    "probe": "accuracy of a logistic regression that tells visual from text tokens, cross-validated with each picture "
    "in one fold; 0.5 is chance",
    "norm": "mean L2 norm of a head's keys or values, before they are standardised",
    "spread": "root mean squared distance of a head's keys or values from the mean of their modality, before they are "
    "standardised",
}


class Basis(NamedTuple):
    """Principal components of one head, `(num_components, head_dim)`, and their shares of the variance."""

    components: np.ndarray
    weights: np.ndarray


# By layer and head.
Bases = dict[tuple[int, int], Basis]


class Points(NamedTuple):
    """Keys or values of one layer: `(n, num_heads, head_dim)` for each modality, the picture number of each row of
    both, `(n,)`, and the number of pictures, some of which may have no row."""

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


def draw_positions(tokens: Tokens, picture: str, turn: int, count: int) -> torch.Tensor:
    """Random positions of at most `count` visual and `count` text tokens, seeded by the picture, so the same for every
    model; each `turn` of the same picture gives other visual tokens.

    Args:
        tokens: Of the sample.
        picture: Fingerprint of its pictures.
        turn: How many earlier samples had the same picture.
        count: How many of each.
    """
    generator = torch.Generator().manual_seed(int(picture, 16) % 2**63)
    visual, text = (mask.nonzero()[:, 0] for mask in (tokens.visual, tokens.text))
    drawn = torch.randperm(len(visual), generator=generator)[turn * count : (turn + 1) * count]
    return torch.cat([visual[drawn], text[torch.randperm(len(text), generator=generator)[:count]]]).sort().values


def take_points(kept: Sequence[torch.Tensor], records: Sequence[Record], pictures: np.ndarray) -> Points:
    """Equally many tokens of both modalities of each picture.

    Args:
        kept: For each sample, `(num_heads, num_kept, head_dim)` at the `key_positions` of its record.
        records: One for each sample.
        pictures: Number of each sample's picture.
    """
    found: dict[str, list[np.ndarray]] = {"visual": [], "text": []}
    numbers: list[int] = []
    for picture in np.unique(pictures):
        of_picture = {modality: _tokens_of(kept, records, pictures == picture, modality) for modality in found}
        count = min(len(tokens) for tokens in of_picture.values())  # 0 where all of a modality are sinks
        numbers += [int(picture)] * count
        for modality, tokens in of_picture.items():
            found[modality].append(tokens[np.linspace(0, len(tokens) - 1, count).round().astype(int)])
    visual, text = (np.concatenate(tokens) for tokens in found.values())
    return Points(visual, text, np.array(numbers, dtype=int), int(pictures.max()) + 1)


def _tokens_of(
    kept: Sequence[torch.Tensor], records: Sequence[Record], chosen: np.ndarray, modality: str
) -> np.ndarray:
    """The kept tokens of one modality of the chosen samples, `(n, num_heads, head_dim)`."""
    tokens = [
        keys[:, getattr(record.tokens, modality)[record.key_positions]]
        for keys, record, is_chosen in zip(kept, records, chosen, strict=True)
        if is_chosen
    ]
    return torch.cat(tokens, dim=1).transpose(0, 1).numpy()


class _Medians(NamedTuple):
    """Medians over heads: observed, with each picture left out `(num_pictures,)`, 95% quantile over halves (NaN
    without any), and with pictures' modalities exchanged, `(num_ways,)`."""

    observed: float
    without: np.ndarray
    halves: float
    exchanged: np.ndarray


def _medians(heads: Sequence[Sequence[np.ndarray]]) -> _Medians:
    """Medians of a measure's values for each head and each of the [`Splits`]."""
    observed, without, exchanged, halves = (np.median(of_heads, axis=0) for of_heads in zip(*heads, strict=True))
    return _Medians(
        float(observed[0]), without, float(np.quantile(halves, 0.95)) if len(halves) else float("nan"), exchanged
    )


class _Layer(NamedTuple):
    """Measures of one layer.

    Attributes:
        mmd, js: MMD² and Jensen-Shannon divergence.
        mmd_by_head: MMD² of each head, `(num_heads,)`.
        probe: The probe's accuracy, median over heads.
        norms, squares: Norm, and squared distance from the mean, of visual and of text tokens,
            `(2, num_pictures)`.
    """

    mmd: _Medians
    js: _Medians
    mmd_by_head: list[float]
    probe: float
    norms: np.ndarray
    squares: np.ndarray


def _measure_layer(points: Points, splits: Splits, layer: int, bases: Bases) -> _Layer:
    scaled, groups, count = points.scaled, points.groups, points.num_pictures
    mmd, js, probe = [], [], []
    for head in range(scaled.shape[1]):
        of_head = scaled[:, head]
        basis, matrix = _basis(of_head, bases, (layer, head)), kernel(of_head)
        mmd.append([unbiased_mmd(matrix, groups, np.arange(2 * count) % count, split) for split in splits])
        placed, sets = of_head @ basis.components.T, splits._replace(exchanged=splits.observed)
        js.append([js_divergence(placed, basis.weights, groups, split) for split in sets])
        probe.append(linear_probe(of_head, groups, count))
    tokens = np.stack([points.visual, points.text])  # [2, n, num_heads, head_dim]
    centred = tokens - tokens.mean(axis=1, keepdims=True)
    return _Layer(
        mmd=_medians(mmd),
        js=_medians(js),
        mmd_by_head=[float(observed[0]) for observed, *_ in mmd],
        probe=float(np.median(probe)),
        norms=_by_picture(np.linalg.norm(tokens, axis=-1), points),
        squares=_by_picture((centred**2).sum(axis=-1), points),
    )


def _by_picture(values: np.ndarray, points: Points) -> np.ndarray:
    """Mean over heads and over the tokens of each picture, `(2, num_pictures)`, of `(2, n, num_heads)`; NaN for a
    picture without tokens."""
    means = np.full((2, points.num_pictures), np.nan)
    means[:, np.unique(points.pictures)] = [by_picture(of.mean(axis=1), points.pictures) for of in values]
    return means


def _basis(points: np.ndarray, bases: Bases, place: tuple[int, int]) -> Basis:
    """The first model's components at this layer and head."""
    if place not in bases:
        pca = PCA(min(COMPONENTS, *points.shape), random_state=0).fit(points)
        bases[place] = Basis(pca.components_, pca.explained_variance_ratio_)
    if bases[place].components.shape[1] != points.shape[1]:
        raise DiagnosticsError(
            f"Heads of width {points.shape[1]} can't share the components of heads of width "
            f"{bases[place].components.shape[1]}: these are not checkpoints of one model, use --compare models."
        )
    return bases[place]


def measure_space(
    kept: Sequence[dict[int, torch.Tensor]],
    records: Sequence[Record],
    pictures: np.ndarray,
    bases: Bases,
    seed: int = 0,
) -> Space | None:
    """The numbers of `DEFINITIONS` by layer; `None` if nothing was recorded, or if fewer than 8 tokens of each
    modality, or those of a single picture, are left to compare.

    Args:
        kept: For each sample by layer its keys or values, `(num_heads, num_kept, head_dim)`.
        records: One for each sample.
        pictures: Number of each sample's picture.
        bases: Principal components by layer and head; missing ones are added.
        seed: Of swaps and halves.

    Raises:
        DiagnosticsError: if the components are of another width.
    """
    layers = sorted(set.intersection(*(set(sample) for sample in kept)))
    points = [take_points([sample[layer] for sample in kept], records, pictures) for layer in layers]
    num_pictures = len(np.unique(pictures))
    if not points or len(points[0].pictures) < 8 or len(np.unique(points[0].pictures)) < 2:
        return None
    splits = make_splits(num_pictures, np.random.default_rng(seed))
    measured = [_measure_layer(of, splits, layer, bases) for of, layer in zip(points, layers, strict=True)]
    without = np.stack([layer.mmd.without for layer in measured], axis=1)
    squares = np.stack([layer.squares for layer in measured], axis=-1)  # [2, num_pictures, num_layers]
    return Space(
        layers=layers,
        num_tokens=len(points[0].pictures),
        mmd=jackknife(np.array([layer.mmd.observed for layer in measured]), without),
        mmd_baseline=[layer.mmd.halves for layer in measured],
        p_value=[_p_value(layer.mmd) for layer in measured] if _words_differ(records, pictures) else None,
        smallest_p=1 / len(splits.exchanged[0]),
        mmd_by_head=[layer.mmd_by_head for layer in measured],
        js=_without_intervals([layer.js.observed for layer in measured]),
        js_baseline=[layer.js.halves for layer in measured],
        probe=_without_intervals([layer.probe for layer in measured]),
        norm=Modalities(*(by_layer(of) for of in np.stack([layer.norms for layer in measured], axis=-1))),
        spread=Modalities(*(_root_mean(of) for of in squares)),
    )


def _without_intervals(values: list[float]) -> Curve:
    return Curve(values, [None] * len(values))


def _words_differ(records: Sequence[Record], pictures: np.ndarray) -> bool:
    """Whether no two pictures share a question: otherwise their texts are not independent samples."""
    asked: dict[tuple[int, ...], int] = {}
    words = [tuple(record.input_ids[record.tokens.text].tolist()) for record in records]
    return all(asked.setdefault(of, picture) == picture for of, picture in zip(words, pictures, strict=True))


def _p_value(mmd: _Medians) -> float:
    """Share of swaps whose median is at least the observed one; the tolerance is for rounding errors."""
    return float((mmd.exchanged >= mmd.observed - 1e-9).mean())


def _root_mean(squares: np.ndarray) -> ByLayer:
    """Root of the mean over pictures, of `(num_pictures, num_layers)`; NaN for a picture without tokens."""
    squares = squares[~np.isnan(squares).any(axis=1)]
    total = squares.sum(axis=0)
    return jackknife(np.sqrt(total / len(squares)), np.sqrt(np.maximum(total - squares, 0) / max(len(squares) - 1, 1)))


def project(
    records: Sequence[Record], pictures: np.ndarray, layer: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """t-SNE of a layer's keys, all heads concatenated, for plotting only: distances in it mean nothing.

    Returns:
        Visual and text tokens, `(n, 2)` each.
    """
    points = take_points([record.keys[layer] for record in records], records, pictures)
    count = len(points.visual)
    scaled = points.scaled.reshape(2 * count, -1)
    reduced = PCA(min(50, *scaled.shape), random_state=seed).fit_transform(scaled)
    placed = TSNE(perplexity=min(30, 2 * count / 4), random_state=seed).fit_transform(reduced)
    return placed[:count], placed[count:]
