"""What a harness said of a model on a task, kept in a file so that no task is run twice."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diagnostics.results import from_json
from evaluation.benchmarks import Benchmark
from evaluation.harness import Settings, harness_name
from evaluation.record import Evaluation
from evaluation.scores import Row


RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Figure:
    """One figure of a task.

    Attributes:
        task: The task, or the one of its group, that it is of.
        metric: The harness's name of it.
        value: As a share of 1 where the benchmark's scale is known, else what the harness gives.
        standard_error: The harness's, or that of the rows; `None` where neither is known.
        n: Rows, or questions, that it is of.
        rows: Those that it is the mean of, if it is.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None
    n: int
    rows: list[Row] | None


@dataclass(frozen=True)
class Result:
    """What a harness said of a model on one task.

    Attributes:
        model: Fingerprint of the model.
        settings: Those that figures depend on.
        task: As `--tasks` calls it.
        dataset, split: Of the rows.
        shots: Examples before each question.
        seconds: That the harness took, loading included.
        figures: One or more.
    """

    model: str
    settings: dict[str, Any]
    task: str
    dataset: str
    split: str
    shots: int
    seconds: float
    figures: list[Figure]

    @property
    def harness(self) -> str:
        """Its name and version."""
        return self.settings["harness"]

    def evaluations(self, command: str, choice: str) -> list[Evaluation]:
        """Rows of `evaluation.json`."""
        return [
            Evaluation(
                task=figure.task,
                dataset=self.dataset,
                split=self.split,
                metric=figure.metric,
                value=figure.value,
                n=figure.n,
                standard_error=figure.standard_error,
                command=command,
                harness=self.harness,
                choice="; ".join(filter(None, [f"{self.shots}-shot", choice])),
            )
            for figure in self.figures
        ]


def fixed_settings(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """What a figure depends on beside the model."""
    chosen = {"metric": benchmark.metric, "scale": benchmark.scale, "in_chat": benchmark.in_chat}
    return {"harness": harness_name(benchmark), "limit": settings.limit, "dtype": settings.dtype, **chosen}


def read_result(folder: Path) -> Result | None:
    """What an earlier run left in a task's folder, if it finished.

    Raises:
        ValueError: if it can't be read.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    try:
        return from_json(Result, json.loads(path.read_text(encoding="utf-8")), path)
    except ValueError as error:
        raise ValueError(f"{path} can't be read ({error}): take it away, and its task is run again.") from error
