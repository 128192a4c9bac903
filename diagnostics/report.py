"""The report of one or several models, in sentences and as a self-contained page."""

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from scipy.special import stdtrit

from diagnostics import keys, measures
from diagnostics.model_report import ModelReport
from diagnostics.plots import FIGURES
from diagnostics.table import LEVEL, Estimate, Summary, subtract, summarize, with_means
from diagnostics.tokens import SINK_FACTOR


DIFFERENCE = "difference (second − first)"
# Chapters of the page: title, figures, and how the names of its measures begin. All others come last.
CHAPTERS = {
    "Norms up to the decoder": ((), r"encoder_output|projector_|at_decoder|in_prompt|vocabulary|ratio"),
    "Norm and turning by layer": (("layers",), r"norm|turning|gap|update_"),
    "The norm after the projector": ((), r"gain_|bias_"),
    "Attention to the picture": (("attention_maps",), r"attention"),
    "Keys and values": (("keys", "tsne"), r"keys\.|values\."),
    "Other measures": ((), r""),
}


@dataclass(frozen=True)
class Report:
    """What `report.json` holds: which models were measured, and on what.

    Attributes:
        command: Command that made it.
        versions: Of torch and transformers.
        data: Name of the file or folder.
        num_pictures: How many, with a question each.
        passed_over: Number of skipped rows without a picture.
        unreadable: Skipped rows that can't be read, and why.
        models: One report each.
    """

    command: str
    versions: dict[str, str]
    data: str
    num_pictures: int
    passed_over: int
    unreadable: list[str]
    models: list[ModelReport]


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, and none after the point from 1,000 on; a dash for a missing value."""
    if value is None or math.isnan(value):
        return "–"
    whole = isinstance(value, int) or abs(float(f"{value:.{digits}g}")) >= 1000
    shown = f"{value:,.0f}" if whole else f"{value:.{digits}g}"
    return shown.replace("-", "−", 1) if value < 0 else shown


def with_interval(estimate: Estimate, unit: str = "") -> str:
    """A mean with its 95% interval, to two significant digits of the interval's width, five digits at most."""
    values, width = tuple(estimate), estimate.high - estimate.low
    if not all(map(math.isfinite, values)):
        return number(estimate.mean) + unit
    if width <= 1e-4 * max(map(abs, values)):
        return f"{number(estimate.mean, 5)}{unit} (± {width / 2:.1g}{unit})"
    places = 1 - math.floor(math.log10(width))
    if places > 6:
        shown = [f"{value:.1e}" for value in values]
    else:
        places = max(0, places)
        shown = [f"{round(value, places) + 0.0:,.{places}f}" for value in values]  # no "-0"
    mean, low, high = (re.sub(r"^-", "−", text) for text in shown)
    return f"{mean}{unit} ({low} to {high}{unit})"


def summarize_report(report: Report) -> list[str]:
    """The main results in sentences: the data, then each model's results."""
    answers = [f"{model.name}: {text}" for model in report.models for text in headline(model).values()]
    return [measured_on(report), *answers]


def headline(model: ModelReport) -> dict[str, str]:
    """One model's main results by topic."""
    thirds, summary = model.thirds, model.summary

    def said(measure: str) -> list[str]:
        return [with_interval(summary.look(f"{measure}, {name}") or Estimate(math.nan)) for name in thirds]

    ratio = with_interval(summary.look("ratio") or Estimate(math.nan))
    found = {
        "Norm": f"Over {count(model.num_pictures, 'picture')}, visual tokens enter the decoder with {ratio} times the "
        f"norm of text tokens. In the {listed(thirds)} of its layers: {listed(said('norm_ratio'))}.",
        "Turning": _say_turning(summary, thirds, said("gap")),
    }
    attention, even = summary.look("attention"), summary.look("attention_even")
    if attention is not None and even is not None:
        shares = [with_interval(Estimate(*(100 * value for value in of)), "%") for of in (attention, even)]
        layers = count(len(summary.curve("attention")), "layer")
        found["Attention"] = (
            f"Of the text's attention {shares[0]} falls on the picture, against {shares[1]} for uniform attention; "
            f"means over {layers}."
        )
    mmd = summary.look("keys.mmd")
    if mmd is not None:
        found["Keys"] = _say_keys(summary, mmd)
    return found


def pace(gap: Estimate) -> str:
    """How visual tokens turn compared with text, by a gap of cosines with an interval."""
    return "more slowly" if gap.low > 0 else "faster" if gap.high < 0 else "no clear difference"


def _say_turning(summary: Summary, thirds: Sequence[str], gaps: Sequence[str]) -> str:
    estimates = [summary.look(f"gap, {name}") or Estimate(math.nan) for name in thirds]
    if any(math.isnan(gap.low) for gap in estimates):
        told = "; ".join(f"{gap} in the {name}" for gap, name in zip(gaps, thirds, strict=True))
        return f"The gap of cosines is {told}. Without an interval this can't be told from no difference."
    told = "; ".join(
        f"{pace(gap)} in the {name}, {text}" for gap, name, text in zip(estimates, thirds, gaps, strict=True)
    )
    largest = largest_gap(summary)
    return (
        f"Visual tokens turn, compared with text tokens by the gap of cosines: {told}. The gap is largest at layer "
        f"{largest[0]}: {with_interval(largest[1])}."
    )


