"""The table: a line for each benchmark, a column for each model, and how each figure was measured."""

from collections.abc import Mapping, Sequence

from scipy.special import stdtrit

from evaluation.benchmarks import PAPER, Benchmark
from evaluation.figures import Figure, mean_and_error


# By model and by the benchmark's name.
Results = Mapping[str, Mapping[str, Sequence[Figure]]]
LEVEL = 0.95


def render(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """Markdown: figures ± standard error, and differences to the first model with 95% intervals.

    Fractions are in percent; figures without a known scale are as the harness gives them.
    """
    names = [name.replace("|", "\\|") for name in results]
    header = [*names, *(f"{name} − {names[0]} (95% interval)" for name in names[1:])]
    lines = [["benchmark", *header, "how"], ["---", *["---:"] * len(header), "---"]]
    for benchmark in benchmarks:
        lines += _lines(benchmark, [of_model.get(benchmark.name, ()) for of_model in results.values()])
    means = [_mean(of_model) for of_model in results.values()]
    if any(means):
        empty = [""] * (len(names) - 1)
        lines.append([f"mean of the {len(PAPER)}", *means, *empty, "plain mean, as in Table 4"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(benchmark: Benchmark, given: Sequence[Sequence[Figure]]) -> list[list[str]]:
    """A line for each figure; a single line if no model has any."""
    by_model = [{(figure.evaluation.task, figure.evaluation.metric): figure for figure in of} for of in given]
    lines = []
    for task, metric in dict.fromkeys(key for figures in by_model for key in figures):
        figures = [found.get((task, metric)) for found in by_model]
        cells = [_value(benchmark, figure) for figure in figures]
        cells += [_difference(benchmark, figures[0], figure) for figure in figures[1:]]
        row = next(figure.evaluation for figure in figures if figure)
        how = f"{row.harness} {benchmark.task}; {metric}; {row.split}, n = {row.n}; {row.choice}"
        lines.append([benchmark.title if benchmark.metric else f"{task}, {metric}", *cells, how])
    return lines or [[benchmark.title, *["no result"] * (2 * len(given) - 1), ""]]


def _number(benchmark: Benchmark, value: float, sign: str = "") -> str:
    return f"{value:{sign}.4g}" if benchmark.scale is None else f"{100 * value:{sign}.1f}"


def _value(benchmark: Benchmark, figure: Figure | None) -> str:
    if figure is None:
        return "no result"
    error = figure.evaluation.standard_error
    number = _number(benchmark, figure.evaluation.value)
    return number if error is None else f"{number} ± {_number(benchmark, error)}"


def _difference(benchmark: Benchmark, first: Figure | None, second: Figure | None) -> str:
    """Second minus first, with Student's t interval over the same rows in pairs."""
    if first is None or second is None:
        return "no result"
    change = _number(benchmark, second.evaluation.value - first.evaluation.value, "+")
    if first.scores is None or second.scores is None:
        return f"{change} (rows not known)"
    pairs = second.scores - first.scores  # NaN for a row of one alone
    if pairs.hasnans:
        return f"{change} (they answered other questions)"
    value, error = mean_and_error(pairs)
    if error is None:
        return f"{change} (too few rows that differ)"
    half = stdtrit(len(pairs) - pairs.index.get_level_values("group").nunique(), (1 + LEVEL) / 2) * error
    low, high = (_number(benchmark, bound, "+") for bound in (value - half, value + half))
    return f"{change} ({low} to {high})"


def _mean(results: Mapping[str, Sequence[Figure]]) -> str:
    """The mean of the paper's nine in percent; empty if one is missing."""
    values = [results[benchmark.name][0].evaluation.value for benchmark in PAPER if benchmark.name in results]
    return f"{100 * sum(values) / len(values):.1f}" if len(values) == len(PAPER) else ""
