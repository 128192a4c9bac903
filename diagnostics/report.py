"""The report of one or several models, in sentences and as a self-contained page."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, Template

from diagnostics import divergence, key_map, keys
from diagnostics.parts import layer_groups
from diagnostics.table import Estimate, Summary, subtract_rows, summaries_by_dose, summarize_rows, with_means
from diagnostics.tokens import SINK_FACTOR
from diagnostics.verdict import LARGER, SMALLER, SMALLEST, judge_sweep


DIFFERENCE = "difference (second − first)"


class Chapter(NamedTuple):
    """A chapter of the page: its figures, and how the names of its measures begin."""

    figures: tuple[str, ...]
    measures: tuple[str, ...]


KEYS_AND_VALUES = "Keys and values"
OTHER_MEASURES = "Other measures"  # what no chapter names
CHAPTERS = {
    "Norms up to the decoder": Chapter(
        (), ("encoder_output", "projector_", "at_decoder", "in_prompt", "vocabulary", "ratio")
    ),
    "Norm and turning by layer": Chapter(("layers",), ("norm", "turning", "gap", "update_")),
    "The norm after the projector": Chapter((), ("gain_", "bias_")),
    "Attention to the picture": Chapter(("attention_map",), ("attention",)),
    KEYS_AND_VALUES: Chapter(("keys", "key_map"), ("keys.", "values.")),
    OTHER_MEASURES: Chapter((), ()),
}


@dataclass(frozen=True)
class ModelReport:
    """What was measured of one model.

    Attributes:
        name: Name in the report.
        model_class, dtype, num_layers, hidden_size: Of the model; a quantized one's dtype says so.
        num_pictures: How many, with a question each.
        num_tokens: By modality.
        excluded: Number of excluded tokens by reason.
        notes: What could not be recorded, and why.
        summary: The numbers.
        sweep: What a sweep found, in sentences.
        weights: [`~common.files.fingerprint`] of the weights; `None` if they are not in a local folder.
    """

    name: str
    model_class: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_pictures: int
    num_tokens: dict[str, int]
    excluded: dict[str, int]
    notes: list[str]
    summary: Summary
    sweep: list[str] = field(default_factory=list)
    weights: str | None = None


@dataclass(frozen=True)
class Report:
    """What `report.json` holds: which models were measured, and on what.

    Attributes:
        command: Command that made it.
        versions: Of torch and transformers.
        data: Name of the file or folder.
        passed_over: Number of skipped rows without a picture.
        unreadable: Skipped rows that can't be read, and why.
        models: One report each.
    """

    command: str
    versions: dict[str, str]
    data: str
    passed_over: int
    unreadable: list[str]
    models: list[ModelReport]


def measured_on(report: Report) -> str:
    """How many models were measured on what."""
    count = report.models[0].num_pictures
    intervals = "95% intervals over pictures are in brackets" if count > 1 else "one gives no intervals"
    pictures = f"pictures with a question each: {count} ({report.data})"
    return f"Models: {len(report.models)}; {pictures}; {intervals}."


def sentences(model: ModelReport) -> list[str]:
    """One model's main results."""
    thirds = list(layer_groups(model.num_layers))
    speeds = {third: compare_turning(model.summary.look(f"gap, {third}")) for third in thirds}
    return _render_lines("sentences.jinja", model=model, summary=model.summary, thirds=thirds, speeds=speeds)


def compare_turning(gap: Estimate | None) -> str:
    """How image tokens turn beside text tokens: the gap of cosines differs from 0 where its whole interval does."""
    if gap is not None and gap.low > 0:
        return "more slowly"
    if gap is not None and gap.high < 0:
        return "faster"
    return "no clear difference"


def tell_sweep(rows: pd.DataFrame) -> list[str]:
    """The main results of one model's rows of [`~diagnostics.norm_sweep.sweep_model`]."""
    verdict = judge_sweep(summaries_by_dose(rows))
    return _render_lines("sweep.jinja", verdict=verdict, smaller=SMALLER, larger=LARGER, smallest=SMALLEST)


def format_number(value: float, digits: int = 3) -> str:
    """Three significant digits, and none after the point from 1,000 on; a dash for a missing value."""
    if math.isnan(value):
        return "–"
    rounded = f"{value:.{digits}g}"
    if abs(float(rounded)) >= 1000:
        rounded = f"{value:,.0f}"
    return with_minus(rounded)


