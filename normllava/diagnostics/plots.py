"""The figures of the report and of a run's checkpoints, in one style, as wide as a paper's text.

"Fig. 1b" and the like name figures of "The Unseen Bias" (arXiv 2512.08374) that show the same measures.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from normllava.diagnostics.scaling import UNCHANGED_DOSE
from normllava.diagnostics.table import Summary
from normllava.diagnostics.verdict import (
    Score,
    choose_score,
    estimate_scores,
    get_estimate,
)


# The parameters of a function that [`styled`] decorates.
Parameters = ParamSpec("Parameters")

WIDTH = 7.0  # width of a figure in inches
# Size in inches of a figure with one panel, whose text can be read on a phone.
SMALL_SIZE = (3.6, 2.7)
# A model's name with more characters than this is cut at its beginning: the names of checkpoints differ at their end.
MAX_LEGEND_CHARACTERS = 40
MAX_TITLE_CHARACTERS = 80

INK = "#24292f"  # nearly black, for text and axes
FAINT = "#8c959f"  # grey, for what a curve is compared with
# The colours below are Okabe and Ito's, which people with colour blindness can tell apart. Curves also differ in their
# dash patterns.
GREEN = "#009e73"
MODALITY_COLOURS = {"image": "#d55e00", "text": "#0072b2"}
# Styles of curves, as options of matplotlib's `plot`. A dash pattern is an offset, and then the lengths of dashes and
# gaps in turn.
DOTTED: dict[str, Any] = {"linestyle": (0, (1, 1.5)), "marker": ""}
RING: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 8, "markerfacecolor": "none"}
MODALITY_STYLES: dict[str, dict[str, Any]] = {
    "image": {"color": MODALITY_COLOURS["image"]},
    "text": {"color": MODALITY_COLOURS["text"], "linestyle": (0, (5, 1.5)), "marker": "s"},
}
MODEL_STYLES: list[dict[str, Any]] = [
    {"color": GREEN, "linestyle": "-", "marker": "o"},
    {"color": "#cc79a7", "linestyle": (0, (5, 1.5)), "marker": "s"},
    {"color": "#e69f00", "linestyle": (0, (4, 1.5, 1, 1.5)), "marker": "^"},
    {"color": "#56b4e9", "linestyle": (0, (2, 1)), "marker": "D"},
]
# Settings of matplotlib for all figures.
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
    "text.parse_math": False,  # otherwise a `$` in a name or a question would begin a formula
}
# Names of all figures that a report can have. Their captions are in the report's template.
FIGURES = ("overview", "sweep", "layers", "attention_map", "keys", "key_map")
# Labels of the vertical axis of the sweep's figure. Shares are shown in percent.
SCORE_LABELS = {
    Score.RIGHT_ANSWERS: "right answers, %",
    Score.LOSS: "loss of the right answer",
    Score.CHANGED_ANSWERS: "answers that change, %",
}


def draw_figures(
    models: Mapping[str, Summary], swept: Mapping[str, Mapping[float, Summary]] | None = None
) -> dict[str, Figure]:
    """The figures of a report by name, except the key map and attention maps. A figure without data is left out.

    Args:
        models: Summaries by the model's name.
        swept: Summaries of a sweep by the model's name. Each model has a summary for every dose (the factor on its
            image embeddings).
    """
    figures = {"overview": draw_overview(models), "layers": draw_gaps(models)}
    if swept:
        figures["sweep"] = draw_sweep(swept)

    models_with_keys = {}
    for name, summary in models.items():
        if summary.look("keys.mmd") is not None:
            models_with_keys[name] = summary
    if models_with_keys:
        figures["keys"] = draw_keys(models_with_keys)
    return figures


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix."""
    with plt.rc_context({"pdf.fonttype": 42}):  # TrueType, so that text in a PDF can be searched and copied
        figure.savefig(path, dpi=160)


