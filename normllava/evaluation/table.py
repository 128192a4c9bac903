"""The table of results: a line for each benchmark, a column for each model, and a column on the method."""

from collections.abc import Mapping, Sequence

from scipy.special import stdtrit

from normllava.evaluation.benchmarks import PAPER, Benchmark
from normllava.evaluation.results import TaskResult
from normllava.evaluation.row_scores import mean_and_error


# Results by the name of the model, then by task.
Results = Mapping[str, Mapping[str, TaskResult]]
CONFIDENCE = 0.95


def render(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """The table in Markdown, with all values in percent.

    A score has its standard error beside it. After the scores come the differences of the other models from the first
    model, each with its 95% interval.
    """
    first_name, *other_names = results
    difference_titles = [f"{name} − {first_name} (95% interval)" for name in other_names]
    header = ["benchmark", first_name, *other_names, *difference_titles, "how"]
    num_value_columns = len(header) - 2  # all but the first and the last
    alignment = ["---", *["---:"] * num_value_columns, "---"]
    lines = [header, alignment]

    for benchmark in benchmarks:
        benchmark_results = [model_results.get(benchmark.task) for model_results in results.values()]
        lines.append(render_benchmark(benchmark, benchmark_results))

    means = [mean_of_paper(model_results) for model_results in results.values()]
    has_means = any(mean != "" for mean in means)
    if has_means:
        no_differences = [""] * len(difference_titles)
        lines.append([f"mean of the {len(PAPER)}", *means, *no_differences, "plain mean, as in Table 4"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def render_benchmark(benchmark: Benchmark, results: Sequence[TaskResult | None]) -> list[str]:
    """The table's line for a benchmark. `results` holds `None` for a model that has no result."""
    scores = [render_score(result) for result in results]
    differences = [render_difference(results[0], result) for result in results[1:]]
    return [benchmark.title, *scores, *differences, describe_measurement(results)]


def describe_measurement(results: Sequence[TaskResult | None]) -> str:
    """How a benchmark was measured, from the first model that has a result; an empty text if none has."""
    for result in results:
        if result is not None:
            evaluation = result.evaluation
            data = f"{evaluation.split}, n = {evaluation.n}"
            return f"{evaluation.harness} {evaluation.task}; {evaluation.metric}; {data}; {evaluation.choice}"
    return ""


def render_score(result: TaskResult | None) -> str:
    """A score in percent, with its standard error if it is known."""
    if result is None:
        return "no result"
    score = f"{100 * result.evaluation.value:.1f}"
    error = result.evaluation.standard_error
    if error is None:
        return score
    return f"{score} ± {100 * error:.1f}"


def render_difference(first: TaskResult | None, second: TaskResult | None) -> str:
    """The second score minus the first in percent, with the 95% interval of a paired t-test over the rows."""
    if first is None or second is None:
        return "no result"
    change = f"{100 * (second.evaluation.value - first.evaluation.value):+.1f}"
    if first.row_scores is None or second.row_scores is None:
        return f"{change} (rows not known)"

    # pandas pairs the rows by their index. A row that only one of the two models has gives NaN.
    row_differences = second.row_scores - first.row_scores
    if row_differences.hasnans:
        return f"{change} (they answered other questions)"
    mean, error = mean_and_error(row_differences)
    if error is None:
        return f"{change} (too few rows that differ)"

    # The mean of each group takes one degree of freedom.
    num_groups = row_differences.index.get_level_values("group").nunique()
    degrees_of_freedom = len(row_differences) - num_groups
    # `stdtrit` gives quantiles of Student's t-distribution. The 95% interval ends at the 97.5% quantile.
    upper_quantile = (1 + CONFIDENCE) / 2
    half_width = stdtrit(degrees_of_freedom, upper_quantile) * error
    low = 100 * (mean - half_width)
    high = 100 * (mean + half_width)
    return f"{change} ({low:+.1f} to {high:+.1f})"


def mean_of_paper(results: Mapping[str, TaskResult]) -> str:
    """A model's mean over the paper's nine benchmarks, in percent; an empty text if a result is missing."""
    if any(benchmark.task not in results for benchmark in PAPER):
        return ""
    scores = [results[benchmark.task].evaluation.value for benchmark in PAPER]
    return f"{100 * sum(scores) / len(scores):.1f}"
