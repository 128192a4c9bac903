"""The figures of DEPTH.md: the map of gains, what a trained model is like inside by layer, losses by step."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from depth_plan import ARMS, PAIR, VARIANTS, Record, answerable, size_of, t_interval
from depth_results import Results
from depth_scenes import DIGITS, KINDS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diagnostics.plots import FAINT, MODELS, draw_curve, save, styled
from diagnostics.results import Curve


LINES = dict(zip(PAIR, MODELS, strict=False))
# Label, the curve of a record's `inside`, layer of its first value (0 is the decoder's input), height of a thin line.
PANELS: tuple[tuple[str, Callable[[Record], list[float]], int, float | None], ...] = (
    ("norm of visual tokens", lambda inside: inside["norm"]["visual"], 0, None),
    ("turning of visual tokens", lambda inside: [1 - value for value in inside["cosine"]["visual"]], 1, 0),
    ("turning of text tokens", lambda inside: [1 - value for value in inside["cosine"]["text"]], 1, 0),
    ("attention to the picture", lambda inside: inside["attention"], 1, None),
    ("tokens that read as their digit", lambda inside: inside["decoded"], 0, 1 / len(DIGITS)),
    ("norm of the gradient", lambda inside: inside["gradients"], 1, None),
)
LOGARITHMIC = ("norm of visual tokens", "norm of the gradient")


def draw_figures(results: Results, folder: Path) -> dict[str, Path]:
    """Draw what there is to draw into a folder; the file of each figure by its caption."""
    decoders = sorted((decoder for decoder, variant in results.pairs if variant == "plain"), key=size_of)
    if not decoders:
        return {}
    figures = {
        "GWC less no norm in points, by decoder and kind of question; bold where the 95% interval leaves out 0": (
            "depth_map.png",
            draw_map(results),
        ),
        "Inside the models after stage 2, by layer (0 is what enters the decoder): mean and 95% interval over seeds": (
            "depth_inside.png",
            draw_inside(results, decoders),
        ),
        "Training loss of both stages: mean and 95% interval over seeds": (
            "depth_losses.png",
            draw_losses(results, decoders),
        ),
    }
    for name, figure in figures.values():
        save(figure, folder / name)
    return {caption: folder / name for caption, (name, _) in figures.items()}


def draw_map(results: Results) -> Figure:
    """The gain of each comparison that is done, by kind of question."""
    known = {
        f"{decoder}, {VARIANTS[variant].title}": {
            kind: t_interval(results.gains(decoder, variant, kind).values())
            for kind in ("score", *answerable(results.records, decoder))
        }
        for decoder, variant in sorted(results.pairs, key=lambda pair: (pair[1] != "plain", size_of(pair[0])))
    }
    columns, nothing = ("score", *KINDS), (np.nan,) * 3
    means = np.array([[row.get(kind, nothing)[0] for kind in columns] for row in known.values()])
    widest = float(np.nanmax(np.abs(means)))
    limit = min(max(widest, 1.0), 10.0)  # a few failed runs would leave the rest without colour
    with plt.rc_context({"font.size": 8}):
        figure, axis = plt.subplots(figsize=(8, 1.2 + 0.4 * len(known)), layout="constrained")
        picture = axis.imshow(means, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
        for number, row in enumerate(known.values()):
            for kind, (mean, low, high) in row.items():
                axis.text(
                    columns.index(kind), number, f"{mean:+.1f}", ha="center", va="center",
                    fontweight="bold" if low > 0 or high < 0 else "normal",
                    color="white" if abs(mean) > 0.6 * limit else "black",
                )  # fmt: skip
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(known)), list(known))
        figure.colorbar(picture, label="points", extend="both" if widest > limit else "neither")
    plt.close(figure)
    return figure


@styled
def draw_inside(results: Results, decoders: Sequence[str]) -> Figure:
    """What the records hold by layer, a row for each decoder."""
    figure, axes = make_grid(decoders, len(PANELS), 2.1, "layer")
    for row, decoder in zip(axes, decoders, strict=True):
        for axis, (label, of, first, level) in zip(row, PANELS, strict=True):
            axis.set(title=label, yscale="log" if label in LOGARITHMIC else "linear")
            for arm in PAIR:
                records = results.trained((decoder, arm, "plain"))
                draw_mean(axis, arm, [list(enumerate(of(record["inside"]["stage2"]), first)) for record in records])
            if level is not None:
                axis.axhline(level, color=FAINT, linewidth=0.6, zorder=0)
    add_legend(figure, axes[0, 0])
    return figure


@styled
def draw_losses(results: Results, decoders: Sequence[str]) -> Figure:
    """Loss by step of both stages, a row for each decoder."""
    figure, axes = make_grid(decoders, 2, 3.5, "step")
    for row, decoder in zip(axes, decoders, strict=True):
        for axis, stage in zip(row, ("stage1", "stage2"), strict=True):
            axis.set(title=stage.replace("stage", "stage "), yscale="log")
            for arm in PAIR:
                records = results.trained((decoder, arm, "plain"))
                draw_mean(axis, arm, [record[stage]["curve"] for record in records], marker="")
    add_legend(figure, axes[0, 0])
    return figure


def make_grid(decoders: Sequence[str], columns: int, width: float, x: str) -> tuple[Figure, np.ndarray]:
    """A row of panels for each decoder; `width` in inches of a panel, `x` under the last row."""
    size = (width * columns, 0.5 + 1.8 * len(decoders))
    figure, axes = plt.subplots(len(decoders), columns, figsize=size, squeeze=False, layout="constrained")
    for row, decoder in zip(axes, decoders, strict=True):
        row[0].set_ylabel(decoder, fontweight="bold")
    for axis in axes[-1]:
        axis.set_xlabel(x)
    return figure, axes


def draw_mean(axis: Axes, arm: str, curves: Sequence[Sequence[tuple[int, float]]], **style: str) -> None:
    """Mean of an arm's curves of points (x, y), and its interval."""
    if len(curves) < 2:  # the others diverged
        return
    x = [x for x, _ in curves[0]]
    points = [t_interval([y for _, y in column]) for column in zip(*curves, strict=True)]
    curve = Curve([mean for mean, _, _ in points], [(low, high) for _, low, high in points])
    draw_curve(axis, x, curve, label=ARMS[arm].title, **{**LINES[arm], **style})


def add_legend(figure: Figure, axis: Axes) -> None:
    """The arms, once for all panels."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=len(PAIR))
