"""Draws keys of image and text tokens on a plane, by t-SNE, next to curves of the divergence between them.

The divergence is the Jensen-Shannon divergence of [`~normllava.diagnostics.divergence`].

MaLoRA (arXiv 2510.26721) has such a figure, but the abstract does not say which layers and heads the figure shows.
Here a few layers are drawn. A token's keys of all heads are joined to one vector, and the vectors are reduced by PCA
before t-SNE places them.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

from normllava.diagnostics.keys import take_points
from normllava.diagnostics.plots import (
    DOTTED,
    MAX_TITLE_CHARACTERS,
    MODALITY_COLOURS,
    MODEL_STYLES,
    WIDTH,
    draw_curve,
    styled,
)
from normllava.diagnostics.probe import Record
from normllava.diagnostics.table import Summary


# Largest number of layers that are drawn. These are the first, the middle and the last layer whose keys are measured.
MAX_LAYERS = 3
# Largest number of principal components that t-SNE gets.
COMPONENTS = 50
# About how many neighbours of a token t-SNE keeps near the token; 30 is scikit-learn's default.
PERPLEXITY = 30.0
# Seed of PCA and of t-SNE.
SEED = 0
# How the tokens of each modality are drawn.
MARKERS = {"image": "o", "text": "^"}


def place_keys(records: Sequence[Record], measured: pd.DataFrame) -> pd.DataFrame:
    """Places of image and text tokens on a plane, by t-SNE of their keys. Distances on the plane mean nothing.

    Args:
        records: The record of each picture.
        measured: Rows of all measures of the records. A layer without a row of `keys.jsd` has too few keys to place.

    Returns:
        A row for each token in each of at most `MAX_LAYERS` layers, with columns `layer`, `modality`, `x` and `y`.
    """
    # A layer with enough keys has one row of `keys.jsd`. The row of the mean over layers has no layer.
    rows_of_divergence = measured[measured["measure"] == "keys.jsd"]
    layers = sorted(rows_of_divergence["layer"].dropna().astype(int))
    if not layers:
        return pd.DataFrame(columns=["layer", "modality", "x", "y"])

    num_drawn = min(MAX_LAYERS, len(layers))
    drawn_indices = np.linspace(0, len(layers) - 1, num_drawn).round().astype(int)
    drawn_layers = [layers[index] for index in drawn_indices]
    tables = [place_layer(records, layer) for layer in drawn_layers]
    return pd.concat(tables, ignore_index=True)


def place_layer(records: Sequence[Record], layer: int) -> pd.DataFrame:
    """What [`place_keys`] returns for one layer."""
    points = take_points("keys", layer, records)
    # `points.scaled` has all image tokens first, and then as many text tokens. `points.pictures` has an entry for each
    # image token.
    num_per_modality = len(points.pictures)
    modalities = ["image"] * num_per_modality + ["text"] * num_per_modality

    vectors = points.scaled.reshape(len(modalities), -1)  # [num_tokens, num_heads * head_dim]
    places = project_to_plane(vectors)
    return pd.DataFrame({"layer": layer, "modality": modalities, "x": places[:, 0], "y": places[:, 1]})


def project_to_plane(vectors: np.ndarray) -> np.ndarray:
    """Places of vectors on a plane by t-SNE, `(num_vectors, 2)`. The same vectors always get the same places.

    Args:
        vectors: `(num_vectors, size)`.
    """
    num_components = min(COMPONENTS, *vectors.shape)  # PCA has at most as many as there are vectors, or coordinates
    reduced = PCA(num_components, random_state=SEED).fit_transform(vectors)
    # t-SNE needs a perplexity below the number of vectors. A quarter of this number is small enough.
    perplexity = min(PERPLEXITY, len(vectors) / 4)
    return TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(reduced)


@styled
def draw_key_map(models: Mapping[str, Summary], placed: pd.DataFrame) -> Figure:
    """Draw a row for each model: the divergence by layer, and the keys of up to three layers.

    Args:
        models: The summary of each model in `placed`, by the model's name.
        placed: What [`place_keys`] returns for each model, with a column `model`.
    """
    num_layers_by_model = placed.groupby("model")["layer"].nunique()
    max_layers = int(num_layers_by_model.max())
    figure, axes = plt.subplots(
        len(models),
        1 + max_layers,  # a column for the divergence, and one for each layer
        figsize=(WIDTH, 0.6 + 1.9 * len(models)),  # in inches: 0.6 for the legends, 1.9 for each row
        width_ratios=[1.15] + [1] * max_layers,  # only the first column has ticks and a vertical label
        squeeze=False,
        layout="constrained",
    )

    for row_of_axes, (name, summary) in zip(axes, models.items(), strict=True):
        divergence_axis = row_of_axes[0]
        _draw_divergence(divergence_axis, summary)
        divergence_axis.set_title(name[-MAX_TITLE_CHARACTERS:], loc="left", fontweight="bold")

        tokens_by_layer = placed[placed["model"] == name].groupby("layer")
        layer_axes = row_of_axes[1 : 1 + len(tokens_by_layer)]
        for axis, (layer, tokens) in zip(layer_axes, tokens_by_layer, strict=True):
            _draw_tokens(axis, tokens)
            axis.set_xlabel(f"keys of layer {layer}")

        # Another model may have more layers in its row. Then the last axes of this row stay empty.
        for axis in row_of_axes[1 + len(tokens_by_layer) :]:
            axis.axis("off")

    # The legend's entries, handles and labels, are the same in all rows. They are taken from the last row.
    curve_entries = axes[-1, 0].get_legend_handles_labels()
    token_entries = axes[-1, 1].get_legend_handles_labels()
    figure.legend(*curve_entries, loc="outside lower left", ncols=2)
    figure.legend(*token_entries, loc="outside lower right", ncols=2, markerscale=2, handletextpad=0)
    return figure


def _draw_divergence(axis: plt.Axes, summary: Summary) -> None:
    """Draw the divergence between image and text tokens by layer, for keys and for values.

    Dotted curves show the divergence that two random halves of the pictures have by chance.
    """
    # `MODEL_STYLES` has styles of curves that are easy to tell apart. Here they stand for keys and values.
    for space, style in (("keys", MODEL_STYLES[0]), ("values", MODEL_STYLES[1])):
        draw_curve(axis, summary.curve(f"{space}.jsd"), label=space, **style)
        draw_curve(axis, summary.curve(f"{space}.jsd_halves"), color=style["color"], **DOTTED)
    axis.set(ylabel="divergence, bits", xlabel="layer", ylim=(0, 1))
    axis.margins(x=0.02)


def _draw_tokens(axis: plt.Axes, tokens: pd.DataFrame) -> None:
    """Draw the tokens of one layer at their places, in a frame without ticks."""
    for modality, places in tokens.groupby("modality", sort=False):
        axis.scatter(
            places["x"],
            places["y"],
            s=6,
            color=MODALITY_COLOURS[modality],
            marker=MARKERS[modality],
            linewidth=0,
            alpha=0.7,
            label=modality,
        )
    axis.set(xticks=[], yticks=[])
    for side in ("top", "right"):
        axis.spines[side].set_visible(True)
