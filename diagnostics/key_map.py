"""Draws the keys of image and text tokens on a plane, by t-SNE, next to their Jensen-Shannon divergence by layer.

MaLoRA (arXiv 2510.26721) has such a figure. Its abstract does not say which layers and heads the figure shows. Here
the keys of all heads of a layer are joined to one vector, standardized, and reduced by PCA.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from diagnostics.keys import take_points
from diagnostics.plots import DOTTED, MODALITY_COLOURS, MODEL_STYLES, WIDTH, draw_curve, styled
from diagnostics.probe import Record
from diagnostics.table import Summary


# Largest number of layers that are drawn: the first, the middle and the last layer whose keys are measured.
MAX_LAYERS = 3
COMPONENTS = 50
PERPLEXITY = 30.0
SEED = 0
LABELS = {"visual": "image", "text": "text"}
MARKERS = {"visual": "o", "text": "^"}


def place_keys(records: Sequence[Record], measured: pd.DataFrame) -> pd.DataFrame:
    """Places of image and text tokens on a plane, by t-SNE of their keys. Distances on the plane mean nothing.

    Args:
        records: The record of each picture.
        measured: The rows of the records' measures. A layer without a row of `keys.jsd` has too few keys to place.

    Returns:
        A row for each token of at most `MAX_LAYERS` layers, with columns `layer`, `modality`, `x` and `y`.
    """
    layers = measured.loc[measured["measure"] == "keys.jsd", "layer"].dropna().astype(int).tolist()
    if not layers:
        return pd.DataFrame(columns=["layer", "modality", "x", "y"])

    tables = []
    num_drawn = min(MAX_LAYERS, len(layers))
    for index in np.linspace(0, len(layers) - 1, num_drawn).round().astype(int):
        layer = layers[index]
        points = take_points("keys", layer, records)
        # `points.scaled` has all image tokens first, and then as many text tokens.
        num_per_modality = len(points.pictures)
        modalities = ["visual"] * num_per_modality + ["text"] * num_per_modality
        vectors = points.scaled.reshape(len(modalities), -1)  # [2n, num_heads * head_dim]
        places = project(vectors)
        tables.append(pd.DataFrame({"layer": layer, "modality": modalities, "x": places[:, 0], "y": places[:, 1]}))

    return pd.concat(tables, ignore_index=True)


def project(vectors: np.ndarray) -> np.ndarray:
    """Places of vectors `(n, size)` on a plane by t-SNE, `(n, 2)`; the same vectors always get the same places."""
    reduced = PCA(min(COMPONENTS, *vectors.shape), random_state=SEED).fit_transform(vectors)
    perplexity = min(PERPLEXITY, len(vectors) / 4)  # t-SNE needs a perplexity below the number of vectors
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(reduced)


@styled
def draw_key_map(models: Mapping[str, Summary], placed: pd.DataFrame) -> Figure:
    """A row for each model: the divergence by layer with its floor, and the keys of up to three layers.

    Args:
        models: Summaries by name of the models in `placed`.
        placed: What `place_keys` returns for each model, with a column `model`.
    """
    # A column for the divergence, and one for each drawn layer.
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
        tokens_by_layer = placed[placed["model"] == name].groupby("layer")
        for axis, (layer, tokens) in zip(row[1:], tokens_by_layer, strict=False):
            _draw_tokens(axis, tokens)
            axis.set_xlabel(f"keys of layer {layer}")
        # If another model has more layers in its row, this row's last axes stay empty.
        for axis in row[1 + len(tokens_by_layer) :]:
            axis.axis("off")

    curve_labels = axes[-1, 0].get_legend_handles_labels()
    token_labels = axes[-1, 1].get_legend_handles_labels()
    figure.legend(*curve_labels, loc="outside lower left", ncols=2)
    figure.legend(*token_labels, loc="outside lower right", ncols=2, markerscale=2, handletextpad=0)
    return figure


def _draw_divergence(axis: plt.Axes, summary: Summary) -> None:
    for space, style in zip(("keys", "values"), MODEL_STYLES, strict=False):
        draw_curve(axis, summary.curve(f"{space}.jsd"), label=space, **style)
        draw_curve(axis, summary.curve(f"{space}.jsd_halves"), color=style["color"], **DOTTED)
    axis.set(ylabel="divergence, bits", xlabel="layer", ylim=(0, 1))
    axis.margins(x=0.02)


def _draw_tokens(axis: plt.Axes, tokens: pd.DataFrame) -> None:
    for modality, places in tokens.groupby("modality", sort=False):
        axis.scatter(
            places["x"],
            places["y"],
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
