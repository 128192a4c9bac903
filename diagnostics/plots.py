"""The report's figures and the training dynamics figure, in one style, as wide as a paper's page."""

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from diagnostics.scaling import CONTROLS, SCALED
from diagnostics.table import Summary


Drawing = ParamSpec("Drawing")

WIDTH = 7.0  # inches, of a page's text
INK, FAINT = "#24292f", "#8c959f"
# Okabe and Ito's colours, which are safe for colour blindness; every line also has its own dash pattern.
MODALITY_COLOURS = {"visual": "#d55e00", "text": "#0072b2"}
GREEN = "#009e73"
DOTTED: dict[str, Any] = {"linestyle": (0, (1, 1.5)), "marker": ""}
LINES: dict[str, dict[str, Any]] = {
    "visual": {"color": MODALITY_COLOURS["visual"]},
    "text": {"color": MODALITY_COLOURS["text"], "linestyle": (0, (5, 1.5)), "marker": "s"},
}
MODELS: list[dict[str, Any]] = [
    {"color": GREEN, "linestyle": "-", "marker": "o"},
    {"color": "#cc79a7", "linestyle": (0, (5, 1.5)), "marker": "s"},
    {"color": "#e69f00", "linestyle": (0, (4, 1.5, 1, 1.5)), "marker": "^"},
    {"color": "#56b4e9", "linestyle": (0, (2, 1)), "marker": "D"},
]
STYLE: Any = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 7),
    "legend.frameon": False,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    "lines.linewidth": 1.3,
    "lines.markersize": 2.4,
    "text.parse_math": False,  # names and questions hold dollars
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
# Names of the report's figures, whose captions are in its template; a report may lack some.
FIGURES = ("overview", "sweep", "layers", "attention_map", "keys", "key_map")
LOSSES = {"multiplied": SCALED, "a blank": "blank", "another's": "another's"}
BY_CONTROL = {control or "multiplied": control for control in CONTROLS}
# Panels of the sweep: title, and label, measure, modality and control of each curve.
PANELS = {
    "right answer is likeliest": [(label, "named", "", control) for label, control in BY_CONTROL.items()],
    "loss of the right answer": [(label, "loss", "", control) for label, control in LOSSES.items()],
    "KL of the answer to today's": [(label, "kl", "", control) for label, control in BY_CONTROL.items()],
    "turning, 1 − cosine": [
        ("by layer 1", "turning, layer 1", "visual", SCALED),
        ("of keys, from today's", "keys, turned", "", SCALED),
        ("of values, from today's", "values, turned", "", SCALED),
    ],
}


def styled(draw: Callable[Drawing, Figure]) -> Callable[Drawing, Figure]:
    """Draw in the report's style."""

    @wraps(draw)
    def drawn(*args: Drawing.args, **kwargs: Drawing.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for axis in figure.axes:
                _choose_ticks(axis)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # a fixed layout makes saving fast
        plt.close(figure)  # so that notebooks don't show it after every cell
        return figure

    return drawn


def draw_curve(axis: Axes, found: pd.DataFrame, x: str = "layer", band: float = 0.18, **style: Any) -> None:
    """The means of a summary's rows over the column `x`, with their intervals as a band of opacity `band`."""
    if found["mean"].notna().any():
        (line,) = axis.plot(found[x].astype(float), found["mean"], **{"marker": "o", **style})
        ends = (found[end].astype(float) for end in (x, "low", "high"))
        axis.fill_between(*ends, alpha=band, color=line.get_color(), linewidth=0)


@styled
def draw_overview(models: Mapping[str, Summary]) -> Figure:
    """Norm and turning by layer and modality (Fig. 1b, 3, 4), and attention to the picture if some model's was
    recorded; a row for each model."""
    with_attention = any(of.look("attention") for of in models.values())
    figure, axes = _rows_of_axes(models, 2 + with_attention)
    for row, of in zip(axes, models.values(), strict=True):
        for modality, style in LINES.items():
            draw_curve(row[0], of.curve("norm", modality), label=modality, **style)
            draw_curve(row[1], of.curve("turning", modality), label=modality, **style)
        row[0].set(ylabel="norm of tokens", yscale="log")
        row[1].set(ylabel="turning, 1 − cosine")
        if with_attention:
            draw_curve(row[2], of.curve("attention"), label="measured", color=GREEN)
            draw_curve(row[2], of.curve("attention_even"), label="uniform", color=FAINT, **DOTTED)
            row[2].set(ylabel="attention to the picture")
        for axis in row[1:]:
            _mark(axis, 0)
    return _with_legends(figure, axes)


@styled
def draw_gaps(models: Mapping[str, Summary]) -> Figure:
    """Norm ratio and gap of cosines between visual and text tokens by layer; all models together."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.5), layout="constrained")
    for number, (name, of) in enumerate(models.items()):
        for axis, measure in zip(axes, ("norm_ratio", "gap"), strict=True):
            draw_curve(axis, of.curve(measure), label=name[-40:], **MODELS[number % len(MODELS)])
    axes[0].set(ylabel="norm, visual over text", yscale="log", xlabel="layer")
    axes[1].set(ylabel="cosine, visual − text", xlabel="layer")
    for axis, level in zip(axes, (1, 0), strict=True):
        _mark(axis, level)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, handlelength=3)
    return figure


@styled
def draw_keys(models: Mapping[str, Summary]) -> Figure:
    """Distance of visual and text tokens as keys and as values, with halves of the pictures to compare with; a row
    for each model."""
    figure, axes = _rows_of_axes(models, 2)
    titles = {"mmd": "MMD²", "probe": "accuracy of a probe"}
    for row, of in zip(axes, models.values(), strict=True):
        for axis, (measure, title) in zip(row, titles.items(), strict=True):
            for kind, style in zip(("keys", "values"), MODELS, strict=False):
                draw_curve(axis, of.curve(f"{kind}.{measure}"), label=kind, **style)
                draw_curve(axis, of.curve(f"{kind}.{measure}_halves"), color=style["color"], **DOTTED)
            axis.set_ylabel(title)
    return _with_legends(figure, axes)


@styled
def draw_dynamics(points: Mapping[int, Summary]) -> Figure:
    """A run's checkpoints by step: norms at the decoder, turning, and turning by layer (Fig. 5)."""
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 4.4), layout="constrained")
    for axis, measure in zip(axes[0], ("at_decoder", "turning"), strict=True):
        for modality, style in LINES.items():
            means = pd.DataFrame([of.look(measure, modality) for of in points.values()])
            draw_curve(axis, means.assign(step=list(points)), "step", label=modality, **style)
    scale, colours = Normalize(min(points), max(points)), plt.get_cmap("viridis")
    for axis, modality in zip(axes[1], LINES, strict=True):
        for step, of in points.items():
            draw_curve(axis, of.curve("turning", modality), band=0.07, color=colours(scale(step)))
        axis.set(xlabel="layer", ylabel=f"1 − cosine, {modality}")
        axis.sharey(axes[1, 0])
    axes[0, 0].set(xlabel="step", ylabel="norm at the decoder", yscale="log")
    axes[0, 1].set(xlabel="step", ylabel="turning, 1 − cosine")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, handlelength=3)
    figure.colorbar(ScalarMappable(scale, colours), ax=axes[1], label="step", pad=0.02)
    return figure


