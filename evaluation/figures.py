"""A task's figure, read from the files that its harness wrote, and the scores of the rows behind it.

The harness's figure is the one reported. A row's score is what the harness logged for it. Scores are used only if the
figure is their mean, or the mean over groups of the groups' means.
"""

import json
from collections.abc import Sequence
from math import isclose, isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evaluation.benchmarks import Benchmark
from evaluation.harness import LOG_FILE, Model, Settings, TaskError, fixed_settings
from evaluation.record import Evaluation


TURNED = 1_000_000  # MMBench adds it to the index of a question each time that it turns its options


class Figure(NamedTuple):
    """A task's figure, as it goes to `evaluation.json`, and the scores that it is the mean of, by group and row;
    `None` if it is not such a mean."""

    evaluation: Evaluation
    scores: pd.Series | None


def read_figure(folder: Path, benchmark: Benchmark, settings: Settings, model: Model) -> Figure:
    """Read what a harness wrote into a folder. Raises `TaskError` if it holds no figure: lmms-eval exits with 0 even
    then."""
    is_lmms = benchmark.harness == "lmms-eval"
    reports = list(folder.glob("*/[0-9]*_results.json" if is_lmms else "*/results_*.json"))
    if len(reports) != 1:
        raise TaskError(f"the harness wrote no result; see {folder / LOG_FILE}")
    report = json.loads(reports[0].read_text(encoding="utf-8"))
    entry = report["results"].get(benchmark.task, {})
    key = next((key for key in entry if key.startswith(f"{benchmark.metric},")), "")
    if not _is_number(value := entry.get(key)):
        raise TaskError(f"the harness gave no {benchmark.metric}; see {reports[0]}")
    logs = sorted(folder.glob("*/[0-9]*_samples_*.jsonl" if is_lmms else "*/samples_*.jsonl"))
    samples = [json.loads(line) for log in logs for line in log.open(encoding="utf-8")]
    scores = read_scores(benchmark.metric, value / benchmark.scale, samples)
    answers_filter = key.partition(",")[2]
    error = entry.get(f"{benchmark.metric}_stderr,{answers_filter}")
    if _is_number(error):
        error /= benchmark.scale
    elif scores is not None:
        error = mean_and_error(scores)[1]
    config, *others = report["configs"].values()  # several of a group, such as MMLU's subjects
    source, part = str(config.get("dataset_path")), None if others else config.get("dataset_name")
    split = config.get("test_split") or config.get("validation_split")
    shots = max((count for count in report["n-shot"].values() if isinstance(count, int)), default=0)
    options = "" if settings.dtype == "auto" else f" --dtype {settings.dtype}"
    chosen = [f"{shots}-shot", options and settings.dtype, benchmark.choice]
    # Without the names of this machine's folders.
    folder_name = model.path.name if model.path.is_absolute() else model.name
    evaluation = Evaluation(
        task=benchmark.task,
        dataset=", ".join(filter(None, [source, part])) if "/" in source else benchmark.title,  # ours are files
        split=split if settings.limit is None else f"{split}[:{settings.limit}]",
        metric=benchmark.metric if answers_filter == "none" else f"{benchmark.metric}, {answers_filter}",
        value=value / benchmark.scale,
        n=sum(rows["effective"] for rows in report["n-samples"].values()),
        standard_error=error if _is_number(error) and error > 0 else None,  # 0 if all rows are equal
        command=f"python -m evaluation {folder_name} --tasks {benchmark.task}{options}",
        weights=model.weights,
        harness=fixed_settings(benchmark, settings)["harness"],
        choice="; ".join(filter(None, chosen)),
    )
    return Figure(evaluation, scores)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def read_scores(metric: str, value: float, samples: Sequence[dict[str, Any]]) -> pd.Series | None:
    """The scores that a figure is the mean of, by group and row; `None` if it is not."""
    logged = [sample for sample in samples if metric in sample]
    if not logged:
        return None
    items = [row[metric] if isinstance(row[metric], dict) else {"score": row[metric]} for row in logged]
    # lmms-eval's own hash of a row includes a picture's memory address.
    rows = [f"{row['doc_id']} {row.get('input') or row.get('prompt_hash')} {row['target']}" for row in logged]
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