def largest_gap(summary: Summary) -> tuple[int, Estimate]:
    """The layer whose cosines differ most, and its gap; the interval is corrected for the choice among all layers
    (Bonferroni)."""
    gaps = summary.curve("gap")
    layer, mean, high, n = gaps.loc[gaps["mean"].abs().idxmax(), ["layer", "mean", "high", "n"]]
    ends = stdtrit(n - 1, [(1 + LEVEL) / 2, 1 - (1 - LEVEL) / (2 * len(gaps))])
    half = (high - mean) * ends[1] / ends[0]
    return int(layer), Estimate(mean, mean - half, mean + half)


def _say_keys(summary: Summary, mmd: Estimate) -> str:
    halves = summary.look("keys.mmd_halves")
    beside = (
        "there are too few pictures to compare halves"
        if halves is None
        else f"in 95% of random halves of the pictures, within a modality, it is below {number(halves.mean, 2)}"
    )
    text = f"MMD² between keys of visual and text tokens is {with_interval(mmd)}; {beside}"
    p_values, smallest = summary.curve("keys.p_value")["mean"], summary.look("keys.smallest_p")
    if smallest is None:
        return f"{text}."
    low, high = p_values.min(), p_values.max()
    shown = f"p is {number(low, 2)} in every layer" if low == high else f"p is {number(low, 2)} to {number(high, 2)}"
    swaps = count(round(1 / smallest.mean), "swap")
    floor = f" ({number(low, 2)} is the smallest possible with {swaps})" if low == smallest.mean else ""
    return f"{text}; {shown}{floor}."


def listed(names: Sequence[str]) -> str:
    """The names with commas and "and"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def count(number_: int, thing: str) -> str:
    """A number of things."""
    return f"{number_:,} {thing}{'s' * (number_ != 1)}"


def measured_on(report: Report) -> str:
    """How many models were measured on what."""
    pictures = count(report.num_pictures, "picture")
    text = f"{count(len(report.models), 'model')} on {pictures} with a question each ({report.data}). "
    if report.num_pictures == 1:
        return text + "With one picture there are no intervals."
    return text + "95% intervals over pictures are in brackets."


def make_tables(models: Sequence[ModelReport], rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By chapter, a row for each measure and modality, and a column for each model; of two models also their paired
    difference. Means over layers. Keys and values of two models share no scale, so these have no difference.

    Args:
        models: The models.
        rows: All their rows.
    """
    columns, cells = [model.name for model in models], {}
    of_columns = {model.name: model.summary.frame for model in models}
    if len(models) == 2:
        first, second = (with_means(rows[rows["model"] == name]) for name in columns)
        pairs = summarize(subtract(second, first))
        is_apart = pairs["measure"].str.match(CHAPTERS["Keys and values"][1])
        columns.append(DIFFERENCE)
        of_columns[DIFFERENCE] = pairs[pairs["low"].notna() & ~is_apart]
    for name, frame in of_columns.items():
        for of in frame[frame["layer"].isna()].itertuples():
            shown = with_interval(Estimate(of.mean, of.low, of.high))
            cells.setdefault((of.measure, of.modality), {})[name] = shown
    tables: dict[str, dict[str, dict[str, str]]] = {title: {} for title in CHAPTERS}
    for (measure, modality), line in cells.items():
        title = next(title for title, (_, names) in CHAPTERS.items() if re.match(names, measure))
        label = ", ".join(filter(None, (measure.replace("_", " ").replace(".", ": "), modality)))
        tables[title][label] = {**dict.fromkeys(columns, "–"), DIFFERENCE: "", **line}
    return {title: pd.DataFrame.from_dict(of, orient="index", columns=columns) for title, of in tables.items() if of}


def describe_models(report: Report) -> pd.DataFrame:
    """What was measured and left out, a column for each model."""
    told = {}
    for model in report.models:
        told[model.name] = {
            "class": model.class_,
            "weights": model.dtype,
            "layers": number(model.num_layers),
            "width": number(model.hidden_size),
            "pictures": number(model.num_pictures),
            **{f"{modality} tokens": number(tokens) for modality, tokens in model.num_tokens.items()},
            **{f"left out: {reason}": number(tokens) for reason, tokens in model.excluded.items()},
        }
    return pd.DataFrame(told).fillna("–")


def render_html(report: Report, rows: pd.DataFrame, figures: Path) -> str:
    """The report as one self-contained page.

    Args:
        report: What was measured.
        rows: All rows of its models.
        figures: Folder of PNG files by the names of `FIGURES`; missing ones are left out.
    """
    images = {
        name: base64.b64encode((figures / f"{name}.png").read_bytes()).decode()
        for name in FIGURES
        if (figures / f"{name}.png").exists()
    }
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    return environment.get_template("report.html.jinja").render(
        report=report,
        measured_on=measured_on(report),
        headlines={model.name: headline(model) for model in report.models},
        chapters=CHAPTERS,
        tables={title: of.to_html(border=0) for title, of in make_tables(report.models, rows).items()},
        images=images,
        captions=FIGURES,
        described=describe_models(report).to_html(border=0),
        definitions={"Norms, turning, attention": measures.DEFINITIONS, "Keys and values": keys.DEFINITIONS},
        sink_factor=SINK_FACTOR,
    )
