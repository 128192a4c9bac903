"""The scores of a task's rows, from what its harness logged: two models are compared row by row."""

from collections.abc import Sequence
from math import isclose, sqrt
from typing import Any, NamedTuple

import pandas as pd

from evaluation.benchmarks import Benchmark, RowLog


# MMBench adds it to a question's index each time that it asks with the options in another order.
INDEX_STEP = 1_000_000


class RowScore(NamedTuple):
    """A row of a log.

    Attributes:
        group: The group whose mean it counts in; MM-Star is scored by the mean over groups.
        row: Which row it is, the same for every model.
        score: 0 to 1; `None` if the log has another form than is known.
    """

    group: str
    row: str
    score: float | None


def read_row_scores(benchmark: Benchmark, score: float, samples: Sequence[dict[str, Any]]) -> pd.Series | None:
    """The scores of a task's rows, indexed by `group` and `row`.

    They are checked: `score`, which the harness reports for the task, must be their mean over groups.

    Args:
        benchmark: The task.
        score: Its score, as a fraction of 1.
        samples: The rows of the harness's log.

    Returns:
        `None` where the task's score is no such mean, or the log has another form than is known.
    """
    logged = [sample for sample in samples if benchmark.metric in sample]
    rows = [read_row(benchmark.row_log, sample, sample[benchmark.metric]) for sample in logged]
    table = pd.DataFrame(rows, columns=list(RowScore._fields))
    if table.empty or table["score"].isna().any():
        return None

    scores = table.set_index(["group", "row"])["score"].astype(float)
    if benchmark.row_log == "answer in each order":
        # A question counts as right if it is right in every order.
        scores = scores.groupby(level=["group", "row"]).min()

    mean, _ = mean_and_error(scores)
    if scores.index.is_unique and isclose(mean, score, abs_tol=1e-6):
        return scores
    return None


def read_row(row_log: RowLog, sample: dict[str, Any], logged: Any) -> RowScore:
    """A row of a log; `logged` is what its metric was given."""
    # Not by lmms-eval's hash of a row, which includes a picture's address in memory.
    question = sample.get("input") or sample.get("prompt_hash")
    row = f"{sample.get('doc_id')} {question} {sample.get('target')}"
    if not isinstance(logged, dict):
        return RowScore("", row, as_number(logged))

    if row_log == "score":
        return RowScore(logged.get("l2_category", ""), row, as_number(logged.get("score")))
    if row_log == "answer":
        return RowScore("", row, exact_match(logged.get("pred"), logged.get("answer")))

    if "index" not in logged or "prediction" not in logged:
        return RowScore("", row, None)
    first_letter = str(logged["prediction"]).strip()[:1]
    return RowScore("", f"question {logged['index'] % INDEX_STEP}", exact_match(first_letter, logged.get("answer")))


def as_number(value: Any) -> float | None:
    """A logged score as a float, if it is one."""
    return float(value) if isinstance(value, int | float) else None


def exact_match(given: Any, right: Any) -> float | None:
    """1 if two answers are the same text but for case and white space around it, 0 if not; `None` for no texts."""
    if not isinstance(given, str) or not isinstance(right, str):
        return None
    return float(given.strip().lower() == right.strip().lower())


def mean_and_error(scores: pd.Series) -> tuple[float, float | None]:
    """Mean over groups of the groups' means, and its standard error.

    The error is `None` if a group has a single row, or if all rows of each group are equal.
    """
    groups = scores.groupby("group").agg(["mean", "var", "size"])
    mean = float(groups["mean"].mean())

    variance = (groups["var"] / groups["size"]).sum(skipna=False)  # NaN with a group of one row
    if not variance > 0:
        return mean, None
    return mean, sqrt(variance) / len(groups)
