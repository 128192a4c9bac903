"""The nine benchmarks of the paper's Table 4 (arXiv 2512.08374), and what was chosen where it says nothing.

The paper names neither harness, shots, split nor POPE's metric. Every choice is printed beside its number.
"""

from dataclasses import dataclass
from typing import Literal


Harness = Literal["lmms-eval", "lm-eval"]


@dataclass(frozen=True)
class Benchmark:
    """One task of a harness.

    Attributes:
        harness: Which one scores it.
        task: Its name there.
        title: What tables call it.
        metric: The figure that counts, as the harness calls it; all of its figures where it is `None`.
        scale: The metric's largest value.
        choice: What was chosen where the paper leaves it open.
        in_chat: Whether lm-eval asks in the model's chat format.
        is_gated: Whether its file demands a token of the Hub, even though the data is public.
        whole_only: Why it means nothing on a part of its rows, if so.
    """

    harness: Harness
    task: str
    title: str
    metric: str | None = None
    scale: float = 1.0
    choice: str = ""
    in_chat: bool = False
    is_gated: bool = False
    whole_only: str | None = None


PICTURES = (
    Benchmark(
        "lmms-eval", "mmbench_en_dev_static", "MMBench-EN", "gpt_eval_score", 100.0,
        "letters read by rules: the judged variant asks a paid model, and guesses where that fails", is_gated=True,
    ),
    Benchmark("lmms-eval", "mmstar", "MM-Star", "average", choice="mean over the finer categories", is_gated=True),
    Benchmark("lmms-eval", "pope", "POPE", "pope_accuracy", choice="accuracy, not F1", is_gated=True),
    Benchmark(
        "lmms-eval", "seedbench_2_plus", "SEED-Bench-2-Plus", "seedbench_2_plus_all",
        choice="the answer's first letter", is_gated=True,
    ),
    Benchmark(
        "lmms-eval", "ocrbench", "OCRBench", "ocrbench_accuracy", choice="right of 1000", is_gated=True,
        whole_only="its score is divided by 1000, whatever the number of rows",
    ),
    Benchmark(
        "lmms-eval", "scienceqa_img", "ScienceQA", "exact_match",
        choice="questions with a picture; the paper doesn't say which", is_gated=True,
    ),
    Benchmark("lmms-eval", "ai2d", "AI2D", "exact_match", choice="letters", is_gated=True),
)  # fmt: skip
TEXT = (
    Benchmark("lm-eval", "hellaswag", "HellaSwag", "acc_norm", choice="likelihood by length, no chat format"),
    Benchmark("lm-eval", "mmlu", "MMLU", "acc", choice="likelihood of letters, no chat format"),
)
PAPER = PICTURES + TEXT
OURS = (
    Benchmark("lmms-eval", "digits", "digits", "exact_match"),
    Benchmark("lm-eval", "digits_lm_eval", "digits, lm-eval", "exact_match", in_chat=True),
)


def find_benchmark(name: str) -> Benchmark:
    """A benchmark by the name of its task; any other task of a harness as `lmms-eval:<task>` or `lm-eval:<task>`.

    Raises:
        ValueError: if the name is neither.
    """
    known = {benchmark.task: benchmark for benchmark in (*PAPER, *OURS)}
    harness, _, task = name.rpartition(":")
    if not harness and name in known:
        return known[name]
    if task and harness == "lmms-eval":
        return Benchmark("lmms-eval", task, task)
    if task and harness == "lm-eval":
        return Benchmark("lm-eval", task, task)
    raise ValueError(
        f"--tasks {name}: there are {', '.join(known)}; give any other as lmms-eval:<task> or lm-eval:<task>."
    )
