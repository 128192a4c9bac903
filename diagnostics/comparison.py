"""All measures of one or several models: for the command line, and for Python and notebooks."""

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

from common.files import write_whole
from diagnostics.attention_maps import AttentionMap, draw_attention_maps, map_questions, questions_with_word
from diagnostics.key_map import draw_key_map, place_keys
from diagnostics.keys import measure_space
from diagnostics.loading import QUESTION, Question, Questions, load_questions, questions_about
from diagnostics.measures import measure_all
from diagnostics.norm_sweep import sweep_model
from diagnostics.parts import DiagnosticsError, choose_layers, find_decoder
from diagnostics.plots import FIGURES, draw_figures, save_figure
from diagnostics.probe import Record
from diagnostics.recording import record_questions
from diagnostics.report import ModelReport, Report, measured_on, render_html, sentences, tell_sweep
from diagnostics.table import COLUMNS, Summary, summaries_by_dose


@dataclass(frozen=True)
class Comparison:
    """What was measured of one or several models on the same questions.

    Attributes:
        report: What was measured, on what.
        rows: All numbers: `model` and the columns of [`~diagnostics.table`].
        swept: With `sweep`, the rows of [`~diagnostics.norm_sweep.sweep_model`]: `model`, `dose`, `control` and those
            columns.
        key_map: Keys on a plane: `model` and the columns of [`~diagnostics.key_map.place_keys`].
        attention_maps: With `attention_word`, what it looks at in some pictures, by model.
    """

    report: Report
    rows: pd.DataFrame
    swept: pd.DataFrame = field(default_factory=pd.DataFrame)
    key_map: pd.DataFrame = field(default_factory=pd.DataFrame)
    attention_maps: dict[str, list[AttentionMap]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [measured_on(self.report)]
        for model in self.report.models:
            for text in [*model.sweep, *sentences(model)]:
                lines.append(f"{model.name}: {text}")
        return "\n".join(lines)

    def frame(self) -> pd.DataFrame:
        """A row for each measure, modality and layer of each model, with `mean`, `low`, `high` (its 95% interval) and
        `n` (pictures). Rows without a layer are means over layers, or measures without layers."""
        frames = [model.summary.frame.assign(model=model.name) for model in self.report.models]
        return pd.concat(frames, ignore_index=True)

    def figures(self) -> dict[str, Figure]:
        """The report's figures by name; those without data are left out."""
        summaries = {model.name: model.summary for model in self.report.models}
        by_dose = {}
        if not self.swept.empty:
            by_dose = {name: summaries_by_dose(rows) for name, rows in self.swept.groupby("model")}
        figures = draw_figures(summaries, by_dose)

        if not self.key_map.empty:
            with_keys = {name: summaries[name] for name in self.key_map["model"].unique()}
            figures["key_map"] = draw_key_map(with_keys, self.key_map)
        if self.attention_maps:
            figures["attention_map"] = draw_attention_maps(self.attention_maps)
        return figures

    def save(self, folder: str | Path) -> None:
        """Write `report.html`, `report.json`, `report.csv` ([`frame`]), `rows.csv` ([`rows`]), `key_map.csv`,
        `sweep.csv`, and below `figures/` all figures as PNG and PDF. What an earlier report left there goes."""
        folder = Path(folder)
        figures_folder = folder / "figures"
        figures_folder.mkdir(parents=True, exist_ok=True)
        for path in figures_folder.iterdir():
            if path.stem in FIGURES:
                path.unlink()

        write_whole(folder / "report.csv", self.frame().to_csv(index=False))
        write_whole(folder / "rows.csv", self.rows.to_csv(index=False))
        write_table(folder / "key_map.csv", self.key_map)
        write_table(folder / "sweep.csv", self.swept)
        write_whole(folder / "report.json", json.dumps(asdict(self.report), indent=1, allow_nan=False))

        for name, figure in self.figures().items():
            save_figure(figure, figures_folder / f"{name}.png")
            save_figure(figure, figures_folder / f"{name}.pdf")
        write_whole(folder / "report.html", render_html(self.report, self.rows, figures_folder))


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table; an empty one has no file, and what an earlier report left there goes."""
    path.unlink(missing_ok=True)
    if not table.empty:
        write_whole(path, table.to_csv(index=False))


def measure(model: PreTrainedModel, processor: Any, data: Any, name: str = "model", **options: Any) -> Comparison:
    """Every measure of one model. Options are those of [`compare`]."""
    return compare({name: (model, processor)}, data, **options)


def sweep(model: PreTrainedModel, processor: Any, data: Any, **options: Any) -> Comparison:
    """[`measure`] that also multiplies image tokens, as [`~diagnostics.norm_sweep.sweep_model`] does."""
    return measure(model, processor, data, sweep=True, **options)


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
        models: Each with its processor, by its name in the report. They are not changed.
        data: Pictures, or what `--data` takes.
        question: Asked about pictures that come without one.
        num_samples: How many pictures at most.
        layers: Layers whose attention and keys are measured; six evenly spread ones by default.
        sweep: Also multiply image tokens, see [`~diagnostics.norm_sweep.sweep_model`].
        attention_word: Also draw what this word of the questions or answers looks at, see
            [`~diagnostics.attention_maps.attention_map`].

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

    loaded = [(name, model, processor) for name, (model, processor) in models.items()]
    comparisons = measure_models(
        loaded, questions, data_name, layers=layers, sweep=sweep, attention_word=attention_word
    )
    return list(comparisons)[-1]


class ModelResults(NamedTuple):
    """What was measured of one model; its tables have no column `model`."""

    report: ModelReport
    rows: pd.DataFrame
    key_map: pd.DataFrame
    swept: pd.DataFrame
    attention_maps: list[AttentionMap]


def measure_models(
    models: Iterable[tuple[str, PreTrainedModel, Any]],
    questions: Questions,
    data: str,
    layers: Sequence[int] | None = None,
    command: str = "diagnostics.compare",
    sweep: bool = False,
    attention_word: str | None = None,
) -> Iterator[Comparison]:
    """Measure models one after the other, so that only one has to be in memory.

    After each comes the comparison so far, for its caller to keep.

    Args:
        models: Name, model and processor of each.
        questions: Asked of all of them.
        data: Name of the data in the report.
        layers: Layers whose attention and keys are measured; six evenly spread ones by default.
        command: Shown in the report.
        sweep: Also multiply image tokens.
        attention_word: Also draw what this word of the questions or answers looks at.

    Raises:
        DiagnosticsError: if no question has the word, or a model can't be measured; then the message begins with the
            model's name.
    """
    if attention_word is not None:
        questions_with_word(questions.questions, attention_word)  # raises before a model is loaded

    results: dict[str, ModelResults] = {}
    for name, model, processor in models:
        try:
            results[name] = measure_model(
                model, processor, questions.questions, name, layers=layers, sweep=sweep, attention_word=attention_word
            )
        except DiagnosticsError as error:
            raise DiagnosticsError(f"{name}: {error}") from error
        del model, processor  # before the next one is loaded

        yield join_results(results, questions, data, command)


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    layers: Sequence[int] | None = None,
    sweep: bool = False,
    attention_word: str | None = None,
) -> ModelResults:
    """All that is asked for of one model. Raises `DiagnosticsError` if that can't be measured."""
    attention_maps = []
    if attention_word is not None:  # first, since it's quick and refuses some models
        attention_maps = map_questions(model, processor, questions, attention_word, layers)

    report, rows, key_map = measure_questions(model, processor, questions, name, layers)

    swept = pd.DataFrame()
    if sweep:
        swept = sweep_model(model, processor, questions, name)
        report = replace(report, sweep=tell_sweep(swept))

    return ModelResults(report, rows, key_map, swept, attention_maps)


def join_results(results: Mapping[str, ModelResults], questions: Questions, data: str, command: str) -> Comparison:
    """The comparison of some models by what was measured of each, by name."""
    report = Report(
        command=command,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        data=data,
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
    """The rows of all models' tables, with a column `model`; empty without any rows."""
    with_rows = [table.assign(model=name) for name, table in tables.items() if not table.empty]
    return pd.concat(with_rows, ignore_index=True) if with_rows else pd.DataFrame()


def measure_questions(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    layers: Sequence[int] | None = None,
) -> tuple[ModelReport, pd.DataFrame, pd.DataFrame]:
    """Every measure of a model as it is: its report, its rows, and its keys on a plane.

    Attention and keys are measured in `layers`, by default in six that are evenly spread.

    Raises:
        DiagnosticsError: if one of `layers` does not exist, or a question can't be measured.
    """
    num_layers = len(find_decoder(model).layers)
    chosen = choose_layers(num_layers, layers)

    records = record_questions(model, processor, questions, chosen, f"{name}: pictures")
    measured = [
        measure_all(model, records),
        measure_space("keys", records),
        measure_space("values", records),
    ]
    rows = pd.concat([table for table in measured if table is not None], ignore_index=True)

    report = ModelReport(
        name=name,
        model_class=type(model).__name__,
        dtype=describe_dtype(model),
        num_layers=num_layers,
        hidden_size=model.config.get_text_config().hidden_size,
        num_pictures=len(records),
        num_tokens=count_tokens(records),
        excluded=count_excluded(records),
        notes=sorted({note for record in records for note in record.notes}),
        summary=Summary.of(rows),
    )
    return report, rows, place_keys(records, rows)


def describe_dtype(model: PreTrainedModel) -> str:
    """The dtype of a model's weights, and whether they are quantized."""
    dtype = str(model.dtype).removeprefix("torch.")
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    return f"{dtype}, quantized" if is_quantized else dtype


def count_tokens(records: Sequence[Record]) -> dict[str, int]:
    """Number of measured tokens of all records by modality."""
    return {
        "visual": sum(int(record.tokens.visual.sum()) for record in records),
        "text": sum(int(record.tokens.text.sum()) for record in records),
    }


def count_excluded(records: Sequence[Record]) -> dict[str, int]:
    """Number of excluded tokens of all records by reason."""
    counts = {}
    for reason in records[0].tokens.excluded:
        counts[reason] = sum(int(record.tokens.excluded[reason].sum()) for record in records)
    return counts
