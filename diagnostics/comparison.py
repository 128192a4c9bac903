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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import torch
import transformers
from matplotlib.figure import Figure
from PIL import Image
from transformers import PreTrainedModel

from conversations.files import write_whole
from conversations.pictures import to_rgb
from conversations.rows import BadRowError, Row, row_images
from diagnostics.frame import to_frame
from diagnostics.loading import QUESTION, Questions, load_questions, take_questions
from diagnostics.model_report import Closeup, SharedBases, measure_model
from diagnostics.parts import DiagnosticsError
from diagnostics.pictures import Pictures
from diagnostics.plots import FIGURES, draw_figures, to_svg
from diagnostics.plots import save as save_figure
from diagnostics.report import render_html, render_markdown, summarize
from diagnostics.results import LanguageModel, ModelReport, Report, to_json


# A folder or file as `--data` takes it, or pictures, or rows as training takes them.
Data = str | Path | Sequence[Image.Image | Row]
# Independent models, or checkpoints of one model, whose keys share a basis.
Kind = Literal["models", "checkpoints"]


@dataclass(frozen=True)
class Comparison:
    """What was measured of one or several models on the same questions.

    Attributes:
        report: The numbers.
        pictures: Pictures, attention maps and t-SNE points to draw, one for each model.
        questions: What was asked.
    """

    report: Report
    pictures: list[Pictures]
    questions: Questions

    def __str__(self) -> str:
        return "\n".join(summarize(self.report))

    def frame(self) -> pd.DataFrame:
        """A row for each measure; see [`~diagnostics.frame.to_frame`]."""
        return to_frame(self.report)

    def figures(self) -> dict[str, Figure]:
        """The report's figures by name; those without data are left out."""
        return draw_figures(self.report, self.pictures, self.questions.questions)

    def save(self, folder: str | Path) -> None:
        """Write `report.html`, `.md`, `.json` and `.csv`, and below `figures/` all figures as PNG and PDF."""
        folder = Path(folder)
        drawn = folder / "figures"
        drawn.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:  # of an earlier report
            for suffix in ("png", "pdf"):
                (drawn / f"{name}.{suffix}").unlink(missing_ok=True)
        write_whole(folder / "report.csv", self.frame().to_csv(index=False))
        write_whole(folder / "report.json", json.dumps(to_json(self.report), indent=1, allow_nan=False))
        svgs, files = {}, []
        for name, figure in self.figures().items():
            svgs[name] = to_svg(figure, name)
            files.append(f"{drawn.name}/{name}.png")
            for suffix in ("png", "pdf"):
                save_figure(figure, drawn / f"{name}.{suffix}")
        write_whole(folder / "report.html", render_html(self.report, svgs))
        write_whole(folder / "report.md", render_markdown(self.report, files))


def measure(model: PreTrainedModel, processor: Any, data: Data, name: str = "model", **options: Any) -> Comparison:
    """Every measure of one model. Options are those of [`compare`]."""
    return compare({name: (model, processor)}, data, **options)


def compare(
    models: Mapping[str, tuple[PreTrainedModel, Any]],
    data: Data,
    question: str = QUESTION,
    num_samples: int = 32,
    kind: Kind = "models",
    closeup: Closeup = Closeup(),  # noqa: B008 - it can't be changed
) -> Comparison:
    """Measure models side by side on the same questions.

    Args:
        models: Each with its processor, by its name in the report. They are not changed.
        data: Pictures, rows as training takes them, or what `--data` takes.
        question: Asked about pictures that come without one.
        num_samples: How many pictures at most.
        kind: `"checkpoints"` for checkpoints of one model.
        closeup: Layers, heads and query to show in detail.

    Raises:
        DiagnosticsError: if a model can't be measured on this data; the message says why.
        ValueError: if there are no models, `kind` is unknown, or a row is malformed.
    """
    if not models or kind not in get_args(Kind):
        raise ValueError(f"Give models, and a kind of {' or '.join(get_args(Kind))}; got {len(models)} and {kind!r}.")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    questions = find_questions(data, question, num_samples)
    named = Path(data).name if isinstance(data, str | Path) else "data in memory"
    loaded = ((name, model, processor) for name, (model, processor) in models.items())
    return measure_models(loaded, questions, named, kind, closeup)


def find_questions(data: Data, question: str, num_samples: int) -> Questions:
    """The questions to ask; see [`compare`]."""
    if isinstance(data, str | Path):
        return load_questions(str(data), num_samples, question=question)
    turns = [{"from": "human", "value": f"<image>\n{question}"}]

    def to_row(number: int, entry: Any) -> Any:
        row = {"images": entry, "conversations": turns, "source": f"picture {number}"}
        if isinstance(entry, Mapping):
            row = {"source": f"row {number}", "images": entry.get("image"), **entry}
        elif not isinstance(entry, Image.Image):
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
    kind: Kind,
    closeup: Closeup,
    base: LanguageModel | None = None,
    command: str = "diagnostics.compare",
) -> Comparison:
    """Measure models one after the other, so that only one has to be in memory.

    Args:
        models: Name, model and processor.
        questions: What is asked.
        data: Name of the data in the report.
        kind, closeup: As in [`compare`].
        base: A language model to compare with.
        command: Command shown in the report.
    """
    measured: list[ModelReport] = []
    drawn: list[Pictures] = []
    bases = SharedBases()
    for name, model, processor in models:
        if kind == "models":
            bases = SharedBases()
        try:
            with evaluating(model):
                report, pictures = measure_model(model, processor, questions.questions, name, closeup, bases)
        except DiagnosticsError as error:
            raise type(error)(f"{name}: {error}") from error
        if kind == "checkpoints" and measured and report.num_layers != measured[0].num_layers:
            raise DiagnosticsError(
                f"{name} has {report.num_layers} layers, {measured[0].name} {measured[0].num_layers}: these are not "
                "checkpoints of one model, compare them as models."
            )
        measured.append(report)
        drawn.append(pictures)
        del model, processor  # before the next one is loaded
    return Comparison(
        Report(
            command=command,
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            data=data,
            num_samples=len(questions.questions),
            num_pictures=questions.num_pictures,
            passed_over=questions.passed_over,
            unreadable=questions.unreadable,
            compare=kind,
            models=measured,
            base=base,
        ),
        drawn,
        questions,
    )


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in eval mode; restore every module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
