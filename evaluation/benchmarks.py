"""The nine benchmarks of the paper's Table 4 (arXiv 2512.08374), and what was chosen where it says nothing.

The paper names neither harness, shots, split nor POPE's metric. Every choice is printed next to its number.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Benchmark:
    """One task of a harness.

    Attributes:
        harness: The one that scores it.
        task: Its name there.
        title: Its name in tables.
        metric: The harness's name of the figure to report.
        scale: The metric's largest value.
        choice: What was chosen where the paper leaves it open.
    """

    harness: Literal["lmms-eval", "lm-eval"]
    task: str
    title: str
    metric: str
    scale: float
    choice: str = ""


PAPER = (
    Benchmark(
        "lmms-eval", "mmbench_en_dev_static", "MMBench-EN", "gpt_eval_score", 100.0,
        "letters read by rules; the judged variant asks a paid model, and guesses where that fails",
    ),
    Benchmark("lmms-eval", "mmstar", "MM-Star", "average", 1.0, "mean over the finer categories"),
    Benchmark("lmms-eval", "pope", "POPE", "pope_accuracy", 1.0, "accuracy, not F1"),
    Benchmark(
        "lmms-eval", "seedbench_2_plus", "SEED-Bench-2-Plus", "seedbench_2_plus_all", 1.0, "the answer's first letter"
    ),
    Benchmark("lmms-eval", "ocrbench", "OCRBench", "ocrbench_accuracy", 1.0, "right of 1000, under --limit too"),
    Benchmark(
        "lmms-eval", "scienceqa_img", "ScienceQA", "exact_match", 1.0,
        "questions with a picture; the paper doesn't say which",
    ),
    Benchmark("lmms-eval", "ai2d", "AI2D", "exact_match", 1.0, "letters"),
    Benchmark("lm-eval", "hellaswag", "HellaSwag", "acc_norm", 1.0, "likelihood by length, no chat format"),
    Benchmark("lm-eval", "mmlu", "MMLU", "acc", 1.0, "likelihood of letters, no chat format"),
)  # fmt: skip
# Which lm-eval, too, asks in the model's chat format.
OURS = (
    Benchmark("lmms-eval", "digits", "digits", "exact_match", 1.0),
    Benchmark("lm-eval", "digits_lm_eval", "digits, lm-eval", "exact_match", 1.0),
    Benchmark("lmms-eval", "emoji", "emoji", "exact_match", 1.0),
)