def with_minus(text: str) -> str:
    """A number's text with a minus sign in the place of a leading hyphen."""
    return "−" + text[1:] if text.startswith("-") else text


def with_interval(estimate: Estimate) -> str:
    """A mean with its 95% interval, to two significant digits of the interval's width, five digits at most."""
    width = estimate.high - estimate.low
    if not math.isfinite(width):
        return format_number(estimate.mean)

    largest = max(abs(estimate.mean), abs(estimate.low), abs(estimate.high))
    if width <= 1e-4 * largest:
        return f"{format_number(estimate.mean, 5)} (± {width / 2:.1g})"

    places = max(0, 1 - math.floor(math.log10(width)))
    mean = _rounded(estimate.mean, places)
    low = _rounded(estimate.low, places)
    high = _rounded(estimate.high, places)
    return f"{mean} ({low} to {high})"


def _rounded(value: float, places: int) -> str:
    rounded = round(value, places) + 0.0  # no "-0"
    return with_minus(f"{rounded:,.{places}f}")


def describe_change(change: Estimate) -> str:
    """A change with its interval; an interval of no width around 0 is said in words."""
    if change.low == 0 and change.high == 0:
        return "nothing (all pictures agree)"
    return with_interval(change)


def make_tables(models: Sequence[ModelReport], rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By chapter, a row for each measure and modality, and a column for each model. Means over layers.

    Of two models also their paired difference, from all their `rows`.
    """
    frames = {model.name: model.summary.frame for model in models}
    if len(models) == 2:
        frames[DIFFERENCE] = paired_difference(models[0].name, models[1].name, rows)

    # By measure and modality, the text of each column that has a value.
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for column, frame in frames.items():
        for row in frame[frame["layer"].isna()].itertuples():
            shown = with_interval(Estimate(row.mean, row.low, row.high))
            cells.setdefault((row.measure, row.modality), {})[column] = shown

    missing = {column: "" if column == DIFFERENCE else "–" for column in frames}
    tables: dict[str, dict[str, dict[str, str]]] = {title: {} for title in CHAPTERS}
    for (measure, modality), shown_by_column in cells.items():
        label = measure.replace("_", " ").replace(".", ": ")
        if modality:
            label = f"{label}, {modality}"
        tables[find_chapter(measure)][label] = {**missing, **shown_by_column}

    return {
        title: pd.DataFrame.from_dict(table, orient="index", columns=list(frames))
        for title, table in tables.items()
        if table
    }


def paired_difference(first: str, second: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The second model less the first, as [`summarize_rows`] returns it, where it has an interval.

    Keys and values of two models share no scale, so have none.
    """
    rows_of_first = with_means(rows[rows["model"] == first])
    rows_of_second = with_means(rows[rows["model"] == second])
    difference = summarize_rows(subtract_rows(rows_of_second, rows_of_first))
    has_scale = ~difference["measure"].str.startswith(CHAPTERS[KEYS_AND_VALUES].measures)
    return difference[difference["low"].notna() & has_scale]


def find_chapter(measure: str) -> str:
    """The title of the chapter that a measure is in."""
    for title, chapter in CHAPTERS.items():
        if measure.startswith(chapter.measures):
            return title
    return OTHER_MEASURES


def render_html(report: Report, rows: pd.DataFrame, figures: Path) -> str:
    """The report as one self-contained page, of all rows of its models, and a folder of PNG files by the names of
    `FIGURES`, some of which may be missing."""
    images = {path.stem: base64.b64encode(path.read_bytes()).decode() for path in figures.glob("*.png")}
    tables = make_tables(report.models, rows)
    return _template("report.html.jinja").render(
        report=report,
        measured_on=measured_on(report),
        sentences={model.name: sentences(model) for model in report.models},
        swept={model.name: model.sweep for model in report.models},
        chapters=CHAPTERS,
        tables={title: table.to_html(border=0) for title, table in tables.items()},
        images=images,
        keys=keys,
        divergence=divergence,
        key_map=key_map,
        sink_factor=SINK_FACTOR,
    )


def _render_lines(name: str, **values: object) -> list[str]:
    """The lines of a rendered template that aren't empty."""
    lines = _template(name).render(values).splitlines()
    return [line.strip() for line in lines if line.strip()]


def _template(name: str) -> Template:
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=name.endswith("html.jinja"), trim_blocks=True)
    environment.filters["change"] = describe_change
    environment.filters["interval"] = with_interval
    environment.filters["number"] = format_number
    return environment.get_template(name)
