"""The table: a line for each benchmark, a column for each model, and how each figure came about."""

from collections.abc import Mapping, Sequence
from math import sqrt

from evaluation.benchmarks import PAPER, Benchmark
from evaluation.harness import Figure, Result
from evaluation.scores import difference


# By model and task.
Results = Mapping[str, Mapping[str, Result]]


def render(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """Markdown: figures in percent ± standard error, and differences to the first model with 95% intervals."""
    names = list(results)
    first = names[0]
    others = [f"{name} − {first} (95% interval)" for name in names[1:]]
    lines = ["| benchmark | " + " | ".join([*names, *others]) + " | how |"]
    lines.append("|---|" + "---:|" * (len(names) + len(others)) + "---|")
    for benchmark in benchmarks:
        given = [results[name].get(benchmark.task) for name in names]
        for metric in dict.fromkeys(figure.metric for result in given if result for figure in result.figures):
            figures = [_find(result, metric) for result in given]
            cells = [_value(figure) for figure in figures]
            cells += [_difference(figures[0], figure) for figure in figures[1:]]
            title = benchmark.title if benchmark.metric else f"{benchmark.title}, {metric}"
            how = next(_how(benchmark, result, metric) for result in given if _find(result, metric))
            lines.append(f"| {title} | " + " | ".join(cells) + f" | {how} |")
    means = [_mean(results[name]) for name in names]
    if any(means):
        cells = [mean or "" for mean in means] + [""] * len(others)
        lines.append(f"| mean of the {len(PAPER)} | " + " | ".join(cells) + " | plain mean, as in Table 4 |")
    return "\n".join(lines)


def _find(result: Result | None, metric: str) -> Figure | None:
    return next((figure for figure in result.figures if figure.metric == metric), None) if result else None


def _value(figure: Figure | None) -> str:
    if figure is None:
        return "no result"
    error = "" if figure.standard_error is None else f" ± {100 * figure.standard_error:.1f}"
    return f"{100 * figure.value:.1f}{error}"


def _difference(first: Figure | None, second: Figure | None) -> str:
    if first is None or second is None:
        return "no result"
    change = f"{100 * (second.value - first.value):+.1f}"
    if first.rows is None or second.rows is None:
        return f"{change} (rows not known)"
    try:
        found = difference(first.rows, second.rows)
    except ValueError as error:
        return f"{change} ({error})"
    if found.interval is None:
        return f"{change} (too few rows)"
    low, high = (100 * bound for bound in found.interval)
    return f"{change} ({low:+.1f} to {high:+.1f})"


def _how(benchmark: Benchmark, result: Result | None, metric: str) -> str:
    figure = _find(result, metric)
    assert result is not None
    assert figure is not None
    parts = [f"{result.harness} {benchmark.task}", metric, f"{result.split}, n = {figure.n}", f"{result.shots}-shot"]
    return "; ".join([*parts, benchmark.choice] if benchmark.choice else parts)


def _mean(results: Mapping[str, Result]) -> str | None:
    """The mean of the paper's nine, where all of them are there and whole."""
    found = [results.get(benchmark.task) for benchmark in PAPER]
    if any(result is None or result.settings["limit"] is not None for result in found):
        return None
    figures = [result.figures[0] for result in found if result]
    value = sum(figure.value for figure in figures) / len(figures)
    errors = [figure.standard_error for figure in figures if figure.standard_error is not None]
    error = (
        f" ± {100 * sqrt(sum(error**2 for error in errors)) / len(figures):.1f}" if len(errors) == len(PAPER) else ""
    )
    return f"{100 * value:.1f}{error}"
