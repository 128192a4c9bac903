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
        metric: The harness's name of the figure to report; `None` for all of its figures.
        scale: The metric's largest value; `None` if unknown.
        choice: What was chosen where the paper leaves it open.
        in_chat: Whether lm-eval asks in the model's chat format.
    """

    harness: Literal["lmms-eval", "lm-eval"]
    task: str
    title: str
    metric: str | None = None
    scale: float | None = None
    choice: str = ""
    in_chat: bool = False

    @property
    def name(self) -> str:
        """Its name in `--tasks`; both harnesses have tasks of the same name."""
        return self.task if self in KNOWN else f"{self.harness}:{self.task}"


# Its score is divided by 1000, whatever the number of rows.
OCRBENCH = Benchmark("lmms-eval", "ocrbench", "OCRBench", "ocrbench_accuracy", 1.0, "right of 1000")
PICTURES = (
    Benchmark(
        "lmms-eval", "mmbench_en_dev_static", "MMBench-EN", "gpt_eval_score", 100.0,
        "letters read by rules; the judged variant asks a paid model, and guesses where that fails",
    ),
    Benchmark("lmms-eval", "mmstar", "MM-Star", "average", 1.0, "mean over the finer categories"),
    Benchmark("lmms-eval", "pope", "POPE", "pope_accuracy", 1.0, "accuracy, not F1"),
    Benchmark(
        "lmms-eval", "seedbench_2_plus", "SEED-Bench-2-Plus", "seedbench_2_plus_all", 1.0, "the answer's first letter"
    ),
    OCRBENCH,
    Benchmark(
        "lmms-eval", "scienceqa_img", "ScienceQA", "exact_match", 1.0,
        "questions with a picture; the paper doesn't say which",
    ),
    Benchmark("lmms-eval", "ai2d", "AI2D", "exact_match", 1.0, "letters"),
)  # fmt: skip
TEXT = (
    Benchmark("lm-eval", "hellaswag", "HellaSwag", "acc_norm", 1.0, "likelihood by length, no chat format"),
    Benchmark("lm-eval", "mmlu", "MMLU", "acc", 1.0, "likelihood of letters, no chat format"),
)
PAPER = PICTURES + TEXT
OURS = (
    Benchmark("lmms-eval", "digits", "digits", "exact_match", 1.0),
    Benchmark("lm-eval", "digits_lm_eval", "digits, lm-eval", "exact_match", 1.0, in_chat=True),
    Benchmark("lmms-eval", "emoji", "emoji, Twemoji", "exact_match", 1.0, "the whole name"),
)
KNOWN = PAPER + OURS


def find_benchmark(name: str) -> Benchmark:
    """A benchmark by the name of its task; any other task of a harness as `lmms-eval:<task>` or `lm-eval:<task>`.

    Raises:
        ValueError: if the name is neither.
    """
    harness, _, task = name.rpartition(":")
    for benchmark in KNOWN:
        if task == benchmark.task and harness in ("", benchmark.harness):
            return benchmark
    if task and harness in ("lmms-eval", "lm-eval") and not set(task) & set(",*/ "):
        return Benchmark(harness, task, task)  # type: ignore[arg-type]
    known = ", ".join(benchmark.task for benchmark in KNOWN)
    raise ValueError(
        f"--tasks {name}: there are {known}; give any other, one by one, as lmms-eval:<task> or lm-eval:<task>."
    )
