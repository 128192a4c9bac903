"""A task's result, read from the files that its harness wrote.

The harness's own score is the one reported. The scores of the rows behind it serve to compare two models.
"""

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeGuard

import pandas as pd
from pydantic import Field

from common.errors import UserError
from common.records import read_record
from evaluation.benchmarks import Benchmark
from evaluation.harness import LOG_FILE, Model, Settings, harness_version
from evaluation.record import Evaluation
from evaluation.row_scores import mean_and_error, read_row_scores


# Where each harness writes its report and its logs of rows, below the folder that it is given.
REPORTS = {"lmms-eval": "*/[0-9]*_results.json", "lm-eval": "*/results_*.json"}
ROW_LOGS = {"lmms-eval": "*/[0-9]*_samples_*.jsonl", "lm-eval": "*/samples_*.jsonl"}


class TaskResult(NamedTuple):
    """A task's result, as it goes to `evaluation.json`, and the scores of its rows.

    `row_scores` are as [`~evaluation.row_scores.read_row_scores`] gives them.
    """

    evaluation: Evaluation
    row_scores: pd.Series | None


@dataclass(frozen=True)
class TaskConfig:
    """Where the rows of a task come from, as a report says it."""

    dataset_path: str | None = None
    dataset_name: str | None = None
    test_split: str | None = None
    validation_split: str | None = None


@dataclass(frozen=True)
class RowCount:
    """How many rows of a task were scored."""

    effective: int


@dataclass(frozen=True)
class Report:
    """What is read of a report, which both harnesses write alike.

    Attributes:
        results: By task, and by metric and filter of answers such as "exact_match,none".
        configs: By task. A group such as MMLU has several, one for each subject.
        num_shots: By task.
        num_rows: By task.
    """

    results: dict[str, dict[str, Any]]
    configs: dict[str, TaskConfig]
    num_shots: Annotated[dict[str, Any], Field(alias="n-shot")]
    num_rows: Annotated[dict[str, RowCount], Field(alias="n-samples")]


def read_result(folder: Path, benchmark: Benchmark, settings: Settings, model: Model) -> TaskResult:
    """Read what a harness wrote into a folder.

    Raises:
        UserError: if it wrote no score: lmms-eval exits with 0 even then.
    """
    report = read_report(folder, benchmark)
    reported, answer_filter = find_score(report, benchmark, folder)
    score = reported / benchmark.scale
    row_scores = read_row_scores(benchmark, score, read_samples(folder, benchmark))

    evaluation = Evaluation(
        task=benchmark.task,
        dataset=describe_dataset(report, benchmark),
        split=describe_split(report, settings),
        metric=benchmark.metric if answer_filter == "none" else f"{benchmark.metric}, {answer_filter}",
        value=score,
        n=sum(count.effective for count in report.num_rows.values()),
        standard_error=find_standard_error(report, benchmark, answer_filter, row_scores),
        command=describe_command(benchmark, settings, model),
        weights=model.weights,
        harness=harness_version(benchmark),
        choice=describe_choices(report, benchmark, settings),
    )
    return TaskResult(evaluation, row_scores)


def read_report(folder: Path, benchmark: Benchmark) -> Report:
    """The report that a harness wrote into a folder.

    Raises:
        UserError: if there is none, or it has another form than is known.
    """
    paths = list(folder.glob(REPORTS[benchmark.harness]))
    if len(paths) != 1:
        raise UserError(f"the harness wrote no result; see {folder / LOG_FILE}")
    return read_record(Report, paths[0])


def read_samples(folder: Path, benchmark: Benchmark) -> list[dict[str, Any]]:
    """The rows that a harness logged, of all files."""
    samples = []
    for path in sorted(folder.glob(ROW_LOGS[benchmark.harness])):
        with path.open(encoding="utf-8") as file:
            samples += [json.loads(line) for line in file]
    return samples


def find_score(report: Report, benchmark: Benchmark, folder: Path) -> tuple[float, str]:
    """The score that a report gives a task, and the name of the filter that answers went through.

    Raises:
        UserError: if there is none.
    """
    for name, value in report.results.get(benchmark.task, {}).items():
        metric, _, answer_filter = name.partition(",")
        if metric == benchmark.metric and is_number(value):
            return value, answer_filter
    raise UserError(f"the harness gave no {benchmark.metric}; see the report in {folder}")


def find_standard_error(
    report: Report, benchmark: Benchmark, answer_filter: str, row_scores: pd.Series | None
) -> float | None:
    """The standard error that a report gives, or else that of the rows' scores; `None` if it is unknown."""
    reported = report.results[benchmark.task].get(f"{benchmark.metric}_stderr,{answer_filter}")
    if is_number(reported):
        return reported / benchmark.scale or None  # harnesses give 0 if all rows are equal
    if row_scores is None:
        return None
    _, error = mean_and_error(row_scores)
    return error


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a report gives a number; it also has "N/A" and NaN."""
    return isinstance(value, int | float) and isfinite(value)


def describe_dataset(report: Report, benchmark: Benchmark) -> str:
    """The Hub's name of a task's rows, and of their configuration if there is one; our own rows are files."""
    configs = list(report.configs.values())
    path = configs[0].dataset_path or ""
    if "/" not in path:
        return benchmark.title
    if len(configs) > 1 or not configs[0].dataset_name:
        return path
    return f"{path}, {configs[0].dataset_name}"


def describe_split(report: Report, settings: Settings) -> str:
    """The split that rows are of, and how many of it."""
    config = next(iter(report.configs.values()))
    split = config.test_split or config.validation_split or ""
    return split if settings.limit is None else f"{split}[:{settings.limit}]"


def describe_command(benchmark: Benchmark, settings: Settings, model: Model) -> str:
    """The command that gives this result, without the folders of this machine."""
    name = model.path.name if model.path.is_absolute() else model.name
    command = f"python -m evaluation {name} --tasks {benchmark.task}"
    return command if settings.dtype == "auto" else f"{command} --dtype {settings.dtype}"


def describe_choices(report: Report, benchmark: Benchmark, settings: Settings) -> str:
    """Number of shots, dtype if one was given, and what the paper leaves open."""
    shots = [count for count in report.num_shots.values() if isinstance(count, int)]
    choices = [f"{max(shots, default=0)}-shot"]
    if settings.dtype != "auto":
        choices.append(settings.dtype)
    if benchmark.choice:
        choices.append(benchmark.choice)
    return "; ".join(choices)
