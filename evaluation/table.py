"""The table: a line for each benchmark, a column for each model, and how each score was measured."""

from collections.abc import Mapping, Sequence

from scipy.special import stdtrit

from evaluation.benchmarks import PAPER, Benchmark
from evaluation.results import TaskResult
from evaluation.row_scores import mean_and_error


# By model and by task.
Results = Mapping[str, Mapping[str, TaskResult]]
LEVEL = 0.95


def render(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """Markdown, in percent: scores ± standard error, and differences to the first model with 95% intervals."""
    names = list(results)
    differences = [f"{name} − {names[0]} (95% interval)" for name in names[1:]]
    header = ["benchmark", *names, *differences, "how"]
    alignment = ["---", *["---:"] * (len(header) - 2), "---"]
    rows = [header, alignment]

    for benchmark in benchmarks:
        rows.append(render_benchmark(benchmark, [given.get(benchmark.task) for given in results.values()]))

    means = [mean_of_paper(given) for given in results.values()]
    if any(means):
        rows.append([f"mean of the {len(PAPER)}", *means, *[""] * len(differences), "plain mean, as in Table 4"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def render_benchmark(benchmark: Benchmark, results: Sequence[TaskResult | None]) -> list[str]:
    """The row of a benchmark; `None` stands for a model that has no result."""
    scores = [render_score(result) for result in results]
    differences = [render_difference(results[0], result) for result in results[1:]]
    return [benchmark.title, *scores, *differences, describe_measurement(results)]


def describe_measurement(results: Sequence[TaskResult | None]) -> str:
    """How a benchmark was measured, of the first model that has a result."""
    for result in results:
        if result is not None:
            row = result.evaluation
            return f"{row.harness} {row.task}; {row.metric}; {row.split}, n = {row.n}; {row.choice}"
    return ""


def render_score(result: TaskResult | None) -> str:
    """A score in percent with its standard error, if that is known."""
    if result is None:
        return "no result"
    score = f"{100 * result.evaluation.value:.1f}"
    error = result.evaluation.standard_error
    return score if error is None else f"{score} ± {100 * error:.1f}"


def render_difference(first: TaskResult | None, second: TaskResult | None) -> str:
    """Second minus first, with Student's t interval over the same rows in pairs."""
    if first is None or second is None:
        return "no result"
    change = f"{100 * (second.evaluation.value - first.evaluation.value):+.1f}"
    if first.row_scores is None or second.row_scores is None:
        return f"{change} (rows not known)"

    pairs = second.row_scores - first.row_scores  # NaN for a row of one alone
    if pairs.hasnans:
        return f"{change} (they answered other questions)"
    mean, error = mean_and_error(pairs)
    if error is None:
        return f"{change} (too few rows that differ)"

    num_groups = pairs.index.get_level_values("group").nunique()
    half_width = stdtrit(len(pairs) - num_groups, (1 + LEVEL) / 2) * error
    return f"{change} ({100 * (mean - half_width):+.1f} to {100 * (mean + half_width):+.1f})"


def mean_of_paper(results: Mapping[str, TaskResult]) -> str:
    """The mean of the paper's nine in percent; empty if one is missing."""
    scores = [results[benchmark.task].evaluation.value for benchmark in PAPER if benchmark.task in results]
    if len(scores) < len(PAPER):
        return ""
    return f"{100 * sum(scores) / len(scores):.1f}"
