"""The report's plots, models side by side; and those that follow a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from diagnostics.loading import Question
from diagnostics.pictures import Pictures
from diagnostics.results import Attention, Curve, DynamicsPoint, KeySpace, Layers


MODALITY_COLOURS = {"visual": "tab:orange", "text": "tab:blue"}
WIDTH = 3.4  # inches of one model's column


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _columns(rows: int, names: Sequence[str], height: float = 2.6) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(
        rows,
        len(names),
        figsize=(max(WIDTH * len(names), 5), height * rows),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, fontsize=9, wrap=True, parse_math=False)
    for axis in axes.flat:  # layers have no halves
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def draw_curve(axis: Axes, x: Sequence[float], curve: Curve, **style: Any) -> None:
    """Means with their intervals as a band."""
    axis.plot(x, curve.mean, marker="o", markersize=3, **style)
    intervals = [interval for interval in curve.interval if interval is not None]
    if len(intervals) == len(curve.mean):
        low, high = zip(*intervals, strict=True)
        axis.fill_between(x, low, high, alpha=0.2, color=style.get("color"), linewidth=0)


def draw_layers(names: Sequence[str], models: Sequence[Layers], path: Path) -> None:
    """Norm and cosine by layer and modality (Fig. 1b, 3 and 4), a column for each model."""
    figure, axes = _columns(2, names)
    for column, layers in enumerate(models):
        for modality, colour in MODALITY_COLOURS.items():
            turning = layers.of(modality)
            draw_curve(axes[0, column], range(len(turning.norm.mean)), turning.norm, color=colour, label=modality)
            draw_curve(axes[1, column], range(len(turning.cosine.mean)), turning.cosine, color=colour)
        axes[0, column].set(yscale="log", xlabel="enters layer")
        axes[1, column].set(xlabel="layer")
    axes[0, 0].set_ylabel("norm of tokens")
    axes[1, 0].set_ylabel("cosine, before to after\n(1: does not turn)")
    axes[0, 0].legend()
    _save(figure, path)


def draw_attention(names: Sequence[str], models: Sequence[Attention | None], path: Path) -> None:
    """Attention mass on the picture, its entropy, and the share of the bottom third, by layer."""
    figure, axes = _columns(3, names, 2.2)
    for column, attention in enumerate(models):
        if attention is None:
            _say_not_recorded(axes[0, column])
            continue
        for title, gaze in attention.gazes.items():
            style = {
                "color": "grey" if title.endswith("evenly spread") else "tab:green",
                "linestyle": "--" if title.startswith("without") else "-",
            }
            for row, curve in enumerate((gaze.mass, gaze.entropy, gaze.bottom_third)):
                if curve is not None:
                    draw_curve(axes[row, column], attention.layers, curve, label=title, **style)
        axes[2, column].set_xlabel("layer")
    entries = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=7)
    for row, label in enumerate(("mass on the picture", "entropy in the picture", "share of bottom third")):
        axes[row, 0].set_ylabel(label)
    _save(figure, path)


def _say_not_recorded(axis: Axes) -> None:
    axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes)


def draw_maps(names: Sequence[str], pictures: Sequence[Pictures], questions: Sequence[Question], path: Path) -> None:
    """One query's attention over the first pictures, as the model sees them, if their layout is known; a row for each
    picture and model."""
    rows = [
        (name, number, drawn.seen[number], maps)
        for number in range(len(pictures[0].maps))
        for name, drawn in zip(names, pictures, strict=True)
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


def draw_keys(
    names: Sequence[str], models: Sequence[KeySpace | None], pictures: Sequence[Pictures], path: Path
) -> None:
    """MMD² by layer with the baseline within a modality, and a t-SNE of one layer."""
    figure, axes = _columns(2, names, 3)
    for column, (keys, drawn) in enumerate(zip(models, pictures, strict=True)):
        if keys is None or drawn.keys is None:
            _say_not_recorded(axes[0, column])
            continue
        for values, style in (
            (keys.mmd, {"color": "tab:purple", "label": "visual to text"}),
            (keys.mmd_baseline, {"color": "grey", "linestyle": ":", "label": "halves of one modality"}),
        ):
            axes[0, column].plot(keys.layers, values, marker="o", **style)
        axes[0, column].set_xlabel("layer")
        layer, *placed = drawn.keys
        for (modality, colour), points in zip(MODALITY_COLOURS.items(), placed, strict=True):
            axes[1, column].scatter(*points.T, s=5, color=colour, label=modality)
        axes[1, column].set(xticks=[], yticks=[], xlabel=f"layer {layer}")
        axes[0, column].legend(fontsize=7)
        axes[1, column].legend(fontsize=7)
    axes[0, 0].set_ylabel("MMD² of keys")
    axes[1, 0].set_ylabel("t-SNE (a picture only)")
    _save(figure, path)


def draw_dynamics(points: Sequence[DynamicsPoint], path: Path) -> None:
    """A run's checkpoints: norms at the decoder, what the gain yields, update rates, and cosine by layer (Fig. 5)."""
    steps = [point.step for point in points]
    figure, axes = plt.subplots(1, 4, figsize=(14, 3), layout="constrained")
    for modality, colour in MODALITY_COLOURS.items():
        norms = Curve.through([point.interface.at_decoder(modality) for point in points])
        draw_curve(axes[0], steps, norms, color=colour, label=modality)
        rates = Curve.through([point.layers.of(modality).update_rate for point in points])
        draw_curve(axes[1], steps, rates, color=colour)
    yields = [point.projector_norm.yields for point in points if point.projector_norm is not None]
    if len(yields) == len(points):
        axes[0].plot(steps, yields, color="grey", linestyle=":", label="that gain and bias yield")
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(points)))
    for axis, modality in zip(axes[2:], MODALITY_COLOURS, strict=True):
        for point, shade in zip(points, shades, strict=True):
            cosines = point.layers.of(modality).cosine.mean
            style = {"color": shade, "label": f"step {point.step}"}
            axis.plot(range(len(cosines)), cosines, marker="o", markersize=3, **style)
        axis.set(xlabel="layer", title=f"cosine by layer, {modality}")
        axis.sharey(axes[2])
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set(xlabel="step", title="norm at the decoder", yscale="log")
    axes[1].set(xlabel="step", title="update rate, 1 - cosine")
    axes[0].legend(fontsize=7)
    axes[3].legend(fontsize=7)
    _save(figure, path)
