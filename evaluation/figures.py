"""Figures of a task, read from the files that its harness wrote, and the scores of the rows behind them.

The harness's figure is the one reported. A row's score is what the harness logged for it. Scores are used only if the
figure is their mean, or the mean over groups of the groups' means.
"""

import json
from collections.abc import Iterator, Sequence
from math import isclose, isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.benchmarks import Benchmark
from evaluation.harness import LOG_FILE, TaskError
from evaluation.models import Model
from evaluation.record import Evaluation


# What a harness writes about a run, and logs for a row.
Report = dict[str, Any]
Sample = dict[str, Any]
TURNED = 1_000_000  # MMBench adds it to the index of a question each time that it turns its options


class Figure(NamedTuple):
    """A figure of a task, as it goes to `evaluation.json`, and the scores that it is the mean of, by group and row;
    `None` if it is not such a mean."""

    evaluation: Evaluation
    scores: pd.Series | None


def read_figures(folder: Path, benchmark: Benchmark, settings: dict[str, Any], model: Model) -> list[Figure]:
    """Read what a harness wrote into a folder: the benchmark's figure, or without a metric all figures of the task and
    of its parts.

    Raises:
        TaskError: if there is no figure; lmms-eval exits with 0 even then.
    """
    is_lmms = benchmark.harness == "lmms-eval"
    reports = list(folder.glob("*/[0-9]*_results.json" if is_lmms else "*/results_*.json"))
    if len(reports) != 1:
        raise TaskError(f"the harness wrote no result; see {folder / LOG_FILE}")
    report = json.loads(reports[0].read_text(encoding="utf-8"))
    logs = sorted(folder.glob("*/[0-9]*_samples_*.jsonl" if is_lmms else "*/samples_*.jsonl"))
    samples = [json.loads(line) for log in logs for line in log.open(encoding="utf-8")]
    shots = max((count for count in report["n-shot"].values() if isinstance(count, int)), default=0)
    chosen = [f"{shots}-shot", settings["dtype"] if settings["dtype"] != "auto" else "", benchmark.choice]
    common = {"harness": settings["harness"], "choice": "; ".join(filter(None, chosen)), "weights": model.weights}
    common |= {"command": model.command(benchmark, settings["dtype"]), **name_rows(report, settings["limit"])}
    tasks = [benchmark.task] if benchmark.metric else report["results"]
    figures = [
        Figure(Evaluation(**fields, **common), scores)
        for task in tasks
        for fields, scores in _read_entry(task, benchmark, report, samples if task == benchmark.task else [])
    ]
    if not figures:
        raise TaskError(f"the harness gave no {benchmark.metric or 'figure'}; see {reports[0]}")
    return figures


def name_rows(report: Report, limit: int | None) -> dict[str, str]:
    """The dataset, by its name on the Hub or its files, and the split, with the limit if any."""
    config, *others = report["configs"].values()
    files = pd.Series((config.get("dataset_kwargs") or {}).get("data_files") or [], dtype=object).explode()
    source = [config.get("dataset_path"), None if others else config.get("dataset_name")]
    dataset = ", ".join(filter(None, [Path(file).name for file in files] or source)) or "made by the task"
    split = config.get("test_split") or config.get("validation_split") or "all"
    return {"dataset": dataset, "split": split if limit is None else f"{split}[:{limit}]"}


def _read_entry(
    task: str, benchmark: Benchmark, report: Report, samples: Sequence[Sample]
) -> Iterator[tuple[dict[str, Any], pd.Series | None]]:
    """The figures of one entry of a report: fields of [`Evaluation`] and scores."""
    entry, counts, scale = report["results"].get(task, {}), report["n-samples"], benchmark.scale or 1.0
    n = sum(rows["effective"] for rows in ([counts[task]] if task in counts else counts.values()))  # or a group's
    for key, value in entry.items():
        metric, comma, kind = key.partition(",")  # `kind` is the filter of the answers
        if not comma or "_stderr" in metric or benchmark.metric not in (None, metric) or not _is_number(value):
            continue
        logged = [sample for sample in samples if metric in sample and sample.get("filter", kind) == kind]
        scores = read_scores(metric, value / scale, logged)
        error = entry.get(f"{metric}_stderr,{kind}")
        if _is_number(clustered := entry.get(f"{metric}_stderr_clustered,{kind}")):
            scores, error = None, clustered  # rows of one video are not independent
        if not _is_number(error):
            error = 0 if scores is None else (mean_and_error(scores)[1] or 0) * scale
        name = metric if kind == "none" else f"{metric}, {kind}"
        error = error / scale or None  # 0 if all rows are equal
        yield {"task": task, "metric": name, "value": value / scale, "n": n, "standard_error": error}, scores


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def read_scores(metric: str, value: float, samples: Sequence[Sample]) -> pd.Series | None:
    """The scores that a figure is the mean of, by group and row; `None` if it is not."""
    if not samples:
        return None
    items = [sample[metric] if isinstance(sample[metric], dict) else {"score": sample[metric]} for sample in samples]
    # lmms-eval's own hash of a row includes a picture's memory address.
    rows = [f"{row['doc_id']} {row.get('input') or row.get('prompt_hash')} {row['target']}" for row in samples]
    groups = [item.get("l2_category", "") for item in items]  # MM-Star's
    is_turned = all("prediction" in item and "index" in item for item in items)
    if is_turned:
        rows = [f"question {item['index'] % TURNED}" for item in items]
    scores = pd.Series([_score(item) for item in items], [groups, rows], dtype=float).rename_axis(["group", "row"])
    if is_turned:  # right if it is right with its options in every order
        scores = scores.groupby(level=["group", "row"]).min()
    if scores.hasnans or not scores.index.is_unique:
        return None
    return scores if isclose(mean_and_error(scores)[0], value, abs_tol=1e-6) else None


def _score(item: dict[str, Any]) -> float | None:
    """SEED-Bench and MMBench log no score, but the answer; of MMBench's its first letter counts."""
    given, truth, score = item.get("pred", item.get("prediction")), item.get("answer"), item.get("score")
    if isinstance(given, str) and isinstance(truth, str):
        given = given if "pred" in item else given.strip()[:1]
        return float(given.lower().strip() == truth.lower().strip())
    return float(score) if isinstance(score, int | float) else None


def mean_and_error(scores: pd.Series) -> tuple[float, float | None]:
    """Mean over groups of the groups' means, and its standard error.

    The error is `None` if a group has a single row, or if all rows of each group are equal.
    """
    groups = scores.groupby("group").agg(["mean", "var", "size"])
    error = sqrt((groups["var"] / groups["size"]).sum(skipna=False)) / len(groups)
    return float(groups["mean"].mean()), error if error > 0 else None  # not NaN either
