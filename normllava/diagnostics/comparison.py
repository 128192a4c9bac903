"""Measures one or several models on the same questions, for the command and for Python programs."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import transformers
from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

from normllava.diagnostics.attention_maps import AttentionMap, draw_attention_maps, map_questions, questions_with_word
from normllava.diagnostics.key_map import draw_key_map, place_keys
from normllava.diagnostics.keys import measure_space
from normllava.diagnostics.loading import QUESTION, Question, Questions, load_questions, questions_about
from normllava.diagnostics.measures import measure_all
from normllava.diagnostics.norm_sweep import require_scored_answers, sweep_model
from normllava.diagnostics.plots import FIGURES, draw_figures, save_figure
from normllava.diagnostics.probe import Record
from normllava.diagnostics.recording import record_questions
from normllava.diagnostics.report import ModelReport, Report, box_lines, measured_on, render_html, tell_sweep
from normllava.diagnostics.table import COLUMNS, Summary, summaries_by_dose
from normllava.files import write_whole
from normllava.parts import DiagnosticsError, choose_layers, find_decoder


# The fewest pictures of a sweep. Over fewer, intervals are so wide that they say nothing.
MIN_PICTURES = 3


@dataclass(frozen=True)
class Comparison:
    """What was measured of one or several models on the same questions.

    Attributes:
        report: Models, data and summaries, as `report.json` holds them.
        rows: The value of each measure for each picture, with the `COLUMNS` of [`~.table`] and `model`.
        swept: What [`~.norm_sweep.sweep_model`] returns, with a column `model`; empty if no sweep was made.
        key_map: What [`~.key_map.place_keys`] returns, with a column `model`.
        attention_maps: By name of the model, maps of what a word looks at; empty if no word was given.
    """

    report: Report
    rows: pd.DataFrame
    swept: pd.DataFrame = field(default_factory=pd.DataFrame)
    key_map: pd.DataFrame = field(default_factory=pd.DataFrame)
    attention_maps: dict[str, list[AttentionMap]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [measured_on(self.report)]
        for model in self.report.models:
            lines.append(f"{model.name}:")
            lines += [f"- {line}" for line in box_lines(model)]
        return "\n".join(lines)

    def frame(self) -> pd.DataFrame:
        """A table of means over pictures: a row for each measure, modality and layer of each model.

        Its columns `low` and `high` are the ends of the 95% interval, `n` is the number of pictures. In a row whose
        `layer` is missing, `mean` is a mean over layers, or the measure has no layers.
        """
        frames = [model.summary.frame.assign(model=model.name) for model in self.report.models]
        return pd.concat(frames, ignore_index=True)

    def figures(self) -> dict[str, Figure]:
        """The report's figures by name. A figure without data is left out."""
        summaries = {model.name: model.summary for model in self.report.models}
        sweep_summaries = {}
        if not self.swept.empty:
            sweep_summaries = {name: summaries_by_dose(rows) for name, rows in self.swept.groupby("model", sort=False)}
        figures = draw_figures(summaries, sweep_summaries)

        if not self.key_map.empty:
            summaries_with_keys = {name: summaries[name] for name in self.key_map["model"].unique()}
            figures["key_map"] = draw_key_map(summaries_with_keys, self.key_map)
        if self.attention_maps:
            figures["attention_map"] = draw_attention_maps(self.attention_maps)
        return figures

    def save(self, folder: str | Path) -> None:
        """Write the report to a folder, in the place of an earlier report.

        The files are `report.html`, `report.json`, `report.csv` ([`frame`]), `rows.csv` ([`rows`]), `key_map.csv`,
        `sweep.csv`, and in `figures/` each figure as PNG and PDF. Tables and figures without data have no file.
        """
        folder = Path(folder)
        figures_folder = folder / "figures"
        figures_folder.mkdir(parents=True, exist_ok=True)
        # The figures of an earlier report are removed. Other files of the user in this folder stay.
        for path in figures_folder.iterdir():
            if path.stem in FIGURES:
                path.unlink()

        write_table(folder / "report.csv", self.frame())
        write_table(folder / "rows.csv", self.rows)
        write_table(folder / "key_map.csv", self.key_map)
        write_table(folder / "sweep.csv", self.swept)
        write_whole(folder / "report.json", json.dumps(asdict(self.report), indent=1, allow_nan=False))

        for name, figure in self.figures().items():
            save_figure(figure, figures_folder / f"{name}.png")
            save_figure(figure, figures_folder / f"{name}.pdf")
        write_whole(folder / "report.html", render_html(self.report, self.rows, figures_folder, self.swept))


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV. For an empty table no file is written, and the file of an earlier report is removed."""
    if table.empty:
        path.unlink(missing_ok=True)
    else:
        write_whole(path, table.to_csv(index=False))


def measure(model: PreTrainedModel, processor: Any, data: Any, name: str = "model", **options: Any) -> Comparison:
    """Measure one model. `data` and `options` are given to [`compare`]."""
    return compare({name: (model, processor)}, data, **options)


def sweep(model: PreTrainedModel, processor: Any, data: Any, **options: Any) -> Comparison:
    """Measure one model, and sweep the norm of its image tokens with [`~.norm_sweep.sweep_model`]."""
    return measure(model, processor, data, sweep=True, **options)


@dataclass(frozen=True)
class Scope:
    """What is measured of each model besides what always is.

    Attributes:
        layers: Layers whose attention and keys are measured; six layers that are evenly spread by default.
        sweep: Also sweep the norm of image tokens.
        attention_word: Also map what this word of the questions or answers looks at.
    """

    layers: Sequence[int] | None = None
    sweep: bool = False
    attention_word: str | None = None


def compare(
    models: Mapping[str, tuple[PreTrainedModel, Any]],
    data: str | Path | Sequence[Image.Image],
    question: str = QUESTION,
    num_samples: int = 32,
    layers: Sequence[int] | None = None,
    sweep: bool = False,
    attention_word: str | None = None,
) -> Comparison:
    """Measure models side by side on the same questions.

    Args:
        models: Model and processor, by the model's name in the report. The models are not changed.
        data: Pictures in memory, or what the command's `--data` takes: rows, or a folder of pictures.
        question: What is asked about each picture if `data` holds no questions.
        num_samples: The largest number of pictures.
        layers: Layers whose attention and keys are measured; six layers that are evenly spread by default.
        sweep: Also sweep the norm of image tokens, see [`~.norm_sweep.sweep_model`].
        attention_word: Also draw what this word of the questions or answers looks at, see
            [`~normllava.diagnostics.attention_maps.attention_map`].

    Raises:
        DiagnosticsError: if a model can't be measured on this data; the message says why.
        UserError: if no row can be read.
    """
    if isinstance(data, str | Path):
        questions = load_questions(data, num_samples, question)
        data_name = Path(data).name
    else:
        questions = questions_about(data, question, num_samples)
        data_name = "pictures in memory"

    named_models = [(name, model, processor) for name, (model, processor) in models.items()]
    comparisons = measure_models(named_models, questions, data_name, Scope(layers, sweep, attention_word))
    *_, comparison_of_all_models = comparisons  # each comparison has one model more than the one before it
    return comparison_of_all_models


class ModelResults(NamedTuple):
    """What was measured of one model, as in [`Comparison`], but without a column `model` in the tables."""

    report: ModelReport
    rows: pd.DataFrame
    key_map: pd.DataFrame
    swept: pd.DataFrame
    attention_maps: list[AttentionMap]


def measure_models(
    models: Iterable[tuple[str, PreTrainedModel, Any]],
    questions: Questions,
    data_name: str,
    scope: Scope,
    command: str = "diagnostics.compare",
) -> Iterator[Comparison]:
    """Measure models one after the other, and after each model yield the comparison of the models measured so far.

    Args:
        models: Name, model and processor of each model. This may be a generator that loads one model at a time: no
            model is kept here once it is measured.
        questions: What each model is asked.
        data_name: Name of the data in the report.
        scope: What is measured.
        command: Command that the report shows.

    Raises:
        DiagnosticsError: if no question has the word, if there are too few questions for a sweep, or if a model can't
            be measured. The message about a model begins with the model's name.
    """
    # What would fail later shall fail before the first model is loaded.
    if scope.attention_word is not None:
        questions_with_word(questions.questions, scope.attention_word)
    if scope.sweep and len(questions.questions) < MIN_PICTURES:
        raise DiagnosticsError(
            f"A sweep compares pictures, and there are {len(questions.questions)}: give at least {MIN_PICTURES}."
        )

    results: dict[str, ModelResults] = {}
    for name, model, processor in models:
        try:
            results[name] = measure_model(model, processor, questions.questions, name, scope)
        except DiagnosticsError as error:
            raise DiagnosticsError(f"{name}: {error}") from error
        # If `models` is a generator, it loads the next model when the loop goes on. This model shall be freed by then.
        del model, processor

        yield join_results(results, questions, data_name, command)


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    scope: Scope,
) -> ModelResults:
    """Measure one model on questions. A sweep and attention maps are made only if they are asked for.

    Raises:
        DiagnosticsError: if the model can't be measured.
    """
    # Attention maps come first: they are quick, and for some models they raise an error, which shall come early.
    attention_maps = []
    if scope.attention_word is not None:
        attention_maps = map_questions(model, processor, questions, scope.attention_word, scope.layers)

    if scope.sweep:
        require_scored_answers(model, processor, questions[0])

    report, rows, key_map = measure_questions(model, processor, questions, name, scope.layers)

    swept = pd.DataFrame()
    if scope.sweep:
        swept = sweep_model(model, processor, questions, name, rows)
        report = replace(report, sweep=tell_sweep(swept))

    return ModelResults(report, rows, key_map, swept, attention_maps)


def measure_questions(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    layers: Sequence[int] | None = None,
) -> tuple[ModelReport, pd.DataFrame, pd.DataFrame]:
    """All measures of a model, without a sweep.

    Args:
        model: The model.
        processor: The model's processor.
        questions: What the model is asked.
        name: Name of the model.
        layers: Layers whose attention and keys are measured; six layers that are evenly spread by default.

    Returns:
        The model's report, the rows of all measures, and what [`~.key_map.place_keys`] returns.

    Raises:
        DiagnosticsError: if one of `layers` does not exist, or if a question can't be measured.
    """
    num_layers = len(find_decoder(model).layers)
    chosen_layers = choose_layers(num_layers, layers)

    records = record_questions(model, processor, questions, chosen_layers, title=f"{name}: pictures")
    tables = [measure_all(model, records)]
    for space in ("keys", "values"):
        rows_of_space = measure_space(space, records)
        if rows_of_space is not None:  # there are enough tokens to compare
            tables.append(rows_of_space)
    rows = pd.concat(tables, ignore_index=True)

    report = ModelReport(
        name=name,
        model_class=type(model).__name__,
        dtype=describe_dtype(model),
        num_layers=num_layers,
        hidden_size=model.config.get_text_config().hidden_size,
        num_pictures=len(records),
        num_tokens=count_tokens(records),
        excluded=count_excluded(records),
        notes=collect_notes(records),
        summary=Summary.of(rows),
    )
    return report, rows, place_keys(records, rows)


def describe_dtype(model: PreTrainedModel) -> str:
    """The dtype of a model's weights, and whether they are quantized."""
    dtype = str(model.dtype).removeprefix("torch.")
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    return f"{dtype}, quantized" if is_quantized else dtype


