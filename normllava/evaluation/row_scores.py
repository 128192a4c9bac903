"""Read the scores of a task's rows from the harness's logs, so that two models can be compared row by row."""

from collections.abc import Sequence
from math import isclose, isnan, sqrt
from typing import Any, NamedTuple

import pandas as pd

from normllava.evaluation.benchmarks import Benchmark


# MMBench repeats a question with its options in other orders, and adds this number to the index for each repetition:
# question 7 has the indices 7, 1000007, 2000007 and so on.
INDEX_STEP = 1_000_000


class RowScore(NamedTuple):
    """The score of one row.

    Attributes:
        group: The row's category in MM-Star, whose score is the mean of the categories' means; empty in other tasks.
        row: Text that identifies the row, or in MMBench the row's question. It is the same for every model.
        score: The score, 0 to 1; `None` if the row's log entry has an unknown form.
    """

    group: str
    row: str
    score: float | None


def read_row_scores(benchmark: Benchmark, score: float, samples: Sequence[dict[str, Any]]) -> pd.Series | None:
    """The scores of a task's rows, indexed by `group` and `row`.

    Args:
        benchmark: The task.
        score: The score that the harness reports for the task, as a fraction of 1.
        samples: The entries of the harness's row logs. Entries without the benchmark's metric don't count.

    Returns:
        The scores, 0 to 1. `None` if the mean of the groups' means is not the reported score, if two entries are of
        the same row, or if an entry has an unknown form.
    """
    scored_samples = [sample for sample in samples if benchmark.metric in sample]
    rows = [read_row(benchmark, sample) for sample in scored_samples]
    table = pd.DataFrame(rows, columns=list(RowScore._fields))
    if table.empty or table["score"].isna().any():
        return None

    scores = table.set_index(["group", "row"])["score"].astype(float)
    if benchmark.row_log == "answer in each order":
        # Rows of the same question have the same `group` and `row`. The lowest score is 1 only if all of them are 1.
        scores = scores.groupby(level=["group", "row"]).min()

    mean, _ = mean_and_error(scores)
    if scores.index.is_unique and isclose(mean, score, abs_tol=1e-6):
        return scores
    return None


def read_row(benchmark: Benchmark, sample: dict[str, Any]) -> RowScore:
    """The score of one row, from its log entry."""
    # What the harness gave the metric: the score itself, or a dict that holds the score or the answers.
    metric_input = sample[benchmark.metric]
    row = name_row(sample)

    if not isinstance(metric_input, dict):
        return RowScore("", row, as_number(metric_input))

    if benchmark.row_log == "score":
        category = metric_input.get("l2_category", "")
        return RowScore(category, row, as_number(metric_input.get("score")))

    if benchmark.row_log == "answer":
        return RowScore("", row, exact_match(metric_input.get("pred"), metric_input.get("answer")))

    assert benchmark.row_log == "answer in each order"
    if "index" not in metric_input or "prediction" not in metric_input:
        return RowScore("", row, None)
    return read_mmbench_row(metric_input)


def read_mmbench_row(metric_input: dict[str, Any]) -> RowScore:
    """The score of one row of MMBench. `row` is the same in all rows that ask the same question."""
    question = metric_input["index"] % INDEX_STEP
    prediction = str(metric_input["prediction"]).strip()
    letter = prediction[:1]  # "A" of the prediction "A. a cat"; an empty prediction has no letter
    return RowScore("", f"question {question}", exact_match(letter, metric_input.get("answer")))


def name_row(sample: dict[str, Any]) -> str:
    """Text that identifies a row, made of its number, its question and the right answer.

    lmms-eval's own hash of a row can't be used: it covers a picture's address in memory, which differs in every run.
    """
    # Some logs hold a hash of the question in place of its text.
    question = sample.get("input") or sample.get("prompt_hash")
    return f"{sample.get('doc_id')} {question} {sample.get('target')}"


def as_number(value: Any) -> float | None:
    """A logged score as a float; `None` if it is no number."""
    return float(value) if isinstance(value, int | float) else None


def exact_match(answer: Any, right_answer: Any) -> float | None:
    """1 if two answers are equal, else 0; `None` if either is not a string.

    Case and white space around an answer don't count.
    """
    if not isinstance(answer, str) or not isinstance(right_answer, str):
        return None
    return float(answer.strip().lower() == right_answer.strip().lower())


def mean_and_error(scores: pd.Series) -> tuple[float, float | None]:
    """The mean of the groups' means, and its standard error.

    The error is `None` if a group has a single row, or if no two rows of the same group differ.
    """
    groups = scores.groupby("group").agg(["mean", "var", "size"])
    mean = float(groups["mean"].mean())

    variances_of_means = groups["var"] / groups["size"]  # NaN for a single row
    variance_of_sum = variances_of_means.sum(skipna=False)  # of the sum of the groups' means
    if isnan(variance_of_sum) or variance_of_sum == 0:
        return mean, None
    return mean, sqrt(variance_of_sum) / len(groups)
