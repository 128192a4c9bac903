"""Rows behind a harness's figure, its standard error where the harness gives none, and differences of two models.

The harness's figure is what counts. A row's score is what the harness logged of it, and is used only where the figure
is the mean of these scores, or the mean over groups of the groups' means.
"""

import contextlib
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

import numpy as np
from scipy.special import stdtrit

from evaluation.benchmarks import Benchmark


# What a harness logged of a row, by name.
Sample = dict[str, Any]
LEVEL = 0.95
# MMBench asks a question several times, its options in another order, with 1e6 more in the index each time.
MMBENCH_ROTATION = 1_000_000


@dataclass(frozen=True)
class Row:
    """What a model scored on one row.

    Attributes:
        id: Of question and truth: the same for every model.
        score: Of the row.
        group: What it is averaged within before groups are, if it is.
    """

    id: str
    score: float
    group: str | None = None


def read_rows(benchmark: Benchmark, metric: str, value: float, samples: Sequence[Sample]) -> list[Row] | None:
    """The rows behind a figure; `None` where it is no mean of what the harness logged of them.

    Args:
        benchmark: The task, or the group of tasks.
        metric: Name of the figure.
        value: The figure, as a share of 1 where its scale is known.
        samples: What the harness logged of each row.
    """
    logged = [sample for sample in samples if metric in sample]
    if not logged:
        return None
    if benchmark.task == "mmbench_en_dev_static":
        rows = _mmbench_rows([sample[metric] for sample in logged])
    else:
        scores = [_score(sample[metric]) for sample in logged]
        if None in scores:
            return None
        rows = [
            Row(_row_id(sample, benchmark.in_chat), score, _group(sample[metric]))
            for sample, score in zip(logged, scores, strict=True)
            if score is not None
        ]
    is_whole = len({row.id for row in rows}) == len(rows) and isclose(mean(rows), value, abs_tol=1e-6)
    return rows if is_whole else None


def _score(item: Any) -> float | None:
    if isinstance(item, dict):
        given, truth = item.get("pred"), item.get("answer")
        if isinstance(given, str) and isinstance(truth, str):  # SEED-Bench logs no score
            return float(given.lower().strip() == truth.lower().strip())
        item = item.get("score")
    return float(item) if isinstance(item, int | float) else None


def _group(item: Any) -> str | None:
    return item.get("l2_category") if isinstance(item, dict) else None


def _row_id(sample: Sample, in_chat: bool) -> str:
    """Of the row's number, question and truth: lmms-eval's own hash holds where a picture lay in memory, and lm-eval's
    of the prompt how a model writes a chat."""
    question = sample.get("input") or sample.get("doc_hash" if in_chat else "prompt_hash")
    content = json.dumps([sample["doc_id"], question, sample["target"]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _mmbench_rows(items: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each question, scored by lmms-eval's own evaluator, which logs no row's score."""
    from lmms_eval.tasks.mmbench.en_utils import mmbench_evaluator

    questions: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for item in items:
        questions[item["index"] % MMBENCH_ROTATION].append(item)
    rows = []
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a table for each
        for index, asked in sorted(questions.items()):
            score, *_ = mmbench_evaluator.eval_result(asked, eval_method="static")
            rows.append(Row(str(index), float(score)))
    return rows


def mean(rows: Sequence[Row]) -> float:
    """Mean over groups of the groups' means."""
    return float(np.mean([scores.mean() for scores in _by_group(rows)]))


def standard_error(rows: Sequence[Row]) -> float | None:
    """Standard error of [`mean`]; `None` if a group has a single row, or the rows of each are all alike."""
    groups = _by_group(rows)
    if min(map(len, groups)) < 2:
        return None
    return sqrt(sum(scores.var(ddof=1) / len(scores) for scores in groups)) / len(groups) or None


def _by_group(rows: Sequence[Row]) -> list[np.ndarray]:
    groups: defaultdict[str | None, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row.score)
    return [np.array(scores) for scores in groups.values()]


def interval_of_difference(first: Sequence[Row], second: Sequence[Row]) -> tuple[float, float] | None:
    """Student's 95% interval of second less first, in pairs of the same row; `None` where there is no standard error.

    Raises:
        ValueError: if they are of other rows.
    """
    scores = {row.id: row.score for row in first}
    if len(first) != len(second) or scores.keys() != {row.id for row in second}:
        raise ValueError("they answered other questions")
    pairs = [Row(row.id, row.score - scores[row.id], row.group) for row in second]
    error = standard_error(pairs)
    if error is None:
        return None
    half = float(stdtrit(len(pairs) - len(_by_group(pairs)), (1 + LEVEL) / 2)) * error
    return mean(pairs) - half, mean(pairs) + half
