"""The table: a line for each benchmark, a column for each model, and how each figure was measured."""

from collections.abc import Mapping, Sequence

from scipy.special import stdtrit

from evaluation.benchmarks import PAPER, Benchmark
from evaluation.figures import Figure, mean_and_error


# By model and by task.
Results = Mapping[str, Mapping[str, Figure]]
LEVEL = 0.95


def render(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """Markdown, in percent: figures ± standard error, and differences to the first model with 95% intervals."""
    names = list(results)
    header = [*names, *(f"{name} − {names[0]} (95% interval)" for name in names[1:])]
    lines = [["benchmark", *header, "how"], ["---", *["---:"] * len(header), "---"]]
    lines += [_line(benchmark, [given.get(benchmark.task) for given in results.values()]) for benchmark in benchmarks]
    means = [_mean(given) for given in results.values()]
    if any(means):
        lines.append([f"mean of the {len(PAPER)}", *means, *[""] * (len(names) - 1), "plain mean, as in Table 4"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(benchmark: Benchmark, figures: Sequence[Figure | None]) -> list[str]:
    cells = [_value(figure) for figure in figures]
    cells += [_difference(figures[0], figure) for figure in figures[1:]]
    rows = [figure.evaluation for figure in figures if figure]
    how = [f"{row.harness} {row.task}; {row.metric}; {row.split}, n = {row.n}; {row.choice}" for row in rows[:1]]
    return [benchmark.title, *cells, *(how or [""])]


def _value(figure: Figure | None) -> str:
    if figure is None:
        return "no result"
    error = figure.evaluation.standard_error
    return f"{100 * figure.evaluation.value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _difference(first: Figure | None, second: Figure | None) -> str:
    """Second minus first, with Student's t interval over the same rows in pairs."""
    if first is None or second is None:
        return "no result"
    change = f"{100 * (second.evaluation.value - first.evaluation.value):+.1f}"
    if first.scores is None or second.scores is None:
        return f"{change} (rows not known)"
    pairs = second.scores - first.scores  # NaN for a row of one alone
    if pairs.hasnans:
        return f"{change} (they answered other questions)"
    value, error = mean_and_error(pairs)
    if error is None:
        return f"{change} (too few rows that differ)"
    half = stdtrit(len(pairs) - pairs.index.get_level_values("group").nunique(), (1 + LEVEL) / 2) * error
    return f"{change} ({100 * (value - half):+.1f} to {100 * (value + half):+.1f})"


def _mean(results: Mapping[str, Figure]) -> str:
    """The mean of the paper's nine in percent; empty if one is missing."""
    values = [results[benchmark.task].evaluation.value for benchmark in PAPER if benchmark.task in results]
    return f"{100 * sum(values) / len(values):.1f}" if len(values) == len(PAPER) else ""
