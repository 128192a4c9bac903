"""The figures of the report and of a run's checkpoints, in one style, as wide as a paper's text."""

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from diagnostics.scaling import BLANK_PICTURE, OTHER_PICTURE, OWN_PICTURE, UNCHANGED_DOSE
from diagnostics.table import Summary


# The parameters of a function that draws a figure.
Parameters = ParamSpec("Parameters")

WIDTH = 7.0  # width of a figure in inches
INK = "#24292f"
FAINT = "#8c959f"
GREEN = "#009e73"
# Okabe and Ito's colours, which are safe for colour blindness; every line also has its own dash pattern.
MODALITY_COLOURS = {"visual": "#d55e00", "text": "#0072b2"}
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
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 2.4,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.parse_math": False,  # names and questions may have dollar signs
}
# Names of all figures that a report can have. Their captions are in the report's template.
FIGURES = ("overview", "sweep", "layers", "attention_map", "keys", "key_map")


class SweepCurve(NamedTuple):
    """A curve of the sweep's figure: its label, and the measure, modality and control whose numbers it shows."""

    label: str
    measure: str
    modality: str = ""
    control: str = OWN_PICTURE


# The panels of the sweep's figure: title, and curves.
RIGHT_ANSWERS = "right answer is likeliest"
PANELS = {
    RIGHT_ANSWERS: [SweepCurve("multiplied", "named")],
    "loss of the right answer": [
        SweepCurve("multiplied", "loss"),
        SweepCurve("a blank", "loss", control=BLANK_PICTURE),
        SweepCurve("another's", "loss", control=OTHER_PICTURE),
    ],
    "KL of the answer to today's": [SweepCurve("multiplied", "kl")],
    "turning, 1 − cosine": [
        SweepCurve("by layer 1", "turning, layer 1", modality="visual"),
        SweepCurve("of keys, from today's", "keys, turned"),
        SweepCurve("of values, from today's", "values, turned"),
    ],
}


