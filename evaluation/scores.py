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


@dataclass(frozen=True)
class Difference:
    """Of two models over the same rows.

    Attributes:
        mean: Second less first.
        interval: Student's, 95%, of the rows' differences in pairs; `None` if a group has a single row.
        n: Rows.
    """

    mean: float
    interval: tuple[float, float] | None
    n: int


def read_rows(task: str, metric: str, value: float, samples: Sequence[Sample]) -> list[Row] | None:
    """The rows behind a figure; `None` where it is no mean of what the harness logged of them.

    Args:
        task: The task, or the group of tasks.
        metric: Name of the figure.
        value: The figure, as a share of 1.
        samples: What the harness logged of each row.
    """
    if task == "mmbench_en_dev_static":
        rows = _mmbench_rows([sample[metric] for sample in samples])
    else:
        found = [(sample, _score(sample[metric])) for sample in samples if metric in sample]
        if any(score is None for _, score in found):
            return None
        rows = [Row(_row_id(sample), score, _group(sample[metric])) for sample, score in found if score is not None]
    return rows if rows and isclose(estimate(rows)[0], value, abs_tol=1e-6) else None


def _score(item: Any) -> float | None:
    if isinstance(item, dict):
        if {"pred", "answer"} <= item.keys():  # SEED-Bench logs no score
            return float(item["pred"].lower().strip() == item["answer"].lower().strip())
        item = item.get("score")
    return float(item) if isinstance(item, bool | int | float) else None


def _group(item: Any) -> str | None:
    return item.get("l2_category") if isinstance(item, dict) else None


def _row_id(sample: Sample) -> str:
    """Not the harness's hash of the row, which holds where a picture lay in memory."""
    asked = sample.get("prompt_hash") or sample.get("input")
    content = json.dumps([sample["doc_id"], asked, sample["target"]])
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


def estimate(rows: Sequence[Row]) -> tuple[float, float | None]:
    """Mean over groups of the groups' means, and its standard error; `None` if a group has a single row."""
    groups = _by_group(rows)
    mean = float(np.mean([scores.mean() for scores in groups]))
    if min(map(len, groups)) < 2:
        return mean, None
    return mean, sqrt(sum(scores.var(ddof=1) / len(scores) for scores in groups)) / len(groups)


def _by_group(rows: Sequence[Row]) -> list[np.ndarray]:
    groups: defaultdict[str | None, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row.score)
    return [np.array(scores) for scores in groups.values()]


def difference(first: Sequence[Row], second: Sequence[Row]) -> Difference:
    """Second less first, in pairs of the same row.

    Raises:
        ValueError: if they are of other rows.
    """
    scores = {row.id: row.score for row in first}
    if len(first) != len(second) or scores.keys() != {row.id for row in second}:
        raise ValueError("they answered other questions")
    pairs = [Row(row.id, row.score - scores[row.id], row.group) for row in second]
    mean, error = estimate(pairs)
    if error is None:
        return Difference(mean, None, len(pairs))
    freedom = len(pairs) - len(_by_group(pairs))
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    return Difference(mean, (mean - half, mean + half), len(pairs))
