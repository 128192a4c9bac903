"""The nine benchmarks of the paper's Table 4 (arXiv 2512.08374), and tasks of one's own.

The paper doesn't name the harness, the number of shots, the split, or POPE's metric. The table of results prints what
was chosen here next to each score.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from normllava.evaluation.json_records import read_record


# What a harness logs for each row of a task:
# - "score": the row's score.
# - "answer": the model's answer and the right answer.
# - "answer in each order": the model's answer and the right answer, in a task that asks each question in several rows,
#   with the options in another order in each row, as MMBench does. A question counts as right only if all of its rows
#   are right.
RowLog = Literal["score", "answer", "answer in each order"]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One task of a harness.

    Attributes:
        title: The benchmark's name in tables.
        harness: The harness that scores it.
        task: The harness's name for the benchmark.
        metric: The harness's name for the score that is reported here.
        scale: The metric's largest value, such as 100 for percent.
        choice: What was chosen here where the paper leaves the method open.
        row_log: What the harness logs for each row.
        include_path: The folder with the task's file; `None` for a task that the harness knows.
    """

    title: str
    harness: Literal["lmms-eval", "lm-eval"]
    task: str
    metric: str
    scale: float = 1.0
    choice: str = ""
    row_log: RowLog = "score"
    include_path: Path | None = None


PAPER = (
    Benchmark(
        title="MMBench-EN",
        harness="lmms-eval",
        task="mmbench_en_dev_static",
        metric="gpt_eval_score",
        scale=100.0,
        choice="rules find the letter in an answer; the benchmark itself has a paid model find it, or guesses",
        row_log="answer in each order",
    ),
    Benchmark(
        title="MM-Star",
        harness="lmms-eval",
        task="mmstar",
        metric="average",
        choice="mean over the finer categories",
    ),
    Benchmark(
        title="POPE",
        harness="lmms-eval",
        task="pope",
        metric="pope_accuracy",
        choice="accuracy, not F1",
    ),
    Benchmark(
        title="SEED-Bench-2-Plus",
        harness="lmms-eval",
        task="seedbench_2_plus",
        metric="seedbench_2_plus_all",
        choice="the answer's first letter",
        row_log="answer",
    ),
    Benchmark(
        title="OCRBench",
        harness="lmms-eval",
        task="ocrbench",
        metric="ocrbench_accuracy",
        choice="number of right answers divided by 1000, even if --limit asks fewer questions",
    ),
    Benchmark(
        title="ScienceQA",
        harness="lmms-eval",
        task="scienceqa_img",
        metric="exact_match",
        choice="the questions with a picture; the paper doesn't say which questions it took",
    ),
    Benchmark(
        title="AI2D",
        harness="lmms-eval",
        task="ai2d",
        metric="exact_match",
        choice="answers are letters",
    ),
    Benchmark(
        title="HellaSwag",
        harness="lm-eval",
        task="hellaswag",
        metric="acc_norm",
        choice="likelihood divided by length, no chat format",
    ),
    Benchmark(
        title="MMLU",
        harness="lm-eval",
        task="mmlu",
        metric="acc",
        choice="likelihood of letters, no chat format",
    ),
)

# In a folder of task files, the file that says which tasks there are and how they are scored.
OWN_BENCHMARKS = "benchmarks.json"


def read_own_benchmarks(folder: Path) -> tuple[Benchmark, ...]:
    """The tasks of one's own in a folder: `benchmarks.json` lists them, with the fields of [`Benchmark`].

    Both harnesses ask them in the model's chat format. Of the paper's benchmarks, only those of lmms-eval are.

    Raises:
        UserError: if the file is missing or can't be read.
    """
    benchmarks: list[Benchmark] = read_record(list[Benchmark], folder / OWN_BENCHMARKS)
    return tuple(replace(benchmark, include_path=folder) for benchmark in benchmarks)
