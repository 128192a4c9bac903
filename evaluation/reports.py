"""Reads what the harnesses write: figures, their standard errors, and the rows behind them."""

import json
import re
from math import isfinite
from pathlib import Path
from typing import Any

from evaluation.benchmarks import Benchmark
from evaluation.harness import LOG_FILE, Settings, TaskError
from evaluation.results import Figure, Result, fixed_settings
from evaluation.scores import Sample, read_rows, standard_error


# What a harness writes about a run.
Report = dict[str, Any]
# `samples_<task>_<date>`, the date with dashes for colons.
LM_EVAL_SAMPLES = re.compile(r"^samples_(.*)_\d{4}-\d{2}-\d{2}T[\d.-]+$")


def read_outputs(folder: Path, benchmark: Benchmark, model: str, settings: Settings, seconds: float) -> Result:
    """Read what a harness wrote into a folder.

    Raises:
        TaskError: if it wrote no figure; lmms-eval exits with 0 even then.
    """
    is_lmms = benchmark.harness == "lmms-eval"
    reports = list(folder.glob("*/[0-9]*_results.json" if is_lmms else "*/results_*.json"))
    if len(reports) != 1:
        raise TaskError(f"the harness wrote no result; see {folder / LOG_FILE}")
    try:
        report = json.loads(reports[0].read_text(encoding="utf-8"))
        samples: dict[str, list[Sample]] = {}
        for path in sorted(folder.glob("*/[0-9]*_samples_*.jsonl" if is_lmms else "*/samples_*.jsonl")):
            task = path.stem.split("_samples_", 1)[1] if is_lmms else LM_EVAL_SAMPLES.sub(r"\1", path.stem)
            samples[task] = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        figures = read_all_figures(benchmark, report, samples)
        dataset, split = name_rows(report, settings)
        shots = max((count for count in report["n-shot"].values() if isinstance(count, int)), default=0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{reports[0]} can't be parsed ({type(error).__name__}: {error})") from error
    if not figures:
        raise TaskError(f"the harness gave no {benchmark.metric or 'figure'}; see {reports[0]}")
    return Result(
        model=model,
        settings=fixed_settings(benchmark, settings),
        task=benchmark.name,
        dataset=dataset,
        split=split,
        shots=shots,
        seconds=round(seconds, 1),
        figures=figures,
    )


def read_all_figures(benchmark: Benchmark, report: Report, samples: dict[str, list[Sample]]) -> list[Figure]:
    """The figure to report, or all of them; for a group without its own, those of its tasks."""
    everything = [sample for logged in samples.values() for sample in logged]
    figures = read_figures(benchmark, benchmark.task, report, everything)
    if figures or benchmark.metric is not None:
        return figures
    return [
        figure
        for task in report["n-samples"]
        for figure in read_figures(benchmark, task, report, samples.get(task, []))
    ]


def read_figures(benchmark: Benchmark, task: str, report: Report, samples: list[Sample]) -> list[Figure]:
    """The figures of one entry of a report."""
    given = report["results"].get(task, {})
    keys = [tuple(key.split(",", 1)) for key in given if "," in key and "_stderr" not in key]
    counts = report["n-samples"]  # of tasks, not of groups
    count = sum(int(rows["effective"]) for rows in ([counts[task]] if task in counts else counts.values()))
    figures = []
    for metric, kind in keys:
        value = given[f"{metric},{kind}"]
        if benchmark.metric not in (None, metric) or not is_number(value):
            continue
        value /= benchmark.scale or 1.0
        is_repeated = [other for other, _ in keys].count(metric) > 1
        # lmms-eval does not say which filter a logged row belongs to.
        known = [] if is_repeated and benchmark.harness == "lmms-eval" else samples
        rows = read_rows(benchmark, metric, value, [row for row in known if row.get("filter", kind) == kind])
        clustered, error = (given.get(f"{metric}_stderr{ending},{kind}") for ending in ("_clustered", ""))
        if is_number(clustered):  # rows of one video are not independent
            rows, error = None, clustered
        if is_number(error):
            error = error / (benchmark.scale or 1.0) or None  # 0 if all rows are equal
        else:
            error = None if rows is None else standard_error(rows)
        name = f"{metric}, {kind}" if is_repeated else metric
        figures.append(Figure(task, name, value, error, count if rows is None else len(rows), rows))
    return figures


def is_number(value: Any) -> bool:
    """Whether a report's entry is a finite number."""
    return isinstance(value, int | float) and isfinite(value)


def name_rows(report: Report, settings: Settings) -> tuple[str, str]:
    """The dataset, by its name on the Hub or its files, and the split, with the limit if any."""
    configs = list(report["configs"].values())
    config = configs[0]
    dataset = config.get("dataset_path") or "made by the task"
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if files:
        named = files.values() if isinstance(files, dict) else [files]
        every = [file for entry in named for file in (entry if isinstance(entry, list) else [entry])]
        dataset = ", ".join(file if "://" in file else Path(file).name for file in every)
    elif len(configs) == 1 and config.get("dataset_name"):
        dataset += f", {config['dataset_name']}"
    split = config.get("test_split") or config.get("validation_split") or "all"
    return dataset, split if settings.limit is None else f"{split}[:{settings.limit}]"
