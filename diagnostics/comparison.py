"""Measure models that are in memory, from Python or a notebook.

from diagnostics import compare, measure

measured = measure(model, processor, pictures, question="What is this?")
print(measured)
measured.frame()
measured.figures()["overview"]
measured.save("report")
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

from conversations.files import write_whole
from conversations.pictures import to_rgb
from conversations.rows import BadRowError, Row, row_images
from diagnostics.loading import QUESTION, Questions, load_questions, picture_row, take_questions
from diagnostics.model_report import ModelReport, Pictures, measure_model
from diagnostics.parts import DiagnosticsError
from diagnostics.plots import FIGURES, draw_figures
from diagnostics.plots import save as save_figure
from diagnostics.report import Report, measured_on, render_html, sentences
from diagnostics.results import to_json


# A folder or file as `--data` takes it, or pictures, or rows as training takes them.
Data = str | Path | Sequence[Image.Image | Row]


@dataclass(frozen=True)
class Comparison:
    """What was measured of one or several models on the same questions.

    Attributes:
        report: What was measured, on what.
        rows: All numbers: `model` and the columns of [`~diagnostics.table`].
        pictures: Pictures, attention maps and t-SNE points to draw, one for each model.
    """

    report: Report
    rows: pd.DataFrame
    pictures: list[Pictures]

    def __str__(self) -> str:
        of_models = [f"{model.name}: {text}" for model in self.report.models for text in sentences(model)]
        return "\n".join([measured_on(self.report), *of_models])

    def frame(self) -> pd.DataFrame:
        """A row for each measure, modality and layer of each model, with `mean`, `low`, `high` (its 95% interval) and
        `n` (pictures). Rows without a layer are means over layers, or measures without layers."""
        return pd.concat([of.summary.frame.assign(model=of.name) for of in self.report.models], ignore_index=True)

    def figures(self) -> dict[str, Figure]:
        """The report's figures by name; those without data are left out."""
        return draw_figures({model.name: model.summary for model in self.report.models}, self.pictures)

    def save(self, folder: str | Path) -> None:
        """Write `report.html`, `report.json`, `report.csv` ([`frame`]), `rows.csv` ([`rows`]), and below `figures/`
        all figures as PNG and PDF."""
        folder = Path(folder)
        drawn = folder / "figures"
        drawn.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:  # of an earlier report
            for suffix in ("png", "pdf"):
                (drawn / f"{name}.{suffix}").unlink(missing_ok=True)
        write_whole(folder / "report.csv", self.frame().to_csv(index=False))
        write_whole(folder / "rows.csv", self.rows.to_csv(index=False))
        write_whole(folder / "report.json", json.dumps(to_json(self.report), indent=1, allow_nan=False))
        for name, figure in self.figures().items():
            for suffix in ("png", "pdf"):
                save_figure(figure, drawn / f"{name}.{suffix}")
        write_whole(folder / "report.html", render_html(self.report, self.rows, drawn))


def measure(model: PreTrainedModel, processor: Any, data: Data, name: str = "model", **options: Any) -> Comparison:
    """Every measure of one model. Options are those of [`compare`]."""
    return compare({name: (model, processor)}, data, **options)


def compare(
    models: Mapping[str, tuple[PreTrainedModel, Any]],
    data: Data,
    question: str = QUESTION,
    num_samples: int = 32,
    layers: Sequence[int] | None = None,
) -> Comparison:
    """Measure models side by side on the same questions.

    Args:
        models: Each with its processor, by its name in the report. They are not changed.
        data: Pictures, rows as training takes them, or what `--data` takes.
        question: Asked about pictures that come without one.
        num_samples: How many pictures at most.
        layers: Layers whose attention and keys are measured; six evenly spread ones by default.

    Raises:
        DiagnosticsError: if a model can't be measured on this data; the message says why.
        ValueError: if there are no models, or no row can be read.
    """
    if not models:
        raise ValueError("Give at least one model.")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    questions = find_questions(data, question, num_samples)
    named = Path(data).name if isinstance(data, str | Path) else "data in memory"
    loaded = ((name, model, processor) for name, (model, processor) in models.items())
    return measure_models(loaded, questions, named, layers)


def find_questions(data: Data, question: str, num_samples: int) -> Questions:
    """The questions to ask; see [`compare`]."""
    if isinstance(data, str | Path):
        return load_questions(str(data), num_samples, question=question)

    def to_row(number: int, entry: Any) -> Any:
        if isinstance(entry, Image.Image):
            row = picture_row(entry, question, f"picture {number}")
        elif isinstance(entry, Mapping):
            row = {"source": f"row {number}", "images": entry.get("image"), **entry}
        else:
            raise BadRowError(f"entry {number}", f"neither a picture nor a row: {type(entry).__name__}")
        return {**row, "images": [_embed(image, row["source"]) for image in row_images(row)]}

    rows = (to_row(number, entry) for number, entry in enumerate(data))
    return take_questions(rows, num_samples, "data")


def _embed(image: Any, source: str) -> Any:
    """A picture in memory in the form of a row: as the bytes of a lossless file, turned as its EXIF says."""
    if not isinstance(image, Image.Image):
        return image
    file = io.BytesIO()
    try:
        to_rgb(image).save(file, format="PNG")
    except OSError as error:
        raise BadRowError(source, f"its picture can't be read ({error})") from error
    return {"bytes": file.getvalue(), "path": None}


def measure_models(
    models: Iterable[tuple[str, PreTrainedModel, Any]],
    questions: Questions,
    data: str,
    layers: Sequence[int] | None = None,
    command: str = "diagnostics.compare",
) -> Comparison:
    """Measure models, given as name, model and processor, one after the other, so that only one has to be in memory.

    `data` and `command` are shown in the report.
    """
    measured: list[ModelReport] = []
    of_models: list[pd.DataFrame] = []
    drawn: list[Pictures] = []
    for name, model, processor in models:
        try:
            of_model, rows, pictures = measure_model(model, processor, questions.questions, name, layers)
        except DiagnosticsError as error:
            raise type(error)(f"{name}: {error}") from error
        del model, processor  # before the next one is loaded
        measured.append(of_model)
        of_models.append(rows.assign(model=name))
        drawn.append(pictures)
    table = pd.concat(of_models, ignore_index=True)
    report = Report(
        command=command,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        data=data,
        num_pictures=len(questions.questions),
        passed_over=questions.passed_over,
        unreadable=questions.unreadable,
        models=measured,
    )
    return Comparison(report, table[["model", *table.columns.drop("model")]], drawn)
