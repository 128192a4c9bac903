"""Read a task's result from the files that its harness wrote.

The score of a result is the harness's own. The scores of single rows only serve to compare two models.
"""

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeGuard

import pandas as pd
from pydantic import Field

from normllava.errors import UserError
from normllava.evaluation.benchmarks import Benchmark
from normllava.evaluation.harness import LOG_FILE, Model, Settings, harness_version
from normllava.evaluation.json_records import read_record
from normllava.evaluation.record import Evaluation
from normllava.evaluation.row_scores import mean_and_error, read_row_scores


# Where a harness writes its report and its row logs, below the folder that it is given. For example, lmms-eval writes
# model/20260101_000000_results.json and model/20260101_000000_samples_mmstar.jsonl.
REPORTS = {"lmms-eval": "*/[0-9]*_results.json", "lm-eval": "*/results_*.json"}
ROW_LOGS = {"lmms-eval": "*/[0-9]*_samples_*.jsonl", "lm-eval": "*/samples_*.jsonl"}


class TaskResult(NamedTuple):
    """A task's result.

    Attributes:
        evaluation: The result as it goes to `evaluation.json`.
        row_scores: The scores of the task's rows, as [`~.row_scores.read_row_scores`] returns them.
    """

    evaluation: Evaluation
    row_scores: pd.Series | None


@dataclass(frozen=True)
class TaskConfig:
    """Where a task's rows come from, as the harness's report says. `dataset_name` is the dataset's configuration."""

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
    """The part of a harness's report that is used here. It has the same form in both harnesses.

    The keys of all fields are names of tasks. MMLU is a group of tasks, one for each subject: `results` has an entry
    for the group, and the other fields have an entry for each subject.

    Attributes:
        results: Scores, each named by metric and answer filter, such as "exact_match,none".
        configs: Where the rows come from.
        num_shots: Number of shots.
        num_rows: Number of rows.
    """

    results: dict[str, dict[str, Any]]
    configs: dict[str, TaskConfig]
    num_shots: Annotated[dict[str, Any], Field(alias="n-shot")]
    num_rows: Annotated[dict[str, RowCount], Field(alias="n-samples")]


def read_result(folder: Path, benchmark: Benchmark, settings: Settings, model: Model) -> TaskResult:
    """Read what a harness wrote into a folder.

    Raises:
        UserError: if there is no score. (lmms-eval exits with 0 even without a score.)
    """
    report = read_report(folder, benchmark)
    reported_score, answer_filter = find_score(report, benchmark, folder)
    score = reported_score / benchmark.scale
    row_scores = read_row_scores(benchmark, score, read_samples(folder, benchmark))

    metric = benchmark.metric
    if answer_filter != "none":
        metric += f", {answer_filter}"

    evaluation = Evaluation(
        task=benchmark.task,
        dataset=describe_dataset(report, benchmark),
        split=describe_split(report, settings),
        metric=metric,
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
        UserError: if there isn't exactly one report, or its form is unknown.
    """
    paths = list(folder.glob(REPORTS[benchmark.harness]))
    if len(paths) != 1:
        raise UserError(f"the harness wrote no result; see {folder / LOG_FILE}")
    return read_record(Report, paths[0])


def read_samples(folder: Path, benchmark: Benchmark) -> list[dict[str, Any]]:
    """The entries of all row logs that a harness wrote into a folder."""
    samples = []
    for path in sorted(folder.glob(ROW_LOGS[benchmark.harness])):
        with path.open(encoding="utf-8") as file:
            samples += [json.loads(line) for line in file]
    return samples


def find_score(report: Report, benchmark: Benchmark, folder: Path) -> tuple[float, str]:
    """The score that a report gives for a task, and the name of the filter that the answers went through.

    Raises:
        UserError: if the report holds no score of the benchmark's metric.
    """
    task_scores = report.results.get(benchmark.task, {})
    for name, value in task_scores.items():
        metric, _, answer_filter = name.partition(",")  # such as "exact_match,none"
        if metric == benchmark.metric and is_number(value):
            return value, answer_filter
    raise UserError(f"the harness gave no {benchmark.metric}; see the report in {folder}")


def find_standard_error(
    report: Report, benchmark: Benchmark, answer_filter: str, row_scores: pd.Series | None
) -> float | None:
    """The standard error from the report, otherwise from the rows' scores; `None` if neither gives an error."""
    reported_error = report.results[benchmark.task].get(f"{benchmark.metric}_stderr,{answer_filter}")
    if is_number(reported_error):
        # If all rows have the same score, harnesses report an error of 0, which says nothing.
        if reported_error == 0:
            return None
        return reported_error / benchmark.scale

    if row_scores is None:
        return None
    _, error = mean_and_error(row_scores)
    return error


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value from a report is a finite number. Reports also hold "N/A" and NaN."""
    return isinstance(value, int | float) and isfinite(value)


def describe_dataset(report: Report, benchmark: Benchmark) -> str:
    """The Hub id of a task's dataset, with the configuration unless there are several; the title for our own rows."""
    first_config, *other_configs = report.configs.values()
    hub_id = first_config.dataset_path or ""
    if "/" not in hub_id:  # our own rows are local files, and their `dataset_path` is "json"
        return benchmark.title
    if other_configs or not first_config.dataset_name:
        return hub_id
    return f"{hub_id}, {first_config.dataset_name}"


def describe_split(report: Report, settings: Settings) -> str:
    """The split that the rows come from, with the limit on their number if there is one, such as "test[:10]"."""
    first_config, *_ = report.configs.values()
    split = first_config.test_split or first_config.validation_split or ""
    if settings.limit is None:
        return split
    return f"{split}[:{settings.limit}]"


def describe_command(benchmark: Benchmark, settings: Settings, model: Model) -> str:
    """The command that measures a result again. Of an absolute path, only the last folder is named."""
    name = model.path.name if model.path.is_absolute() else model.name
    command = f"normllava evaluate {name} --tasks {benchmark.task}"
    if benchmark.include_path is not None:
        command += f" --include_path {benchmark.include_path}"
    if settings.dtype != "auto":
        command += f" --dtype {settings.dtype}"
    return command


def describe_choices(report: Report, benchmark: Benchmark, settings: Settings) -> str:
    """The number of shots, the dtype if the user chose one, and the benchmark's own choice."""
    # All subtasks of a group have the same number. A task without a number is asked without shots.
    shot_counts = [count for count in report.num_shots.values() if isinstance(count, int)]
    num_shots = max(shot_counts, default=0)
    choices = [f"{num_shots}-shot"]
    if settings.dtype != "auto":
        choices.append(settings.dtype)
    if benchmark.choice:
        choices.append(benchmark.choice)
    return "; ".join(choices)
