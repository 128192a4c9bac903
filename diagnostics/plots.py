"""The report's figures and the training dynamics figure, in one style, as wide as a paper's page."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from diagnostics.loading import Question
from diagnostics.pictures import Pictures
from diagnostics.results import Attention, Attractions, Curve, DynamicsPoint, Layers, Report, Space


Drawing = ParamSpec("Drawing")
T = TypeVar("T")

WIDTH = 7.0  # inches, of a page's text
INK, FAINT = "#24292f", "#8c959f"
# Okabe and Ito's colours, which are safe for colour blindness; every line also has its own dash pattern.
MODALITY_COLOURS = {"visual": "#d55e00", "text": "#0072b2"}
GREEN, PURPLE, YELLOW, SKY = "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
DASHES = ("-", (0, (5, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (2, 1)))
DOTTED = {"linestyle": (0, (1, 1.5)), "marker": ""}
LINES: dict[str, dict[str, Any]] = {
    "visual": {"color": MODALITY_COLOURS["visual"]},
    "text": {"color": MODALITY_COLOURS["text"], "linestyle": DASHES[1], "marker": "s"},
    "measured": {"color": GREEN},
    "evenly spread": {"color": FAINT, **DOTTED},
    "with sinks": {"color": GREEN},
    "even, with": {"color": GREEN, **DOTTED},
    "without sinks": {"color": PURPLE, "linestyle": DASHES[1], "marker": "s"},
    "even, without": {"color": PURPLE, "linestyle": DASHES[2], "marker": ""},
    "keys": {"color": GREEN},
    "halves of keys": {"color": GREEN, **DOTTED},
    "values": {"color": PURPLE, "linestyle": DASHES[1], "marker": "s"},
    "halves of values": {"color": PURPLE, "linestyle": DASHES[2], "marker": ""},
}
MODELS: list[dict[str, Any]] = [
    {"color": colour, "linestyle": dash, "marker": marker}
    for colour, dash, marker in zip((GREEN, PURPLE, YELLOW, SKY), DASHES, "os^D", strict=True)
]
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 2.4,
    "text.parse_math": False,  # names and questions hold dollars
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        label: Label of the y axis.
        curves: By name, one of `LINES`; those that are `None` are left out.
        layers: Layer numbers of the values; all layers by default.
        log: Whether the y axis is logarithmic.
        level: Height of a thin reference line, the value without an effect.
    """

    label: str
    curves: Mapping[str, Curve | None]
    layers: Sequence[int] | None = None
    log: bool = False
    level: float | None = None


