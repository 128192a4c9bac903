"""The report's plots, models side by side; and those that follow a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from diagnostics.attention import attention_curves
from diagnostics.loading import Question
from diagnostics.measure import Pictures


COLOURS = {"visual": "tab:orange", "text": "tab:blue"}
WIDTH = 3.4  # inches of one model's column


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _columns(rows: int, models: Sequence[dict[str, Any]], height: float = 2.6) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(
        rows,
        len(models),
        figsize=(max(WIDTH * len(models), 5), height * rows),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(model["name"], fontsize=9, wrap=True, parse_math=False)
    for axis in axes.flat:  # layers have no halves
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def draw_curve(axis: Axes, x: Sequence[float], curve: dict[str, Any], **style: Any) -> None:
    """Means with their intervals as a band."""
    axis.plot(x, curve["mean"], marker="o", markersize=3, **style)
    if curve["interval"][0] is not None:
        low, high = zip(*curve["interval"], strict=True)
        axis.fill_between(x, low, high, alpha=0.2, color=style.get("color"), linewidth=0)


def draw_layers(models: Sequence[dict[str, Any]], path: Path) -> None:
    """Norm and cosine by layer and modality (Fig. 1b, 3 and 4)."""
    figure, axes = _columns(2, models)
    for column, model in enumerate(models):
        layers = model["layers"]
        for modality, colour in COLOURS.items():
            curves = layers[modality]
            draw_curve(axes[0, column], range(model["num_layers"] + 1), curves["norm"], color=colour, label=modality)
            draw_curve(axes[1, column], range(model["num_layers"]), curves["cosine"], color=colour)
        axes[0, column].set(yscale="log", xlabel="enters layer")
        axes[1, column].set(xlabel="layer")
    axes[0, 0].set_ylabel("norm of tokens")
    axes[1, 0].set_ylabel("cosine, before to after\n(1: does not turn)")
    axes[0, 0].legend()
    _save(figure, path)


def draw_attention(models: Sequence[dict[str, Any]], path: Path) -> None:
    """Attention mass on the picture, its entropy, and the share of the bottom third, by layer."""
    figure, axes = _columns(3, models, 2.2)
    for column, model in enumerate(models):
        attention = model["attention"]
        if attention is None:
            axes[0, column].text(0.5, 0.5, "not recorded", ha="center", transform=axes[0, column].transAxes)
            continue
        for title, curves in attention_curves(attention).items():
            colour = "grey" if title.endswith("evenly spread") else "tab:green"
            line = "--" if title.startswith("without") else "-"
            for row, name in enumerate(("mass", "entropy", "bottom_third")):
                if name in curves:
                    style = {"color": colour, "linestyle": line, "label": title}
                    draw_curve(axes[row, column], attention["layers"], curves[name], **style)
        axes[2, column].set_xlabel("layer")
    entries = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=7)
    for row, label in enumerate(("mass on the picture", "entropy in the picture", "share of bottom third")):
        axes[row, 0].set_ylabel(label)
    _save(figure, path)


def draw_maps(
    models: Sequence[dict[str, Any]], pictures: Sequence[Pictures], questions: Sequence[Question], path: Path
) -> None:
    """One query's attention over the first pictures, as the model sees them, if their layout is known; a row for each
    picture and model."""
    rows = [
        (model["name"], number, drawn.seen[number], maps)
        for number in range(len(pictures[0].maps))
        for model, drawn in zip(models, pictures, strict=True)
        if (maps := drawn.maps[number])
    ]
    if not rows:
        return
    columns = 1 + max(len(maps) for *_, maps in rows)
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(1.7 * columns, 1.95 * len(rows)), squeeze=False, layout="constrained"
    )
    for row, (name, number, image, maps) in enumerate(rows):
        texts = [part["text"] for part in questions[number].prompt[-1]["content"] if part["type"] == "text"]
        axes[row, 0].imshow(image)
        axes[row, 0].set_title(" ".join(texts)[:40], fontsize=7, parse_math=False)
        axes[row, 0].set_ylabel(name, fontsize=7, parse_math=False)
        for axis, (layer, values) in zip(axes[row, 1:], maps.items(), strict=False):
            axis.imshow(image.convert("L"), cmap="gray", alpha=0.6)
            extent = (-0.5, image.width - 0.5, image.height - 0.5, -0.5)
            axis.imshow(values.numpy(), extent=extent, alpha=0.6, cmap="inferno", vmin=0)
            axis.set_title(f"layer {layer}: {values.sum():.0%}", fontsize=7)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    _save(figure, path)


def draw_keys(models: Sequence[dict[str, Any]], pictures: Sequence[Pictures], path: Path) -> None:
    """MMD² by layer with the baseline within a modality, and a t-SNE of one layer."""
    figure, axes = _columns(2, models, 3)
    for column, (model, drawn) in enumerate(zip(models, pictures, strict=True)):
        keys = model["key_space"]
        if keys is None or drawn.keys is None:
            axes[0, column].text(0.5, 0.5, "not recorded", ha="center", transform=axes[0, column].transAxes)
            continue
        axes[0, column].plot(keys["layers"], keys["mmd"], marker="o", color="tab:purple", label="visual to text")
        axes[0, column].plot(
            keys["layers"],
            keys["mmd_baseline"],
            marker="o",
            color="grey",
            linestyle=":",
            label="halves of one modality",
        )
        axes[0, column].set_xlabel("layer")
        layer, *placed = drawn.keys
        for (modality, colour), points in zip(COLOURS.items(), placed, strict=True):
            axes[1, column].scatter(*points.T, s=5, color=colour, label=modality)
        axes[1, column].set(xticks=[], yticks=[], xlabel=f"layer {layer}")
        axes[0, column].legend(fontsize=7)
        axes[1, column].legend(fontsize=7)
    axes[0, 0].set_ylabel("MMD² of keys")
    axes[1, 0].set_ylabel("t-SNE (a picture only)")
    _save(figure, path)


def draw_dynamics(points: Sequence[dict[str, Any]], path: Path) -> None:
    """A run's checkpoints: norms at the decoder, what the gain yields, update rates, and cosine by layer (Fig. 5)."""
    steps = [point["step"] for point in points]
    figure, axes = plt.subplots(1, 4, figsize=(14, 3), layout="constrained")
    for modality, colour in COLOURS.items():
        norms = [point["interface"][f"{modality}_at_decoder"] for point in points]
        curve = {"mean": [n["mean"] for n in norms], "interval": [n["interval"] for n in norms]}
        draw_curve(axes[0], steps, curve, color=colour, label=modality)
        rates = [point["layers"][modality]["update_rate"] for point in points]
        curve = {"mean": [r["mean"] for r in rates], "interval": [r["interval"] for r in rates]}
        draw_curve(axes[1], steps, curve, color=colour)
    if points[0]["projector_norm"] is not None:
        yields = [point["projector_norm"]["yields"] for point in points]
        axes[0].plot(steps, yields, color="grey", linestyle=":", label="that gain and bias yield")
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(points)))
    for axis, modality in zip(axes[2:], COLOURS, strict=True):
        for point, shade in zip(points, shades, strict=True):
            cosines = point["layers"][modality]["cosine"]["mean"]
            axis.plot(
                range(len(cosines)), cosines, marker="o", markersize=3, color=shade, label=f"step {point['step']}"
            )
        axis.set(xlabel="layer", title=f"cosine by layer, {modality}")
        axis.sharey(axes[2])
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set(xlabel="step", title="norm at the decoder", yscale="log")
    axes[1].set(xlabel="step", title="update rate, 1 - cosine")
    axes[0].legend(fontsize=7)
    axes[3].legend(fontsize=7)
    _save(figure, path)
