"""Rows behind a harness's figure, its standard error if the harness gives none, and differences of two models.

The harness's figure is the one reported. A row's score is what the harness logged for it, and is used only if the
figure is the mean of these scores, or the mean over groups of the groups' means.
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


# What a harness logged for a row, by name.
Sample = dict[str, Any]
LEVEL = 0.95
# MMBench repeats a question with its options reordered and its index increased by 1e6 each time.
MMBENCH_ROTATION = 1_000_000


@dataclass(frozen=True)
class Row:
    """A model's score on one row.

    Attributes:
        id: Identifies question and truth, the same for every model.
        score: Of the row.
        group: Group whose mean is taken before the mean over groups, if any.
    """

    id: str
    score: float
    group: str | None = None


def read_rows(benchmark: Benchmark, metric: str, value: float, samples: Sequence[Sample]) -> list[Row] | None:
    """The rows behind a figure; `None` if it is not a mean of their logged scores.

    Args:
        benchmark: The task, or the group of tasks.
        metric: Name of the figure.
        value: The figure, as a fraction of 1 if its scale is known.
        samples: What the harness logged for each row.
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
    """Hash of the row's number, question and truth: lmms-eval's own hash includes a picture's memory address, and
    lm-eval's prompt hash the model's chat format."""
    question = sample.get("input") or sample.get("doc_hash" if in_chat else "prompt_hash")
    content = json.dumps([sample["doc_id"], question, sample["target"]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _mmbench_rows(items: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each question, scored by lmms-eval's own evaluator, since no row's score is logged."""
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
    """Standard error of [`mean`]; `None` if a group has a single row, or all rows of each group are equal."""
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
    """Student's t 95% interval of second minus first, paired by row; `None` if there is no standard error.

    Raises:
        ValueError: if they have different rows.
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
