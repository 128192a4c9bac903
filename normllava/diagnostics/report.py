"""Makes the report of one or several models: a box with a few lines on each, and a self-contained page."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, Template

from normllava.diagnostics import divergence, key_map, keys
from normllava.diagnostics.scaling import UNCHANGED_DOSE
from normllava.diagnostics.table import Estimate, Summary, subtract_rows, summaries_by_dose, summarize_rows, with_means
from normllava.diagnostics.training_answers import TrainingAnswer
from normllava.diagnostics.verdict import (
    LARGER,
    SMALLER,
    Advice,
    Score,
    Turning,
    Verdict,
    clip_share,
    judge_sweep,
    judge_turning,
)
from normllava.parts import layer_groups
from normllava.tokens import SINK_FACTOR


# Title of the column with the difference of two models.
DIFFERENCE = "difference (second − first)"


class Chapter(NamedTuple):
    """A chapter of the report's page, on some measures.

    Attributes:
        figures: Names of the chapter's figures.
        measures: Prefixes of the names of the chapter's measures.
    """

    figures: tuple[str, ...]
    measures: tuple[str, ...]


KEYS_AND_VALUES = "Keys and values"
# The chapter of measures whose names begin with no prefix of another chapter.
OTHER_MEASURES = "Other measures"
# The chapters by title, in the order of the page. One figure stands before all chapters and not in its own
# chapter: the sweep's figure or, without a sweep, "overview".
CHAPTERS = {
    "Norms up to the decoder": Chapter(
        figures=(),
        measures=("encoder_output", "projector_", "at_decoder", "in_prompt", "vocabulary", "ratio"),
    ),
    "Norm and turning by layer": Chapter(figures=("overview", "layers"), measures=("norm", "turning", "gap")),
    "The norm after the projector": Chapter(figures=(), measures=("gain_", "bias_")),
    "Attention to the picture": Chapter(figures=("attention_map",), measures=("attention",)),
    KEYS_AND_VALUES: Chapter(figures=("keys", "key_map"), measures=("keys.", "values.")),
    OTHER_MEASURES: Chapter(figures=(), measures=()),
}
# Columns of the table of a sweep, by the measure's name in sweep.csv. "less × 1" means minus the value at dose 1.
SWEEP_COLUMNS = {
    "named": "share of right answers",
    "named_change": "right answers, less × 1",
    "loss": "loss of the right answer",
    "loss_change": "loss, less × 1",
    "changed": "share of answers that change",
}


@dataclass(frozen=True)
class ModelReport:
    """What was measured of one model.

    Attributes:
        name: The model's name in the report.
        model_class: Name of the model's class.
        dtype: Dtype of the weights, and whether they are quantized.
        num_layers: Number of the decoder's layers.
        hidden_size: Width of the decoder.
        num_pictures: Number of pictures, each with a question.
        num_tokens: Number of image tokens and of text tokens, by modality.
        excluded: Number of excluded tokens, by the reason why they are excluded.
        notes: What could not be recorded, and why.
        summary: The results, as means over pictures.
        sweep: The lines on the sweep in the model's box, which is at the top of the page; empty without a sweep.
        weights: Fingerprint of the weights; `None` if they are not in a local folder.
        answers: What the model answered to held-out rows while it was trained; empty if that isn't known.
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
    answers: list[TrainingAnswer] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The content of `report.json`: the models that were measured, their results, and the data.

    Attributes:
        command: Command that made the report.
        versions: Versions of torch and transformers.
        data: Name of the file or folder with the data.
        passed_over: Number of rows that were skipped because they have no picture before the first answer.
        unreadable: A line for each row that was skipped because it can't be read.
        models: A report of each model.
    """

    command: str
    versions: dict[str, str]
    data: str
    passed_over: int
    unreadable: list[str]
    models: list[ModelReport]


class SweepChapter(NamedTuple):
    """What the page shows of one model's sweep.

    Attributes:
        verdict: The judgement.
        table: The scores at each dose, as HTML.
    """

    verdict: Verdict
    table: str


def measured_on(report: Report) -> str:
    """A sentence on what was measured, and for several pictures another on what "clear" means in the report."""
    num_pictures = report.models[0].num_pictures
    if num_pictures == 1:
        return f"Measured on one picture ({report.data}), which gives no intervals: nothing is judged."
    measured = f"Measured on {num_pictures} pictures with a question each ({report.data})."
    return f"{measured} “Clear” means that the 95% interval over pictures lies on one side of no difference."


def box_lines(model: ModelReport) -> list[str]:
    """The lines of one model's box, at most five: the most important numbers, judgements, and what to do."""
    gaps = {third: model.summary.look(f"gap, {third}") for third in layer_groups(model.num_layers)}
    return _render_lines("box.jinja", model=model, summary=model.summary, turning=judge_turning(gaps), Turning=Turning)


