"""The table: a line for each benchmark, a column for each model, and how each figure was measured."""

from collections.abc import Mapping, Sequence
from math import sqrt

from evaluation.benchmarks import PAPER, Benchmark
from evaluation.results import Figure, Result
from evaluation.scores import interval_of_difference


# By model and task.
Results = Mapping[str, Mapping[str, Result]]


def render(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """Markdown: figures ± standard error, and differences to the first model with 95% intervals.

    Fractions are in percent; figures without a known scale are as the harness gives them.
    """
    names = [name.replace("|", "\\|") for name in results]
    others = [f"{name} − {names[0]} (95% interval)" for name in names[1:]]
    lines = ["| benchmark | " + " | ".join([*names, *others]) + " | how |"]
    lines.append("|---|" + "---:|" * (len(names) + len(others)) + "---|")
    for benchmark in benchmarks:
        lines += _lines(benchmark, [of_model.get(benchmark.name) for of_model in results.values()])
    means = [_mean(of_model) for of_model in results.values()]
    if any(means):
        cells = [mean or "" for mean in means] + [""] * len(others)
        lines.append(f"| mean of the {len(PAPER)} | " + " | ".join(cells) + " | plain mean, as in Table 4 |")
    return "\n".join(lines)


def _lines(benchmark: Benchmark, given: Sequence[Result | None]) -> list[str]:
    """A line for each figure; a single line if no model has any."""
    named = {(figure.task, figure.metric): result for result in given if result for figure in result.figures}
    lines = []
    for (task, metric), result in named.items():
        figures = [_find(result, task, metric) for result in given]
        cells = [_value(benchmark, figure) for figure in figures]
        cells += [_difference(benchmark, figures[0], figure) for figure in figures[1:]]
        title = benchmark.title if benchmark.metric else f"{task}, {metric}"
        how = _how(benchmark, result, metric, next(figure.n for figure in figures if figure))
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {how} |")
    if not lines:
        lines.append(f"| {benchmark.title} | " + " | ".join(["no result"] * (2 * len(given) - 1)) + " | |")
    return lines


def _find(result: Result | None, task: str, metric: str) -> Figure | None:
    figures = result.figures if result else []
    return next((figure for figure in figures if (figure.task, figure.metric) == (task, metric)), None)


def _number(benchmark: Benchmark, value: float, sign: str = "") -> str:
    return f"{value:{sign}.4g}" if benchmark.scale is None else f"{100 * value:{sign}.1f}"


def _value(benchmark: Benchmark, figure: Figure | None) -> str:
    if figure is None:
        return "no result"
    error = "" if figure.standard_error is None else f" ± {_number(benchmark, figure.standard_error)}"
    return _number(benchmark, figure.value) + error


def _difference(benchmark: Benchmark, first: Figure | None, second: Figure | None) -> str:
    if first is None or second is None:
        return "no result"
    change = _number(benchmark, second.value - first.value, "+")
    if first.rows is None or second.rows is None:
        return f"{change} (rows not known)"
    try:
        interval = interval_of_difference(first.rows, second.rows)
    except ValueError as error:
        return f"{change} ({error})"
    if interval is None:
        return f"{change} (too few rows that differ)"
    low, high = (_number(benchmark, bound, "+") for bound in interval)
    return f"{change} ({low} to {high})"


def _how(benchmark: Benchmark, result: Result, metric: str, n: int) -> str:
    parts = [f"{result.harness} {benchmark.task}", metric, f"{result.split}, n = {n}", f"{result.shots}-shot"]
    return "; ".join(filter(None, [*parts, "" if result.dtype == "auto" else result.dtype, benchmark.choice]))


def _mean(results: Mapping[str, Result]) -> str | None:
    """The mean of the paper's nine in percent, if all were run on all rows, in one dtype, by one version of each
    harness."""
    given = [results.get(benchmark.name) for benchmark in PAPER]
    found = [result for result in given if result is not None and result.settings["limit"] is None]
    if len(found) < len(PAPER) or len({result.dtype for result in found}) > 1:
        return None
    versions = {(of.harness, result.harness) for of, result in zip(PAPER, found, strict=True)}
    if len(versions) > len({benchmark.harness for benchmark in PAPER}):
        return None
    figures = [result.figures[0] for result in found]  # each has exactly one
    value = 100 * sum(figure.value for figure in figures) / len(figures)
    errors = [figure.standard_error for figure in figures if figure.standard_error is not None]
    if len(errors) < len(figures):
        return f"{value:.1f}"
    return f"{value:.1f} ± {100 * sqrt(sum(error**2 for error in errors)) / len(figures):.1f}"
