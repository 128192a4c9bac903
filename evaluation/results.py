"""A harness's result for a model on a task, saved in a file so that no task is run twice."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversations.files import fingerprint, hash_files
from diagnostics.results import from_json
from evaluation.benchmarks import Benchmark
from evaluation.harness import TASKS, Settings, harness_name
from evaluation.record import Evaluation
from evaluation.scores import Row


RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Figure:
    """One figure of a task.

    Attributes:
        task: Its task, or its task within a group.
        metric: The harness's name of it.
        value: As a fraction of 1 if the benchmark's scale is known, else what the harness gives.
        standard_error: The harness's, or that of the rows; `None` if neither is known.
        n: Number of rows, or questions.
        rows: Those that it is the mean of; `None` if it is not such a mean.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None
    n: int
    rows: list[Row] | None


@dataclass(frozen=True)
class Result:
    """A harness's result for a model on one task.

    Attributes:
        model: Fingerprint of the model.
        settings: Those that figures depend on.
        task: Its name in `--tasks`.
        dataset, split: Of the rows.
        shots: Examples before each question.
        seconds: Run time of the harness, loading included.
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

    @property
    def dtype(self) -> str:
        """Of the weights, `"auto"` for the checkpoint's."""
        return self.settings["dtype"]

    def evaluations(self, command: str, choice: str, weights: str) -> list[Evaluation]:
        """Rows of `evaluation.json`, of the weights with this fingerprint."""
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
                weights=weights,
                harness=self.harness,
                choice="; ".join(filter(None, [f"{self.shots}-shot", choice])),
            )
            for figure in self.figures
        ]


def fixed_settings(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """The settings that a figure depends on."""
    chosen = {"metric": benchmark.metric, "scale": benchmark.scale, "in_chat": benchmark.in_chat}
    if (TASKS / f"{benchmark.task}.yaml").exists():  # ours, which no harness's version covers
        chosen["task_files"] = fingerprint(hash_files(TASKS, "[!.]*"))
    chosen["code"] = fingerprint(hash_files(Path(__file__).parent, "harness.py", "lmms_eval_model.py"))
    return {"harness": harness_name(benchmark), "limit": settings.limit, "dtype": settings.dtype, **chosen}


def read_result(folder: Path) -> Result | None:
    """The result of an earlier run in a task's folder, if it finished.

    Raises:
        ValueError: if it can't be read.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    try:
        return from_json(Result, json.loads(path.read_text(encoding="utf-8")), path)
    except ValueError as error:
        raise ValueError(f"{path} can't be read ({error}): remove it to run its task again.") from error