def tell_sweep(rows: pd.DataFrame) -> list[str]:
    """The box's two lines on one model's sweep, from the sweep's rows: the answers, and what to do."""
    verdict = judge_sweep(summaries_by_dose(rows))
    return _render_lines("sweep.jinja", verdict=verdict, smaller=SMALLER, larger=LARGER, Advice=Advice, Score=Score)


def format_number(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, or as an integer from 1,000 on; a dash for NaN."""
    if math.isnan(value):
        return "–"
    rounded = f"{value:.{digits}g}"
    if abs(float(rounded)) >= 1000:
        rounded = f"{value:,.0f}"
    return with_minus(rounded)


def format_factor(value: float) -> str:
    """A factor with two significant digits, as in "0.97", "1.0" or "37"; from 100 on as an integer."""
    if value >= 99.5:  # rounds to 100 or more
        return f"{value:,.0f}"
    return f"{value:#.2g}".rstrip(".")  # `#` keeps the zero of "1.0", and writes "37."


def format_percent(share: float) -> str:
    """A share as a percentage, without decimals from 10% on; only 1 is 100%, and only 0 is 0%."""
    percent = 100 * share
    if 99.5 <= percent < 100:  # would round to 100
        return "over 99%"
    if percent >= 9.95:  # rounds to 10 or more
        return f"{percent:.0f}%"
    return f"{percent:.2g}%"


def with_minus(text: str) -> str:
    """The text of a number, with a minus sign in place of the hyphen that Python writes."""
    if text.startswith("-"):
        return "−" + text[1:]
    return text


def with_interval(estimate: Estimate) -> str:
    """A mean with its 95% interval, as in "1.51 (1.42 to 1.60)".

    All three numbers are rounded to two significant digits of the interval's width. Without an interval, only the mean
    is shown.
    """
    width = estimate.high - estimate.low
    if not math.isfinite(width):
        return format_number(estimate.mean)

    # All pictures have the same value, but for the rounding of float32.
    largest = max(abs(estimate.mean), abs(estimate.low), abs(estimate.high))
    if width <= 1e-6 * largest:
        return f"{format_number(estimate.mean, digits=5)} (± 0)"

    # The ends of a very narrow interval differ only after many digits. So half of the interval's width is shown in
    # place of the ends, as in "1.13277 (± 0.00004)". The mean is shown down to the second digit of the width.
    if width <= 1e-4 * largest:
        digits = 1 - math.floor(math.log10(width / largest))
        decimals = max(0, -math.floor(math.log10(width / 2)))
        return f"{format_number(estimate.mean, digits)} (± {width / 2:.{decimals}f})"

    # For a width of 0.18 these are two decimals, for 18 none.
    decimals = max(0, 1 - math.floor(math.log10(width)))
    mean = _format_decimals(estimate.mean, decimals)
    low = _format_decimals(estimate.low, decimals)
    high = _format_decimals(estimate.high, decimals)
    return f"{mean} ({low} to {high})"


def _format_decimals(value: float, decimals: int) -> str:
    """A number with this many decimals."""
    rounded = round(value, decimals) + 0.0  # adding 0.0 turns -0.0 to 0.0
    return with_minus(f"{rounded:,.{decimals}f}")


def make_tables(models: Sequence[ModelReport], rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The page's tables by the title of their chapter.

    A table has a row for each measure and modality, and a column for each model. Two models also have a column with
    their paired difference. Measures by layer are shown as means over layers.

    Args:
        models: The models' reports.
        rows: The rows of all models, with a column `model`.
    """
    frames = {model.name: model.summary.frame for model in models}
    if len(models) == 2:
        frames[DIFFERENCE] = paired_difference(models[0].name, models[1].name, rows)

    # What a column shows where it has no value: a dash, but nothing in the column of the difference, because many
    # measures have no difference.
    without_value = dict.fromkeys(frames, "–")
    if DIFFERENCE in frames:
        without_value[DIFFERENCE] = ""

    # The texts of the tables by chapter, then by the row's label, then by column.
    texts: dict[str, dict[str, dict[str, str]]] = {title: {} for title in CHAPTERS}
    for column, frame in frames.items():
        without_layer = frame[frame["layer"].isna()]
        for row in without_layer.itertuples():
            texts_of_chapter = texts[find_chapter(row.measure)]
            label = row_label(row.measure, row.modality)
            texts_of_row = texts_of_chapter.setdefault(label, without_value.copy())
            texts_of_row[column] = with_interval(Estimate(row.mean, row.low, row.high))

    tables = {}
    for title, texts_of_chapter in texts.items():
        if texts_of_chapter:
            rows_of_chapter = join_equal_rows(texts_of_chapter)
            tables[title] = pd.DataFrame.from_dict(rows_of_chapter, orient="index", columns=list(frames))
    return tables


def join_equal_rows(texts: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The rows of a table by label, in which neighbours with the same texts are one row with both labels.

    What the projector returns is in most models what enters the decoder, for instance.
    """
    joined: dict[str, dict[str, str]] = {}
    for label, texts_of_row in texts.items():
        last_label = next(reversed(joined), None)
        if last_label is not None and joined[last_label] == texts_of_row:
            joined[f"{last_label} = {label}"] = joined.pop(last_label)
        else:
            joined[label] = texts_of_row
    return joined


def make_sweep_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The table of one model's sweep: for each dose, the scores with intervals, and what the dose does to answers."""
    summary_by_dose = summaries_by_dose(rows)
    verdict = judge_sweep(summary_by_dose)

    texts = {}
    for dose, summary in summary_by_dose.items():
        texts_of_dose = {}
        if dose == UNCHANGED_DOSE:
            texts_of_dose["answers"] = "as it is"
        elif verdict.changes:  # empty if the answers can't be judged
            texts_of_dose["answers"] = verdict.changes[dose]

        for measure, column in SWEEP_COLUMNS.items():
            estimate = summary.look(measure)
            if estimate is None:  # the table's cell stays empty
                continue
            if measure in (Score.RIGHT_ANSWERS, Score.CHANGED_ANSWERS):  # shares
                estimate = clip_share(estimate)
            texts_of_dose[column] = with_interval(estimate)
        texts_of_dose["norm over text's"] = format_number(dose * verdict.image_norm.mean)

        texts[f"× {format_number(dose, digits=2)}"] = texts_of_dose
    return pd.DataFrame.from_dict(texts, orient="index").fillna("")


def row_label(measure: str, modality: str) -> str:
    """The label of a row: for "keys.mmd_halves" it is "keys: mmd halves"."""
    label = measure.replace("_", " ").replace(".", ": ")
    if modality:
        return f"{label}, {modality}"
    return label


def paired_difference(first: str, second: str, rows: pd.DataFrame) -> pd.DataFrame:
    """The second model's results minus the first model's results, in the form that [`summarize_rows`] returns.

    Differences without an interval are left out. So are differences of measures of keys and values, because the keys
    and values of two models share no scale.
    """
    rows_of_first = with_means(rows[rows["model"] == first])
    rows_of_second = with_means(rows[rows["model"] == second])
    difference = summarize_rows(subtract_rows(rows_of_second, rows_of_first))

    has_interval = difference["low"].notna()
    prefixes = CHAPTERS[KEYS_AND_VALUES].measures
    is_of_keys_or_values = difference["measure"].str.startswith(prefixes)
    return difference[has_interval & ~is_of_keys_or_values]


def find_chapter(measure: str) -> str:
    """The title of the chapter that a measure is in."""
    for title, chapter in CHAPTERS.items():
        if measure.startswith(chapter.measures):
            return title
    return OTHER_MEASURES


def render_html(report: Report, rows: pd.DataFrame, figures: Path, swept: pd.DataFrame | None = None) -> str:
    """The report as one self-contained page.

    Args:
        report: The report.
        rows: The rows of all models, with a column `model`.
        figures: Folder with the figures as PNG files, named as in `FIGURES`. A figure may be missing.
        swept: The rows of all models' sweeps, with a column `model`; empty or `None` without a sweep.
    """
    # The page itself holds the figures, as base64 text.
    images = {}
    for path in figures.glob("*.png"):
        images[path.stem] = base64.b64encode(path.read_bytes()).decode()
    tables = make_tables(report.models, rows)

    sweeps = {}
    if swept is not None and not swept.empty:
        for name, rows_of_model in swept.groupby("model", sort=False):
            verdict = judge_sweep(summaries_by_dose(rows_of_model))
            table = make_sweep_table(rows_of_model)
            sweeps[name] = SweepChapter(verdict, table.to_html(border=0, classes="doses"))

    # The page's definitions of the measures take numbers from the modules `keys`, `divergence` and `key_map`.
    return _load_template("report.html.jinja").render(
        report=report,
        measured_on=measured_on(report),
        boxes={model.name: box_lines(model) for model in report.models},
        lead_figure="sweep" if sweeps else "overview",
        sweeps=sweeps,
        chapters=CHAPTERS,
        keys_and_values=KEYS_AND_VALUES,
        tables={title: table.to_html(border=0) for title, table in tables.items()},
        images=images,
        keys=keys,
        divergence=divergence,
        key_map=key_map,
        sink_factor=SINK_FACTOR,
    )


def _render_lines(name: str, **values: object) -> list[str]:
    """The lines of a rendered template that aren't empty."""
    text = _load_template(name).render(values)
    lines = text.splitlines()
    return [line.strip() for line in lines if line.strip()]


def _load_template(name: str) -> Template:
    """A template of this folder, with the filters that show numbers."""
    folder = FileSystemLoader(Path(__file__).parent)
    is_html = name.endswith("html.jinja")  # the other templates are plain text, where nothing is escaped
    environment = Environment(loader=folder, autoescape=is_html, trim_blocks=True)
    environment.filters["factor"] = format_factor
    environment.filters["interval"] = with_interval
    environment.filters["number"] = format_number
    environment.filters["percent"] = format_percent
    return environment.get_template(name)