def styled(draw: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """Decorate a function that draws a figure, so that it draws in the report's style."""

    @wraps(draw)
    def draw_in_style(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for axes in figure.axes:
                _choose_ticks(axes)

            # The layout is computed here and kept. Otherwise it would be computed again for each file that is saved.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        # A notebook shows every open figure after a cell, and would show this figure twice if the cell returns it.
        plt.close(figure)
        return figure

    return draw_in_style


def draw_curve(axes: Axes, curve: pd.DataFrame, x: str = "layer", band_opacity: float = 0.18, **style: Any) -> None:
    """Draw means as a curve with their intervals as a band. Nothing is drawn if there are no means.

    Args:
        axes: Where to draw.
        curve: A table with columns `mean`, `low` and `high`.
        x: The column of the horizontal axis.
        band_opacity: Opacity of the band.
        style: Options of the curve's line.
    """
    if curve["mean"].isna().all():
        return

    positions = curve[x].astype(float)
    low = curve["low"].astype(float)
    high = curve["high"].astype(float)
    style_with_marker = {"marker": "o", **style}  # if `style` has a marker, it replaces "o"
    (line,) = axes.plot(positions, curve["mean"], **style_with_marker)
    axes.fill_between(positions, low, high, alpha=band_opacity, color=line.get_color(), linewidth=0)


@styled
def draw_overview(models: Mapping[str, Summary]) -> Figure:
    """Draw a row for each model: norm and turning by layer and modality (Fig. 1b, 3, 4), and attention to the picture.

    Turning is 1 minus the cosine of a layer's input and output. The column of attention is left out if no model's
    attention was recorded.
    """
    has_attention = any(summary.look("attention") is not None for summary in models.values())
    figure, rows = _rows_of_axes(models, columns=3 if has_attention else 2)
    for row, summary in zip(rows, models.values(), strict=True):
        norm_axes = row[0]
        turning_axes = row[1]
        for modality, style in MODALITY_STYLES.items():
            draw_curve(norm_axes, summary.curve("norm", modality), label=modality, **style)
            draw_curve(turning_axes, summary.curve("turning", modality), label=modality, **style)
        norm_axes.set(ylabel="norm of tokens", yscale="log")
        turning_axes.set(ylabel="turning, 1 − cosine")
        _mark_level(turning_axes, 0)

        if has_attention:
            attention_axes = row[2]
            draw_curve(attention_axes, summary.curve("attention"), label="measured", color=GREEN)
            draw_curve(attention_axes, summary.curve("attention_even"), label="uniform", color=FAINT, **DOTTED)
            attention_axes.set(ylabel="attention to the picture")
            _mark_level(attention_axes, 0)

    _add_legends(rows)
    return figure


@styled
def draw_gaps(models: Mapping[str, Summary]) -> Figure:
    """Draw the norm ratio and the cosine gap between image and text tokens by layer, with a curve for each model.

    The gap is the mean cosine of image tokens minus that of text tokens, each between a layer's input and output.
    """
    figure, (norm_axes, gap_axes) = plt.subplots(1, 2, figsize=(WIDTH, 2.5), layout="constrained")
    # If there are more models than styles, the styles begin again.
    for style, (name, summary) in zip(itertools.cycle(MODEL_STYLES), models.items()):
        label = name[-MAX_LEGEND_CHARACTERS:]
        draw_curve(norm_axes, summary.curve("norm_ratio"), label=label, **style)
        draw_curve(gap_axes, summary.curve("gap"), label=label, **style)

    norm_axes.set(ylabel="norm, image over text", yscale="log", xlabel="layer")
    gap_axes.set(ylabel="cosine, image − text", xlabel="layer")
    _mark_level(norm_axes, 1)
    _mark_level(gap_axes, 0)
    _add_legend_above(figure, norm_axes)
    return figure


@styled
def draw_keys(models: Mapping[str, Summary]) -> Figure:
    """Draw a row for each model: how different image and text tokens are by layer, in their keys and in their values.

    The left axes show the distance MMD², with the distance between two random halves of the pictures as dotted curves.
    The right axes show how often a linear probe tells image tokens from text tokens.
    """
    figure, rows = _rows_of_axes(models, columns=2)
    for (mmd_axes, probe_axes), summary in zip(rows, models.values(), strict=True):
        # `MODEL_STYLES` has styles that are easy to tell apart. Here they stand for keys and values.
        for space, style in (("keys", MODEL_STYLES[0]), ("values", MODEL_STYLES[1])):
            draw_curve(mmd_axes, summary.curve(f"{space}.mmd"), label=space, **style)
            draw_curve(mmd_axes, summary.curve(f"{space}.mmd_halves"), color=style["color"], **DOTTED)
            draw_curve(probe_axes, summary.curve(f"{space}.probe"), label=space, **style)
        mmd_axes.set_ylabel("MMD²")
        probe_axes.set_ylabel("accuracy of a linear probe")

    _add_legends(rows)
    return figure


@styled
def draw_dynamics(summaries: Mapping[int, Summary]) -> Figure:
    """Draw a run's checkpoints: norms at the decoder and turning over steps, and turning by layer (Fig. 5).

    Args:
        summaries: The summary of each checkpoint, by the checkpoint's step.
    """
    figure, (step_axes, layer_axes) = plt.subplots(2, 2, figsize=(WIDTH, 4.4), layout="constrained")

    # Above: norm and turning, with a curve for each modality.
    for axes, measure in zip(step_axes, ("at_decoder", "turning"), strict=True):
        for modality, style in MODALITY_STYLES.items():
            estimates = [summary.look(measure, modality) for summary in summaries.values()]
            curve = pd.DataFrame(estimates)  # an estimate's fields become the columns `mean`, `low` and `high`
            curve["step"] = list(summaries)
            draw_curve(axes, curve, x="step", label=modality, **style)
    step_axes[0].set(xlabel="step", ylabel="norm at the decoder", yscale="log")
    step_axes[1].set(xlabel="step", ylabel="turning, 1 − cosine")
    _add_legend_above(figure, step_axes[0])

    # Below: turning of each modality, with a curve for each checkpoint.
    scale = Normalize(min(summaries), max(summaries))
    colours = plt.get_cmap("viridis")
    for axes, modality in zip(layer_axes, MODALITY_STYLES, strict=True):
        for step, summary in summaries.items():
            colour = colours(scale(step))
            # The bands are faint, because those of many checkpoints overlap.
            draw_curve(axes, summary.curve("turning", modality), band_opacity=0.07, color=colour)
        axes.set(xlabel="layer", ylabel=f"1 − cosine, {modality}")
    layer_axes[1].sharey(layer_axes[0])
    figure.colorbar(ScalarMappable(scale, colours), ax=layer_axes, label="step", pad=0.02)
    return figure


@styled
def draw_sweep(models: Mapping[str, Mapping[float, Summary]]) -> Figure:
    """Draw the answers over the norm of image embeddings: a curve for each model, with a ring at the norm as it is.

    Args:
        models: Summaries by the model's name, then by dose. All models were asked the same questions.
    """
    figure, axes = plt.subplots(figsize=SMALL_SIZE, layout="constrained")
    first_model = next(iter(models.values()))
    score = choose_score(first_model)

    # If there are more models than styles, the styles begin again.
    for style, (name, summaries) in zip(itertools.cycle(MODEL_STYLES), models.items()):
        curve = _score_by_norm(summaries, score)
        draw_curve(axes, curve, x="norm", label=name[-MAX_LEGEND_CHARACTERS:], **style)
        as_it_is = curve[curve["dose"] == UNCHANGED_DOSE]
        axes.plot(as_it_is["norm"], as_it_is["mean"], color=style["color"], **RING)
    axes.plot([], [], color=INK, label="norm as it is", **RING)  # the ring in the legend

    axes.set(xlabel="norm of image embeddings (text's = 1)", ylabel=SCORE_LABELS[score], xscale="log")
    if score is not Score.LOSS:
        axes.set_ylim(-3, 103)  # percent, with room for curves at 0 and 100
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", handlelength=3)
    return figure


def _score_by_norm(summary_by_dose: Mapping[float, Summary], score: Score) -> pd.DataFrame:
    """One model's score at each dose, with columns `dose`, `norm`, `mean`, `low` and `high`.

    `norm` is the norm of the image embeddings at the dose. Scores that are shares are in percent.

    Args:
        summary_by_dose: Summaries by dose.
        score: The score.
    """
    # sweep.csv calls the norm of image embeddings `length`.
    image_norm = get_estimate(summary_by_dose[UNCHANGED_DOSE], "length").mean
    unit = 1 if score is Score.LOSS else 100  # the other scores are shares

    rows = []
    for dose, estimate in estimate_scores(summary_by_dose, score).items():
        rows.append(
            {
                "dose": dose,
                "norm": dose * image_norm,
                "mean": unit * estimate.mean,
                "low": unit * estimate.low,
                "high": unit * estimate.high,
            }
        )
    return pd.DataFrame(rows)


def _rows_of_axes(models: Mapping[str, Any], columns: int) -> tuple[Figure, np.ndarray]:
    """A figure and its axes, `(num_models, columns)`: a row for each model, with the model's name as title.

    The horizontal axes of the last row are labelled "layer".
    """
    size = (WIDTH, 0.6 + 1.8 * len(models))  # in inches: 0.6 for the legends, 1.8 for each row
    figure, rows = plt.subplots(len(models), columns, figsize=size, squeeze=False, layout="constrained")
    for row, name in zip(rows, models, strict=True):
        _set_title(row[0], name[-MAX_TITLE_CHARACTERS:])
    for axes in rows[-1]:
        axes.set_xlabel("layer")
    return figure, rows


def _add_legends(rows: np.ndarray) -> None:
    """Put a legend below the lowest axes of each column, where it covers no curve."""
    for axes in rows[-1]:
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28))  # below the label of the horizontal axis