def draw_figures(
    models: Mapping[str, Summary], swept: Mapping[str, Mapping[tuple[float, str], Summary]] | None = None
) -> dict[str, Figure]:
    """The figures of a report by name, except key maps and attention maps. A figure without data is left out.

    Args:
        models: Summaries by the model's name.
        swept: Summaries of a sweep by the model's name, then by dose and control.
    """
    figures = {"overview": draw_overview(models), "layers": draw_gaps(models)}
    if swept:
        figures["sweep"] = draw_sweep(swept)

    models_with_keys = {name: summary for name, summary in models.items() if summary.look("keys.mmd")}
    if models_with_keys:
        figures["keys"] = draw_keys(models_with_keys)
    return figures


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix."""
    with plt.rc_context({"pdf.fonttype": 42}):  # in a PDF, text can be searched and copied
        figure.savefig(path, dpi=160)


def styled(draw: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """Decorate a function that draws a figure, so that it draws in the report's style."""

    @wraps(draw)
    def draw_in_style(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for axes in figure.axes:
                _choose_ticks(axes)

            # The layout is computed once and kept. Otherwise each file that is saved would compute it again.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        # A notebook shows every open figure after a cell, and would show this figure twice.
        plt.close(figure)
        return figure

    return draw_in_style


def draw_curve(axes: Axes, summary: pd.DataFrame, x: str = "layer", band: float = 0.18, **style: Any) -> None:
    """Draw means as a curve with their intervals as a band.

    Args:
        axes: Where to draw.
        summary: A table with columns `mean`, `low` and `high`.
        x: The column of the horizontal axis.
        band: Opacity of the band.
        style: Options of the curve's line.
    """
    if summary["mean"].isna().all():
        return

    position = summary[x].astype(float)
    low = summary["low"].astype(float)
    high = summary["high"].astype(float)
    (line,) = axes.plot(position, summary["mean"], **{"marker": "o", **style})
    axes.fill_between(position, low, high, alpha=band, color=line.get_color(), linewidth=0)


@styled
def draw_overview(models: Mapping[str, Summary]) -> Figure:
    """A row for each model: norm and turning by layer and modality (Fig. 1b, 3, 4), and attention to the picture.

    If no model's attention was recorded, its column is left out.
    """
    has_attention = any(summary.look("attention") for summary in models.values())
    figure, rows = _rows_of_axes(models, columns=3 if has_attention else 2)
    for row, summary in zip(rows, models.values(), strict=True):
        for modality, style in LINES.items():
            draw_curve(row[0], summary.curve("norm", modality), label=modality, **style)
            draw_curve(row[1], summary.curve("turning", modality), label=modality, **style)
        row[0].set(ylabel="norm of tokens", yscale="log")
        row[1].set(ylabel="turning, 1 − cosine")
        _mark_level(row[1], 0)

        if has_attention:
            draw_curve(row[2], summary.curve("attention"), label="measured", color=GREEN)
            draw_curve(row[2], summary.curve("attention_even"), label="uniform", color=FAINT, **DOTTED)
            row[2].set(ylabel="attention to the picture")
            _mark_level(row[2], 0)
    return _with_legends(figure, rows)


@styled
def draw_gaps(models: Mapping[str, Summary]) -> Figure:
    """Norm ratio and gap of cosines between image and text tokens by layer, with a curve for each model."""
    figure, (norm_axes, gap_axes) = plt.subplots(1, 2, figsize=(WIDTH, 2.5), layout="constrained")
    for number, (name, summary) in enumerate(models.items()):
        style = MODELS[number % len(MODELS)]
        draw_curve(norm_axes, summary.curve("norm_ratio"), label=name[-40:], **style)
        draw_curve(gap_axes, summary.curve("gap"), label=name[-40:], **style)

    norm_axes.set(ylabel="norm, image over text", yscale="log", xlabel="layer")
    gap_axes.set(ylabel="cosine, image − text", xlabel="layer")
    _mark_level(norm_axes, 1)
    _mark_level(gap_axes, 0)
    _with_legend_above(figure, norm_axes)
    return figure


@styled
def draw_keys(models: Mapping[str, Summary]) -> Figure:
    """A row for each model: the distance between image and text tokens by layer, for keys and for values.

    Dotted curves show the distance between two halves of the pictures, for comparison.
    """
    figure, rows = _rows_of_axes(models, columns=2)
    for row, summary in zip(rows, models.values(), strict=True):
        for space, style in (("keys", MODELS[0]), ("values", MODELS[1])):
            draw_curve(row[0], summary.curve(f"{space}.mmd"), label=space, **style)
            draw_curve(row[0], summary.curve(f"{space}.mmd_halves"), color=style["color"], **DOTTED)
            draw_curve(row[1], summary.curve(f"{space}.probe"), label=space, **style)
        row[0].set_ylabel("MMD²")
        row[1].set_ylabel("accuracy of a probe")
    return _with_legends(figure, rows)


@styled
def draw_dynamics(points: Mapping[int, Summary]) -> Figure:
    """A run's checkpoints: norms at the decoder and turning over steps, and turning by layer (Fig. 5).

    Args:
        points: The summary of each checkpoint by step.
    """
    figure, (over_steps, over_layers) = plt.subplots(2, 2, figsize=(WIDTH, 4.4), layout="constrained")

    for axes, measure in zip(over_steps, ("at_decoder", "turning"), strict=True):
        for modality, style in LINES.items():
            means = pd.DataFrame([summary.look(measure, modality) for summary in points.values()])
            draw_curve(axes, means.assign(step=list(points)), "step", label=modality, **style)
    over_steps[0].set(xlabel="step", ylabel="norm at the decoder", yscale="log")
    over_steps[1].set(xlabel="step", ylabel="turning, 1 − cosine")
    _with_legend_above(figure, over_steps[0])

    scale = Normalize(min(points), max(points))
    colours = plt.get_cmap("viridis")
    for axes, modality in zip(over_layers, LINES, strict=True):
        for step, summary in points.items():
            draw_curve(axes, summary.curve("turning", modality), band=0.07, color=colours(scale(step)))
        axes.set(xlabel="layer", ylabel=f"1 − cosine, {modality}")
        axes.sharey(over_layers[0])
    figure.colorbar(ScalarMappable(scale, colours), ax=over_layers, label="step", pad=0.02)
    return figure


@styled
def draw_sweep(models: Mapping[str, Mapping[tuple[float, str], Summary]]) -> Figure:
    """A row for each model: what changes with the norm of image tokens, in the `PANELS`.

    Args:
        models: Summaries by the model's name, then by dose and control.
    """
    figure, rows = _rows_of_axes(models, len(PANELS))
    figure.set_size_inches(1.5 * WIDTH, 0.8 + 2.4 * len(models))
    for row, points in zip(rows, models.values(), strict=True):
        norm, *update_norms = _norms_in_layer_1(points[UNCHANGED_DOSE, OWN_PICTURE])
        for axes, (title, curves) in zip(row, PANELS.items(), strict=True):
            for curve, style in zip(curves, MODELS, strict=False):
                means = _over_norms(points, curve, norm)
                if not means.empty:
                    draw_curve(axes, means, "norm", label=curve.label, **style)

            _mark_norm(axes, norm, INK)
            for update_norm in update_norms:
                _mark_norm(axes, update_norm, FAINT)
            axes.set(ylabel=title, xlabel="norm over text's", xscale="log")
            if title == RIGHT_ANSWERS:
                axes.set_ylim(-0.03, 1.03)
    return _with_legends(figure, rows)


def _norms_in_layer_1(as_it_is: Summary) -> list[float]:
    """Norm of the image tokens that enter layer 1, and then the norms of what attention and the MLP add to them.

    Norms of what is added are left out if they are not known.
    """
    estimates = [as_it_is.look(measure) for measure in ("length", "attention_update", "mlp_update")]
    return [estimate.mean for estimate in estimates if estimate is not None]


def _over_norms(points: Mapping[tuple[float, str], Summary], curve: SweepCurve, norm: float) -> pd.DataFrame:
    """The estimates of a curve, with a column `norm`: the norm of image tokens at each dose, in increasing order.

    Args:
        points: Summaries by dose and control.
        curve: The curve.
        norm: Norm of image tokens in the model as it is.
    """
    rows = []
    for (dose, control), summary in sorted(points.items()):
        estimate = summary.look(curve.measure, curve.modality)
        if control == curve.control and estimate is not None:
            rows.append({"norm": dose * norm, **estimate._asdict()})
    return pd.DataFrame(rows)


def _mark_norm(axes: Axes, norm: float, colour: str) -> None:
    axes.axvline(norm, color=colour, linewidth=0.6, linestyle=":", zorder=0)


def _rows_of_axes(names: Mapping[str, Any], columns: int) -> tuple[Figure, np.ndarray]:
    """A figure with a row of axes for each name. The horizontal axes are layers."""
    size = (WIDTH, 0.6 + 1.8 * len(names))
    figure, rows = plt.subplots(len(names), columns, figsize=size, squeeze=False, layout="constrained")
    for row, name in zip(rows, names, strict=True):
        _set_title(row[0], name[-80:])
        row[0].margins(x=0.02)
    for axes in rows[-1]:
        axes.set_xlabel("layer")
    return figure, rows


def _with_legends(figure: Figure, rows: np.ndarray) -> Figure:
    """Put a legend below each column, where it covers no curve, and return the figure."""
    for axes in rows[-1]:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28))
    return figure


