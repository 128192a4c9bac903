"""Where the keys of image and text tokens lie: a picture of them by t-SNE, beside their Jensen-Shannon divergence.

It is MaLoRA's picture (arXiv 2510.26721), whose abstract doesn't say which layers and heads it shows, nor t-SNE's
perplexity. Here all heads of a layer are one vector, standardized and reduced by PCA, as that paper does.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from diagnostics.keys import take_points
from diagnostics.plots import DOTTED, MODALITY_COLOURS, MODELS, WIDTH, draw_curve, styled
from diagnostics.probe import Record
from diagnostics.table import Summary


# Layers that are drawn: the first, the middle and the last of those whose keys are measured.
MAX_LAYERS = 3
COMPONENTS = 50
PERPLEXITY = 30.0
SEED = 0
LABELS = {"visual": "image", "text": "text"}
MARKERS = {"visual": "o", "text": "^"}


def place_keys(records: Sequence[Record], measured: pd.DataFrame) -> pd.DataFrame:
    """Places of image and text tokens on a plane by t-SNE of their keys, for drawing: distances in it mean nothing.

    Args:
        records: One for each picture.
        measured: The rows that `measure_space` made of them. Layers without a divergence have too few keys to place.

    Returns:
        A row for each token of at most three layers, with columns `layer`, `modality`, `x` and `y`.
    """
    layers = measured.loc[measured["measure"] == "keys.jsd", "layer"].dropna().astype(int).tolist()
    chosen = np.linspace(0, len(layers) - 1, min(MAX_LAYERS, len(layers))).round().astype(int)

    placed = [pd.DataFrame(columns=["layer", "modality", "x", "y"])]
    for number in chosen:
        layer = layers[number]
        points = take_points("keys", layer, records)
        num_tokens = len(points.pictures)  # of each modality
        plane = project(points.scaled.reshape(2 * num_tokens, -1))
        modality = ["visual"] * num_tokens + ["text"] * num_tokens
        placed.append(pd.DataFrame({"layer": layer, "modality": modality, "x": plane[:, 0], "y": plane[:, 1]}))

    return pd.concat(placed[1:] or placed, ignore_index=True)


def project(vectors: np.ndarray) -> np.ndarray:
    """t-SNE of vectors `(n, size)` on a plane, `(n, 2)`; always the same for the same vectors."""
    reduced = PCA(min(COMPONENTS, *vectors.shape), random_state=SEED).fit_transform(vectors)
    perplexity = min(PERPLEXITY, len(vectors) / 4)  # t-SNE needs less than the number of vectors
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(reduced)


@styled
def draw_key_map(models: Mapping[str, Summary], placed: pd.DataFrame) -> Figure:
    """Divergence by layer with its floor, then the keys of up to three layers; a row for each model.

    Args:
        models: Of every model that has keys, by name.
        placed: What `place_keys` returns for each, with a column `model`.
    """
    num_columns = 1 + placed.groupby("model")["layer"].nunique().max()
    figure, axes = plt.subplots(
        len(models),
        num_columns,
        figsize=(WIDTH, 0.6 + 1.9 * len(models)),
        width_ratios=[1.15, *[1] * (num_columns - 1)],
        squeeze=False,
        layout="constrained",
    )

    for row, (name, summary) in zip(axes, models.items(), strict=True):
        _draw_divergence(row[0], summary)
        row[0].set_title(name[-80:], loc="left", fontweight="bold")
        layers = placed[placed["model"] == name].groupby("layer")
        for axis, (layer, of_layer) in zip(row[1:], layers, strict=False):
            _draw_tokens(axis, of_layer)
            axis.set_xlabel(f"keys of layer {layer}")
        for axis in row[1 + len(layers) :]:
            axis.axis("off")

    curves = axes[-1, 0].get_legend_handles_labels()
    tokens = axes[-1, 1].get_legend_handles_labels()
    figure.legend(*curves, loc="outside lower left", ncols=2)
    figure.legend(*tokens, loc="outside lower right", ncols=2, markerscale=2, handletextpad=0)
    return figure


def _draw_divergence(axis: plt.Axes, summary: Summary) -> None:
    for space, style in zip(("keys", "values"), MODELS, strict=False):
        draw_curve(axis, summary.curve(f"{space}.jsd"), label=space, **style)
        draw_curve(axis, summary.curve(f"{space}.jsd_halves"), color=style["color"], **DOTTED)
    axis.set(ylabel="divergence, bits", xlabel="layer", ylim=(0, 1))
    axis.margins(x=0.02)


def _draw_tokens(axis: plt.Axes, tokens: pd.DataFrame) -> None:
    for modality, of_modality in tokens.groupby("modality", sort=False):
        axis.scatter(
            of_modality["x"],
            of_modality["y"],
            s=6,
            color=MODALITY_COLOURS[modality],
            marker=MARKERS[modality],
            linewidth=0,
            alpha=0.7,
            label=LABELS[modality],
        )
    axis.set(xticks=[], yticks=[])
    for side in ("top", "right"):
        axis.spines[side].set_visible(True)