def count_tokens(records: Sequence[Record]) -> dict[str, int]:
    """Number of image tokens and of text tokens that are measured, over all records."""
    num_tokens = {"image": 0, "text": 0}
    for record in records:
        num_tokens["image"] += int(record.tokens.image.sum())
        num_tokens["text"] += int(record.tokens.text.sum())
    return num_tokens


def count_excluded(records: Sequence[Record]) -> dict[str, int]:
    """Number of tokens that are excluded for each reason, over all records."""
    num_tokens: dict[str, int] = {}
    for record in records:
        for reason, is_excluded in record.tokens.excluded.items():
            num_tokens[reason] = num_tokens.get(reason, 0) + int(is_excluded.sum())
    return num_tokens


def collect_notes(records: Sequence[Record]) -> list[str]:
    """The notes of all records, each note once."""
    notes: set[str] = set()
    for record in records:
        notes |= set(record.notes)
    return sorted(notes)


def join_results(
    results: Mapping[str, ModelResults], questions: Questions, data_name: str, command: str
) -> Comparison:
    """The comparison of some models, from the results of each model by its name."""
    report = Report(
        command=command,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        data=data_name,
        passed_over=questions.passed_over,
        unreadable=questions.unreadable,
        models=[result.report for result in results.values()],
    )
    rows = join_tables({name: result.rows for name, result in results.items()})
    return Comparison(
        report=report,
        rows=rows[["model", *COLUMNS]],
        swept=join_tables({name: result.swept for name, result in results.items()}),
        key_map=join_tables({name: result.key_map for name, result in results.items()}),
        attention_maps={name: result.attention_maps for name, result in results.items() if result.attention_maps},
    )


def join_tables(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of all models' tables, with a column `model`; an empty table if there are no rows."""
    tables_with_rows = [table.assign(model=name) for name, table in tables.items() if not table.empty]
    if not tables_with_rows:
        return pd.DataFrame()
    return pd.concat(tables_with_rows, ignore_index=True)