def _with_legend_above(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, handlelength=3)


def _mark_level(axes: Axes, level: float) -> None:
    """Draw a thin horizontal line at `level`, the value that means no effect."""
    if axes.has_data():
        axes.axhline(level, color=FAINT, linewidth=0.6, zorder=0)


def _set_title(axes: Axes, title: str) -> None:
    """Set a title that begins at the left corner and may be wider than the axes.

    For a wide title, the layout would shrink the axes. So the title is empty and reserves only the height, and an
    annotation that the layout ignores shows the text.
    """
    axes.set_title(" ")
    annotation = axes.annotate(
        title,
        xy=(0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontweight="bold",
        annotation_clip=False,
    )
    annotation.set_in_layout(False)


def _choose_ticks(axes: Axes) -> None:
    """Set the ticks: integers on horizontal axes, which mostly are layers, and a few round numbers on log axes."""
    if axes.lines:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _choose_log_ticks(axes.xaxis, *axes.get_xlim())
    _choose_log_ticks(axes.yaxis, *axes.get_ylim())


def _choose_log_ticks(axis: Axis, low: float, high: float) -> None:
    if axis.get_scale() != "log":
        return

    # A short axis would have too few ticks if they were only at powers of ten.
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(5))
    elif high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=5))
    else:
        axis.set_major_locator(LogLocator(subs=(1,), numticks=5))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