def styled(draw: Callable[Drawing, Figure]) -> Callable[Drawing, Figure]:
    """Draw in the report's style, and label the lines at their ends if there is no legend."""

    @wraps(draw)
    def drawn(*args: Drawing.args, **kwargs: Drawing.kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for axis in figure.axes:
                _choose_ticks(axis)
            figure.draw_without_rendering()  # now sizes and ticks are known
            for axis in figure.axes if not figure.legends else []:
                _label_ends(axis)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # a fixed layout makes saving fast
        plt.close(figure)  # so that notebooks don't show it after every cell
        return figure

    return drawn


def draw_curve(axis: Axes, x: Sequence[float], curve: Curve, band: float = 0.18, **style: Any) -> None:
    """Means with their intervals as a band of opacity `band`."""
    (line,) = axis.plot(x, curve.mean, **{"marker": "o", **style})
    low, high = zip(*(interval or (np.nan, np.nan) for interval in curve.interval), strict=True)
    axis.fill_between(x, low, high, alpha=band, color=line.get_color(), linewidth=0)


@styled
def draw_layers(names: Sequence[str], layers: Sequence[Layers], attention: Sequence[Attention | None] = ()) -> Figure:
    """Norm and turning by layer and modality (Fig. 1b, 3, 4), and attention to the picture; a row for each model."""

    def panels(measured: tuple[Layers, Attention | None]) -> list[Panel]:
        turning, gazes = measured
        looks = (
            {} if gazes is None else {"measured": gazes.with_sinks, "evenly spread": gazes.with_sinks.evenly_spread}
        )
        masses = {name: gaze.mass for name, gaze in looks.items()}
        rates = {modality: _turning_rate(turning, modality) for modality in MODALITY_COLOURS}
        found = [
            Panel("norm of tokens", _by_modality(turning, "norm"), log=True),
            Panel("turning, 1 − cosine", rates, level=0),
            Panel("attention to the picture", masses, gazes.layers if gazes else None, level=0),
        ]
        return found if attention else found[:2]

    return _draw_rows(names, list(zip_longest(layers, attention)), panels)


@styled
def draw_attention(names: Sequence[str], models: Sequence[Attention | None]) -> Figure:
    """Attention mass on the picture, its entropy, and the share of the bottom third, by layer."""

    def panels(attention: Attention | None) -> list[Panel]:
        gazes = {} if attention is None else dict(zip(list(LINES)[4:8], attention.gazes.values(), strict=True))
        layers = None if attention is None else attention.layers
        titles = {"mass": "mass on the picture", "entropy": "entropy in the picture", "bottom_third": "bottom third"}
        return [
            Panel(title, {key: getattr(gaze, name) for key, gaze in gazes.items()}, layers)
            for name, title in titles.items()
        ]

    return _draw_rows(names, models, panels)


@styled
def draw_gaps(names: Sequence[str], models: Sequence[Layers]) -> Figure:
    """Norm ratio and gap of cosines between visual and text tokens by layer; all models together."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.5), layout="constrained")
    for number, (name, layers) in enumerate(zip(names, models, strict=True)):
        for axis, curve in zip(axes, (layers.norm_ratio, layers.gap), strict=True):
            count = len(MODELS)
            style = MODELS[number % count] | {"linestyle": DASHES[(number + number // count) % len(DASHES)]}
            draw_curve(axis, range(len(curve.mean)), curve, label=plain(name, 40), **style)
    axes[0].set(ylabel="norm, visual over text", yscale="log", xlabel="layer")
    axes[1].set(ylabel="cosine, visual − text", xlabel="layer")
    for axis, level in zip(axes, (1, 0), strict=True):
        axis.axhline(level, color=FAINT, linewidth=0.6, zorder=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, handlelength=3)
    return figure


@styled
def draw_norms(names: Sequence[str], models: Sequence[Layers]) -> Figure:
    """Quantiles of the tokens' norms by layer as bands, a column for each modality."""
    figure, axes = _grid(names, 2, sharey="all")
    for row, layers in zip(axes, models, strict=True):
        for axis, (modality, colour) in zip(row, MODALITY_COLOURS.items(), strict=True):
            quantiles = list(layers.of(modality).norm_quantiles.values())
            x = range(len(quantiles[0]))
            for low, high in zip(quantiles[: len(quantiles) // 2], reversed(quantiles), strict=False):
                axis.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
            if len(quantiles) % 2:
                axis.plot(x, quantiles[len(quantiles) // 2], color=colour)
            axis.set(ylabel=f"norm of {modality} tokens", yscale="log")
    return figure


@styled
def draw_updates(names: Sequence[str], models: Sequence[Layers]) -> Figure:
    """Norm of each layer's update relative to the token's, and its direction."""

    def panels(layers: Layers) -> list[Panel]:
        return [
            Panel("update over token", _by_modality(layers, "update_ratio"), log=True),
            Panel("cosine of the update", _by_modality(layers, "update_cosine"), level=0),
        ]

    return _draw_rows(names, models, panels)


@styled
def draw_attraction(names: Sequence[str], models: Sequence[Attractions]) -> Figure:
    """Do updates correlate, and do tokens of one modality move towards the other's, by layer."""

    def panels(found: Attractions) -> list[Panel]:
        towards = {"visual": found.attraction_visual_to_text, "text": found.attraction_text_to_visual}
        return [
            Panel("cosine of updates", {"measured": found.update_correlation}, level=0),
            Panel("attraction κ to the other", towards, level=0),
        ]

    return _draw_rows(names, models, panels)


@styled
def draw_spaces(names: Sequence[str], models: Sequence[tuple[Space | None, Space | None]], share: bool) -> Figure:
    """Distance of visual and text tokens as keys and as values, with halves of the pictures as the baseline.

    Args:
        names: Of the models.
        models: Keys and values of each.
        share: Whether the models' keys have a common basis, so that they share an axis.
    """

    def panels(spaces: tuple[Space | None, Space | None]) -> list[Panel]:
        known = {kind: space for kind, space in zip(("keys", "values"), spaces, strict=True) if space is not None}
        found = []
        for name, title in (("mmd", "MMD²"), ("js", "Jensen-Shannon (bits)"), ("probe", "accuracy of a probe")):
            layers = sorted({layer for space in known.values() for layer in space.layers})
            curves = {kind: _spread_over(layers, space, getattr(space, name)) for kind, space in known.items()}
            for kind, space in known.items() if name != "probe" else ():
                baseline = getattr(space, f"{name}_baseline")
                halves = Curve(baseline, [None] * len(baseline))
                curves[f"halves of {kind}"] = _spread_over(layers, space, halves)
            found.append(Panel(title, curves, layers))
        return found

    return _draw_rows(names, models, panels, share)


def _spread_over(layers: Sequence[int], space: Space, curve: Curve) -> Curve:
    """The curve over more layers, NaN where it has no value."""
    found = {
        layer: (mean, interval) for layer, mean, interval in zip(space.layers, curve.mean, curve.interval, strict=True)
    }
    pairs = [found.get(layer, (math.nan, None)) for layer in layers]
    return Curve([mean for mean, _ in pairs], [interval for _, interval in pairs])


@styled
def draw_lengths(names: Sequence[str], models: Sequence[tuple[str, Space]]) -> Figure:
    """Norm and spread by modality, of `"keys"` or `"values"`: a row for each."""

    def panels(named: tuple[str, Space]) -> list[Panel]:
        kind, space = named
        pairs = {"norm": space.norm, "spread": space.spread}
        return [
            Panel(f"{title} of {kind}", {"visual": pair.visual, "text": pair.text}, space.layers, log=True)
            for title, pair in pairs.items()
        ]

    return _draw_rows(names, models, panels, share=False)


@styled
def draw_heads(names: Sequence[str], models: Sequence[Attention]) -> Figure:
    """Attention mass on the picture by layer and head, on one scale for all models."""
    columns = min(len(names), 3)
    figure, axes = plt.subplots(
        -(-len(names) // columns),
        columns,
        figsize=(WIDTH, 2.6 * -(-len(names) // columns)),
        squeeze=False,
        layout="constrained",
    )
    scale = Normalize(0, max(np.nanmax(attention.mass_by_head) for attention in models))
    for axis, name, attention in zip_longest(axes.flat, names, models):
        if attention is None:
            axis.axis("off")
            continue
        masses = np.array(attention.mass_by_head).T  # (num_heads, num_layers)
        axis.imshow(masses, aspect="auto", origin="lower", cmap="viridis", norm=scale, interpolation="nearest")
        _set_title(axis, plain(name, 30))
        step = -(-len(attention.layers) // 10)
        axis.set_xticks(range(0, len(attention.layers), step), attention.layers[::step])
        axis.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axis.set(xlabel="layer", ylabel="head")
    figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, label="attention to the picture", pad=0.02)
    return figure


@styled
def draw_tsne(names: Sequence[str], placed: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> Figure:
    """t-SNE of one layer's keys, a column for each model."""
    figure, axes = plt.subplots(
        1, len(names), figsize=(min(WIDTH, 3.5 * len(names)), 2.6), squeeze=False, layout="constrained"
    )
    for axis, name, (layer, *points) in zip(axes[0], names, placed, strict=True):
        for (modality, colour), of, marker in zip(MODALITY_COLOURS.items(), points, "o^", strict=True):
            axis.scatter(*of.T, s=7, color=colour, marker=marker, linewidth=0, alpha=0.8, label=modality)
        axis.set(xticks=[], yticks=[], xlabel=f"layer {layer}")
        _set_title(axis, plain(name, 30))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


@styled
def draw_maps(names: Sequence[str], pictures: Sequence[Pictures], questions: Sequence[Question]) -> Figure:
    """One query's attention over different pictures, as the model sees them, if their layout is known; a row for each
    picture and model. Colours show attention relative to an even share."""
    rows = _rows_of_maps(pictures)
    columns = 1 + max(len(pictures[model].maps[number]) for number, model in rows)
    relative = [
        {
            layer: values.numpy() / max(float(values.mean()), 1e-12)
            for layer, values in pictures[model].maps[row].items()
        }
        for row, model in rows
    ]
    everything = np.concatenate([values.ravel() for maps in relative for values in maps.values()])
    scale = Normalize(0, max(1.0, float(np.quantile(everything, 0.995))))
    side = (WIDTH - 0.7) / columns
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(WIDTH, (side + 0.36) * len(rows)), squeeze=False, layout="constrained"
    )
    for line, (number, model), maps in zip(axes, rows, relative, strict=True):
        image = pictures[model].seen[number]
        texts = [part["text"] for part in questions[number].prompt[-1]["content"] if part["type"] == "text"]
        line[0].imshow(image)
        _set_title(line[0], f"{plain(names[model], 30)}: {plain(' '.join(texts), 60)}", weight="normal")
        for axis, (layer, values) in zip(line[1:], maps.items(), strict=False):
            axis.imshow(image.convert("L"), cmap="gray")
            extent = (-0.5, image.width - 0.5, image.height - 0.5, -0.5)
            axis.imshow(values, extent=extent, alpha=0.65, cmap="inferno", norm=scale)
            axis.set_xlabel(f"layer {layer}: {pictures[model].maps[number][layer].sum():.0%}", fontsize=7)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for axis in (axis for line in axes for axis in line[1:] if not axis.images):
        axis.set_visible(False)
    bar = figure.colorbar(
        ScalarMappable(scale, "inferno"), ax=axes, extend="max", location="bottom", aspect=50, shrink=0.5
    )
    bar.set_label("attention relative to an even share")
    return figure


@styled
def draw_dynamics(points: Sequence[DynamicsPoint]) -> Figure:
    """A run's checkpoints: norms at the decoder, what the gain yields, update rates, and turning by layer (Fig. 5)."""
    steps = [point.step for point in points]
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 4.4), layout="constrained")
    for modality in MODALITY_COLOURS:
        norms = Curve.through([point.interface.at_decoder(modality) for point in points])
        rates = Curve.through([point.layers.of(modality).update_rate for point in points])
        for axis, curve in zip(axes[0], (norms, rates), strict=True):
            draw_curve(axis, steps, curve, label=modality, **LINES[modality])
    yields = [point.projector_norm.yields for point in points if point.projector_norm is not None]
    if len(yields) == len(points):
        axes[0, 0].plot(steps, yields, label="gain and bias", **LINES["evenly spread"])
    scale, colours = Normalize(min(steps), max(steps)), plt.get_cmap("viridis")
    for axis, modality in zip(axes[1], MODALITY_COLOURS, strict=True):
        for point in points:
            curve = _turning_rate(point.layers, modality)
            draw_curve(axis, range(len(curve.mean)), curve, band=0.07, color=colours(scale(point.step)))
        axis.set(xlabel="layer", ylabel=f"1 − cosine, {modality}")
        axis.sharey(axes[1, 0])
    axes[0, 0].set(xlabel="step", ylabel="norm at the decoder", yscale="log")
    axes[0, 1].set(xlabel="step", ylabel="update rate, 1 − cosine")
    figure.colorbar(ScalarMappable(scale, colours), ax=axes[1], label="step", pad=0.02)
    return figure


# Names of all figures; a report may lack some.
FIGURES = (
    "overview", "layers", "norms", "updates", "attraction", "attention", "heads", "keys", "lengths", "tsne",
    "attention_maps",
)  # fmt: skip


def draw_figures(
    report: Report, pictures: Sequence[Pictures] | None, questions: Sequence[Question]
) -> dict[str, Figure]:
    """All of a report's figures by name, those without data left out. pyplot has closed them: show or save them.

    Args:
        report: What was measured.
        pictures: Of each of its models, if any were taken.
        questions: The questions of the samples to draw.
    """
    models = report.models
    names = [model.name for model in models]
    layers, attention = [model.layers for model in models], [model.attention for model in models]
    keys, values = [model.key_space for model in models], [model.value_space for model in models]
    figures = {
        "overview": draw_layers(names, layers, attention),
        "layers": draw_gaps(names, layers),
        "norms": draw_norms(names, layers),
        "updates": draw_updates(names, layers),
        "attraction": draw_attraction(names, [model.attraction for model in models]),
    }
    looked = [(name, gazes) for name, gazes in zip(names, attention, strict=True) if gazes is not None]
    if looked:
        figures["attention"] = draw_attention(names, attention)
        figures["heads"] = draw_heads(*zip(*looked, strict=True))
    named = [
        (name, kind, space)
        for name, *spaces in zip(names, keys, values, strict=True)
        for kind, space in zip(("keys", "values"), spaces, strict=True)
        if space is not None
    ]
    if named:
        spaces = list(zip(keys, values, strict=True))
        figures["keys"] = draw_spaces(names, spaces, share=report.compare == "checkpoints")
        figures["lengths"] = draw_lengths([name for name, *_ in named], [(kind, space) for _, kind, space in named])
    if pictures is not None:
        placed = [(name, drawn.keys) for name, drawn in zip(names, pictures, strict=True) if drawn.keys is not None]
        if placed:
            figures["tsne"] = draw_tsne(*zip(*placed, strict=True))
        if _rows_of_maps(pictures):
            figures["attention_maps"] = draw_maps(names, pictures, questions)
    return figures


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix."""
    with plt.rc_context({"pdf.fonttype": 42}):  # text stays text
        figure.savefig(path, dpi=160)


def to_svg(figure: Figure, name: str) -> str:
    """A figure as SVG to embed in a page: its ids start with `name`.

    Colours become CSS variables (`--d55e00`), so that a page can change them in dark mode.
    """
    file = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()

    def in_tag(tag: re.Match[str]) -> str:
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", tag[0])
        text = re.sub(rf"#({_COLOURS})\b", r"var(--\1, #\1)", text)
        return re.sub(r' (?:width|height)="[\d.]+pt"', "", text)

    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    return re.sub(r"<!--.*?-->|<[^>]*>", lambda tag: "" if tag[0].startswith("<!") else in_tag(tag), svg, flags=re.S)


_COLOURS = "|".join(colour[1:] for colour in (INK, FAINT, GREEN, PURPLE, YELLOW, SKY, *MODALITY_COLOURS.values()))


def plain(text: str, length: int) -> str:
    """Text of models and data as a label: without unprintable characters, and cut to `length`."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def _by_modality(layers: Layers, name: str) -> dict[str, Curve]:
    return {modality: getattr(layers.of(modality), name) for modality in MODALITY_COLOURS}


def _turning_rate(layers: Layers, modality: str) -> Curve:
    cosine = layers.of(modality).cosine
    intervals = [interval and (1 - interval[1], 1 - interval[0]) for interval in cosine.interval]
    return Curve([1 - mean for mean in cosine.mean], intervals)


def _grid(names: Sequence[str], columns: int, sharey: Any) -> tuple[Figure, np.ndarray]:
    """A row of axes for each name, over layers."""
    figure, axes = plt.subplots(
        len(names),
        columns,
        figsize=(WIDTH, 0.2 + 1.8 * len(names)),
        sharey=sharey,
        squeeze=False,
        layout="constrained",
    )
    for row, name in zip(axes, names, strict=True):
        _set_title(row[0], plain(name, 80))
        for axis in row:
            axis.margins(x=0.02)
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    return figure, axes


def _set_title(axis: Axes, title: str, weight: str = "bold") -> None:
    """A title over the left corner that may extend past the axes: the layout reserves its height, not its width."""
    axis.set_title(" ")
    axis.annotate(
        title, (0, 1), (0, 6), "axes fraction", "offset points", fontweight=weight, annotation_clip=False
    ).set_in_layout(False)


def _draw_rows(
    names: Sequence[str], models: Sequence[T], panels: Callable[[T], Sequence[Panel]], share: bool = True
) -> Figure:
    """A row of panels for each model; `share` gives all panels of a column the same scale."""
    rows = [panels(model) for model in models]
    figure, axes = _grid(names, len(rows[0]), "col" if share else False)
    for line, row in zip(axes, rows, strict=True):
        for axis, panel in zip(line, row, strict=True):
            _draw_panel(axis, panel)
    return figure


def _draw_panel(axis: Axes, panel: Panel) -> None:
    axis.set(ylabel=panel.label, yscale="log" if panel.log else "linear")
    known = {name: curve for name, curve in panel.curves.items() if curve and np.isfinite(curve.mean).any()}
    for name, curve in known.items():
        draw_curve(axis, panel.layers or range(len(curve.mean)), curve, label=name, **LINES[name])
    if not known:
        axis.text(0.5, 0.5, "not recorded", ha="center", color=FAINT, transform=axis.transAxes)
    elif panel.level is not None:
        axis.axhline(panel.level, color=FAINT, linewidth=0.6, zorder=0)


def _choose_ticks(axis: Axes) -> None:
    """Integer ticks for layers; a few round numbers for log axes, whatever the range."""
    if axis.lines:
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if axis.get_yscale() == "log":
        low, high = axis.get_ylim()
        powers = LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,))
        axis.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else powers)
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _label_ends(axis: Axes) -> None:
    """Each line's name right of the axes, at the height of its end, without overlap."""
    ends = []
    for line in axis.get_lines():
        points = np.asarray(line.get_xydata())
        known = points[np.isfinite(points).all(axis=1)]
        if not str(line.get_label()).startswith("_") and len(known):
            ends.append((float(axis.transAxes.inverted().transform(axis.transData.transform(known[-1]))[1]), line))
    ends.sort(key=lambda end: end[0])
    apart = 8.5 * axis.figure.dpi / 72 / axis.get_window_extent().height
    heights = [height for height, _ in ends]
    for number in range(1, len(heights)):
        heights[number] = max(heights[number], heights[number - 1] + apart)
    for number in reversed(range(len(heights))):
        heights[number] = min(heights[number], 1 - apart * (len(heights) - 1 - number))
    for height, (_, line) in zip(heights, ends, strict=True):
        axis.annotate(
            str(line.get_label()), (1, height), (4, 0), "axes fraction", "offset points",
            color=line.get_color(), va="center", fontsize=7, annotation_clip=False,
        )  # fmt: skip


def _rows_of_maps(pictures: Sequence[Pictures]) -> list[tuple[int, int]]:
    """Sample and model numbers of the maps to draw, over different pictures."""
    first = {image.tobytes(): number for number, image in reversed(list(enumerate(pictures[0].seen)))}
    return [
        (number, model)
        for number in sorted(first.values())
        for model, drawn in enumerate(pictures)
        if drawn.maps[number]
    ]