def _add_legend_above(figure: Figure, axes: Axes) -> None:
    """Put the legend of some axes above the figure."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, handlelength=3)


def _mark_level(axes: Axes, level: float) -> None:
    """Draw a thin horizontal line at `level`, the value that means no turning, no attention or no difference."""
    if axes.has_data():
        axes.axhline(level, color=FAINT, linewidth=0.6, zorder=0)


def _set_title(axes: Axes, title: str) -> None:
    """Set a title that begins at the left corner and may be wider than the axes.

    The layout shrinks axes whose title is wider than they are. So the axes get an empty title, which only reserves the
    height, and the text is shown by an annotation that the layout ignores.
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
    """Set ticks at integers on horizontal axes, most of which show layers, and at a few round numbers on log axes."""
    if axes.lines:  # axes with curves, not a colour bar or a picture
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _choose_log_ticks(axes.xaxis, *axes.get_xlim())
    _choose_log_ticks(axes.yaxis, *axes.get_ylim())


def _choose_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Set a few ticks at round numbers if the scale is logarithmic. The axis goes from `low` to `high`."""
    if axis.get_scale() != "log":
        return

    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(5))  # at equal distances
    elif high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=5))  # at 1, 2, 5, 10, 20, 50 and so on
    else:
        axis.set_major_locator(LogLocator(subs=(1,), numticks=5))  # at powers of ten
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
