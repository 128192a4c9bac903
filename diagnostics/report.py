"""The report of one or several models, in sentences and as a self-contained page."""

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, Template

from diagnostics import divergence, keys
from diagnostics.parts import layer_groups
from diagnostics.table import Estimate, Summary, by_dose, subtract, summarize, with_means
from diagnostics.tokens import SINK_FACTOR


DIFFERENCE = "difference (second − first)"
# Chapters of the page: title, figures, and how the names of its measures begin. All others come last.
CHAPTERS = {
    "Norms up to the decoder": ((), r"encoder_output|projector_|at_decoder|in_prompt|vocabulary|ratio"),
    "Norm and turning by layer": (("layers",), r"norm|turning|gap|update_"),
    "The norm after the projector": ((), r"gain_|bias_"),
    "Attention to the picture": (("attention_map",), r"attention"),
    "Keys and values": (("keys", "key_map"), r"keys\.|values\."),
    "Other measures": ((), r""),
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


def number(value: float, digits: int = 3) -> str:
    """Three significant digits, and none after the point from 1,000 on; a dash for a missing value."""
    if math.isnan(value):
        return "–"
    is_whole = abs(float(f"{value:.{digits}g}")) >= 1000
    return re.sub(r"^-", "−", f"{value:,.0f}" if is_whole else f"{value:.{digits}g}")


def with_interval(estimate: Estimate) -> str:
    """A mean with its 95% interval, to two significant digits of the interval's width, five digits at most."""
    width = estimate.high - estimate.low
    if not math.isfinite(width):
        return number(estimate.mean)
    if width <= 1e-4 * max(map(abs, estimate)):
        return f"{number(estimate.mean, 5)} (± {width / 2:.1g})"
    places = max(0, 1 - math.floor(math.log10(width)))
    shown = (f"{round(value, places) + 0.0:,.{places}f}" for value in estimate)  # no "-0"
    mean, low, high = (re.sub(r"^-", "−", text) for text in shown)
    return f"{mean} ({low} to {high})"


def sentences(model: ModelReport) -> list[str]:
    """One model's main results."""
    return _lines("sentences.jinja", model=model, summary=model.summary, thirds=list(layer_groups(model.num_layers)))


def tell_sweep(rows: pd.DataFrame) -> list[str]:
    """The main results of one model's rows of [`~diagnostics.comparison.sweep_model`]."""
    return _lines("sweep.jinja", points=by_dose(rows))


def measured_on(report: Report) -> str:
    """How many models were measured on what."""
    count = report.models[0].num_pictures
    intervals = "95% intervals over pictures are in brackets" if count > 1 else "one gives no intervals"
    pictures = f"pictures with a question each: {count} ({report.data})"
    return f"Models: {len(report.models)}; {pictures}; {intervals}."


def make_tables(models: Sequence[ModelReport], rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By chapter, a row for each measure and modality, and a column for each model; of two models also their paired
    difference, from all their `rows`. Means over layers. Keys and values of two models share no scale, so have none.
    """
    columns = [model.name for model in models]
    cells: dict[tuple[str, str], dict[str, str]] = {}
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


def render_html(report: Report, rows: pd.DataFrame, figures: Path) -> str:
    """The report as one self-contained page, of all rows of its models, and a folder of PNG files by the names of
    `FIGURES`, some of which may be missing."""
    images = {path.stem: base64.b64encode(path.read_bytes()).decode() for path in figures.glob("*.png")}
    return _template("report.html.jinja").render(
        report=report,
        measured_on=measured_on(report),
        sentences={model.name: sentences(model) for model in report.models},
        swept={model.name: model.sweep for model in report.models},
        chapters=CHAPTERS,
        tables={title: of.to_html(border=0) for title, of in make_tables(report.models, rows).items()},
        images=images,
        keys=keys,
        divergence=divergence,
        sink_factor=SINK_FACTOR,
    )


def _lines(name: str, **values: object) -> list[str]:
    return [*filter(None, map(str.strip, _template(name).render(values).splitlines()))]


def _template(name: str) -> Template:
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=name.endswith("html.jinja"), trim_blocks=True)
    environment.filters |= {"interval": with_interval, "number": number}
    return environment.get_template(name)