@styled
def draw_sweep(models: Mapping[str, Mapping[tuple[float, str], Summary]]) -> Figure:
    """What visual tokens of other lengths change, from summaries by dose and control; a row for each model."""
    figure, axes = _rows_of_axes(models, len(PANELS))
    figure.set_size_inches(1.5 * WIDTH, 0.8 + 2.4 * len(models))
    for row, points in zip(axes, models.values(), strict=True):
        marks = [points[1.0, SCALED].look(mark) for mark in ("length", "attention_update", "mlp_update")]
        lengths = [mark.mean for mark in marks if mark]
        for axis, (title, curves) in zip(row, PANELS.items(), strict=True):
            for (label, measure, modality, control), style in zip(curves, MODELS, strict=False):
                found = {dose: of.look(measure, modality) for (dose, kind), of in points.items() if kind == control}
                means = [{"length": dose * lengths[0]} | of._asdict() for dose, of in found.items() if of]
                if means:
                    draw_curve(axis, pd.DataFrame(means).sort_values("length"), "length", label=label, **style)
            for length, colour in zip(lengths, (INK, FAINT, FAINT), strict=False):
                axis.axvline(length, color=colour, linewidth=0.6, linestyle=":", zorder=0)
            ends = (-0.03, 1.03) if "named" in curves[0] else None
            axis.set(ylabel=title, xlabel="norm over text's", xscale="log", ylim=ends)
    return _with_legends(figure, axes)


def draw_figures(models: Mapping[str, Summary], swept: Any = None) -> dict[str, Figure]:
    """All of a report's figures by name, those without data left out. pyplot has closed them: show or save them."""
    figures = {"overview": draw_overview(models), "layers": draw_gaps(models)}
    if swept:
        figures["sweep"] = draw_sweep(swept)
    if with_keys := {name: of for name, of in models.items() if of.look("keys.mmd")}:
        figures["keys"] = draw_keys(with_keys)
    return figures


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix."""
    with plt.rc_context({"pdf.fonttype": 42}):  # text stays text
        figure.savefig(path, dpi=160)


def _rows_of_axes(names: Mapping[str, Any], columns: int) -> tuple[Figure, np.ndarray]:
    """A row of axes for each name, over layers."""
    size = (WIDTH, 0.6 + 1.8 * len(names))
    figure, axes = plt.subplots(len(names), columns, figsize=size, squeeze=False, layout="constrained")
    for row, name in zip(axes, names, strict=True):
        _set_title(row[0], name[-80:])
        row[0].margins(x=0.02)
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    return figure, axes


def _with_legends(figure: Figure, axes: np.ndarray) -> Figure:
    """The figure with a legend below each column, where it covers no curve."""
    for axis in axes[-1]:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28))
    return figure


def _mark(axis: Axes, level: float) -> None:
    """A thin line at the value without an effect."""
    if axis.has_data():
        axis.axhline(level, color=FAINT, linewidth=0.6, zorder=0)


def _set_title(axis: Axes, title: str) -> None:
    """A title over the left corner that may extend past the axes: the layout reserves its height, not its width."""
    axis.set_title(" ")
    style: Any = {"fontweight": "bold", "annotation_clip": False}
    axis.annotate(title, (0, 1), (0, 6), "axes fraction", "offset points", **style).set_in_layout(False)


def _choose_ticks(axis: Axes) -> None:
    """Integer ticks for layers; a few round numbers for log axes, whatever the range."""
    if axis.lines:
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for ticks, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if ticks.get_scale() == "log":
            subs = (1, 2, 5) if high < 100 * low else (1,)
            ticks.set_major_locator(MaxNLocator(5) if high < 10 * low else LogLocator(subs=subs, numticks=5))
            ticks.set_minor_locator(NullLocator())
            ticks.set_major_formatter("{x:g}")
