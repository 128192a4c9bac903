"""All measures of one or several models: for the command line, and for Python and notebooks."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

from common.files import write_whole
from diagnostics.keys import measure_space
from diagnostics.loading import QUESTION, Question, Questions, load_questions, questions_about
from diagnostics.measures import measure_all
from diagnostics.norm_sweep import sweep_model
from diagnostics.parts import DiagnosticsError, find_decoder, spread_layers
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
    """

    report: Report
    rows: pd.DataFrame
    swept: pd.DataFrame = field(default_factory=pd.DataFrame)

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
        return draw_figures(summaries, by_dose)

    def save(self, folder: str | Path) -> None:
        """Write `report.html`, `report.json`, `report.csv` ([`frame`]), `rows.csv` ([`rows`]), `sweep.csv`, and below
        `figures/` all figures as PNG and PDF. What an earlier report left there goes."""
        folder = Path(folder)
        figures_folder = folder / "figures"
        figures_folder.mkdir(parents=True, exist_ok=True)
        for path in figures_folder.iterdir():
            if path.stem in FIGURES:
                path.unlink()

        write_whole(folder / "report.csv", self.frame().to_csv(index=False))
        write_whole(folder / "rows.csv", self.rows.to_csv(index=False))
        (folder / "sweep.csv").unlink(missing_ok=True)
        if not self.swept.empty:
            write_whole(folder / "sweep.csv", self.swept.to_csv(index=False))
        write_whole(folder / "report.json", json.dumps(asdict(self.report), indent=1, allow_nan=False))

        for name, figure in self.figures().items():
            save_figure(figure, figures_folder / f"{name}.png")
            save_figure(figure, figures_folder / f"{name}.pdf")
        write_whole(folder / "report.html", render_html(self.report, self.rows, figures_folder))


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
) -> Comparison:
    """Measure models side by side on the same questions.

    Args:
        models: Each with its processor, by its name in the report. They are not changed.
        data: Pictures, or what `--data` takes.
        question: Asked about pictures that come without one.
        num_samples: How many pictures at most.
        layers: Layers whose attention and keys are measured; six evenly spread ones by default.
        sweep: Also multiply image tokens, see [`~diagnostics.norm_sweep.sweep_model`].

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
    comparisons = measure_models(loaded, questions, data_name, layers=layers, sweep=sweep)
    return list(comparisons)[-1]


def measure_models(
    models: Iterable[tuple[str, PreTrainedModel, Any]],
    questions: Questions,
    data: str,
    layers: Sequence[int] | None = None,
    command: str = "diagnostics.compare",
    sweep: bool = False,
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

    Raises:
        DiagnosticsError: if a model can't be measured; the message begins with its name.
    """
    reports: list[ModelReport] = []
    rows_of_models: list[pd.DataFrame] = []
    swept_of_models: list[pd.DataFrame] = [pd.DataFrame()]
    for name, model, processor in models:
        try:
            report, rows = measure_model(model, processor, questions.questions, name, layers)
            swept = pd.DataFrame()
            if sweep:
                swept = sweep_model(model, processor, questions.questions, name).assign(model=name)
                report = replace(report, sweep=tell_sweep(swept))
        except DiagnosticsError as error:
            raise DiagnosticsError(f"{name}: {error}") from error
        del model, processor  # before the next one is loaded

        reports.append(report)
        rows_of_models.append(rows.assign(model=name))
        swept_of_models.append(swept)
        yield Comparison(
            report=Report(
                command=command,
                versions={"torch": torch.__version__, "transformers": transformers.__version__},
                data=data,
                passed_over=questions.passed_over,
                unreadable=questions.unreadable,
                models=list(reports),
            ),
            rows=pd.concat(rows_of_models, ignore_index=True)[["model", *COLUMNS]],
            swept=pd.concat(swept_of_models),
        )


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    layers: Sequence[int] | None = None,
) -> tuple[ModelReport, pd.DataFrame]:
    """Every measure of one model: its report and its rows.

    Attention and keys are measured in `layers`, by default in six that are evenly spread.

    Raises:
        DiagnosticsError: if one of `layers` does not exist, or a question can't be measured.
    """
    num_layers = len(find_decoder(model).layers)
    chosen = spread_layers(num_layers) if layers is None else sorted(set(layers))
    if not set(chosen) <= set(range(num_layers)):
        given = " ".join(str(layer) for layer in chosen)
        raise DiagnosticsError(f"It has layers 0 to {num_layers - 1}, got --layers {given}.")

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
    return report, rows


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
