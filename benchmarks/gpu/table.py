"""Renders a file of results as Markdown: a table for each device and part, with a row for each arm."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.gpu.results import Figures, Line, read_lines


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    figure: str
    """The name of the figure that the column shows."""
    number_format: str
    factor: float = 1
    """The figure is multiplied by this, for example by 100 to show percent."""


class Comparison(NamedTuple):
    """A column with the ratio of an arm's figure to the same figure of the arm in the line's `compared_with`."""

    heading: str
    figure: str
    """The name of the compared figure."""


TRAINING_COLUMNS = [
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("s a step", "seconds_per_step", ".3f"),
    Column("% of 989 TFLOP/s", "share_of_peak", ".1f", factor=100),
    Column("layers: % of 989 TFLOP/s", "layers_share_of_peak", ".1f", factor=100),
    Column("loss", "loss", ".4f"),
    Column("% padding", "padding_share", ".0f", factor=100),
    Column("peak GiB", "peak_memory_gib", ".2f"),
    Column("reserved GiB", "reserved_memory_gib", ".2f"),
    Column("s of compiling", "compile_seconds", ".0f"),
    Column("graphs", "graphs", ".0f"),
    Column("graphs after the warm-up", "graphs_after_warmup", ".0f"),
    Column("% of a step with a kernel", "busy_share", ".0f", factor=100),
]
# The columns of each part's table.
COLUMNS = {
    "ceilings": [
        Column("best TFLOP/s", "best_tflops", ".0f"),
        Column("median TFLOP/s", "median_tflops", ".0f"),
        Column("median TB/s", "median_tb_per_second", ".2f"),
    ],
    "norm": [
        Column("µs", "microseconds", ".1f"),
        Column("error of the output", "output_relative_error", ".1e"),
        Column("error of the gradient", "gradient_relative_error", ".1e"),
    ],
    "attention": [
        Column("ms", "milliseconds", ".2f"),
        Column("error of the output", "output_relative_error", ".1e"),
        Column("error of the query's gradient", "query_relative_error", ".1e"),
        Column("error of the key's gradient", "key_relative_error", ".1e"),
        Column("error of the value's gradient", "value_relative_error", ".1e"),
        Column("first call, ms", "first_call_ms", ".1f"),
        Column("slowest first call, ms", "slowest_first_call_ms", ".1f"),
        Column("second call, ms", "second_call_ms", ".1f"),
    ],
    "small": TRAINING_COLUMNS,
    "large": TRAINING_COLUMNS,
    "large_full": TRAINING_COLUMNS,
    "large_4bit": TRAINING_COLUMNS,
}
# Below this heading stands the ratio, and in the next cell the other arm's name, as in "1.50 | TRL".
TRAINING_COMPARISON = Comparison("tokens/s over", "tokens_per_second")
# The comparison of each part. The arms of "ceilings" aren't compared.
COMPARISONS = {
    "norm": Comparison("time over", "microseconds"),
    "attention": Comparison("time over", "milliseconds"),
    "small": TRAINING_COMPARISON,
    "large": TRAINING_COMPARISON,
    "large_full": TRAINING_COMPARISON,
    "large_4bit": TRAINING_COMPARISON,
}


def render(path: Path) -> str:
    """The tables of all lines in a file, one for each device and part."""
    lines = read_lines(path)
    devices = dict.fromkeys(line.device for line in lines)  # each device once, in the file's order
    tables = []
    for device in devices:
        device_lines = [line for line in lines if line.device == device]
        parts = dict.fromkeys(line.part for line in device_lines)
        for part in parts:
            part_lines = [line for line in device_lines if line.part == part]
            table = render_part(part, part_lines)
            tables.append(f"{part}, {device}\n\n{table}")
    return "\n".join(tables)


def render_part(part: str, lines: list[Line]) -> str:
    """The table of a part, with the columns for which an arm has a figure. Each arm's lines are of its last commit."""
    measured = {name for line in lines for name in line.figures or {}}
    columns = [column for column in COLUMNS[part] if column.figure in measured]
    comparison = COMPARISONS.get(part)
    header = ["", *[column.heading for column in columns]]
    alignment = ["---"] + len(columns) * ["---:"]
    if comparison is not None:
        header += [comparison.heading, ""]  # the ratio, and the name of the other arm
        alignment += ["---:", "---"]
    rows = [header, alignment]

    lines_by_arm: dict[str, list[Line]] = {}
    figures_by_arm: dict[str, list[Figures]] = {}
    newest_commits = {line.arm: line.commit for line in lines}
    for line in lines:
        if line.commit != newest_commits[line.arm]:
            continue
        lines_by_arm.setdefault(line.arm, []).append(line)
        if line.figures is not None:
            figures_by_arm.setdefault(line.arm, []).append(line.figures)

    for arm, arm_lines in lines_by_arm.items():
        error = arm_lines[-1].error
        if error is not None:
            rows.append([arm, render_error(error)])  # Markdown leaves the other cells empty
            continue
        cells = [render_cell(figures_by_arm[arm], column) for column in columns]
        if comparison is not None:
            cells += render_comparison(arm_lines[-1], newest_commits, figures_by_arm, comparison.figure)
        rows.append([arm, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def render_error(error: str) -> str:
    """The beginning of an error's first line. Each "|" is replaced, because it would end the table's cell."""
    first_line = error.partition("\n")[0]
    return first_line[:150].replace("|", "/")


def render_cell(repeats: list[Figures], column: Column) -> str:
    """An arm's figure in a column as text, the median of its repeats with the smallest and the largest.

    Empty if the arm lacks this figure.
    """
    values = [figures[column.figure] * column.factor for figures in repeats if column.figure in figures]
    if not values:
        return ""
    text = format(median(values), column.number_format)
    if len(values) == 1:
        return text
    return f"{text} ({min(values):{column.number_format}} to {max(values):{column.number_format}})"


def render_comparison(
    line: Line, commits: dict[str, str | None], figures_by_arm: dict[str, list[Figures]], figure: str
) -> list[str]:
    """Two cells: the ratio of an arm's figure to the other arm's, medians of repeats, and the other arm's name.

    Args:
        line: The arm's line. Its `compared_with` names the other arm.
        commits: The commit that each arm's figures are of, by the arm's name.
        figures_by_arm: The figures of all arms' repeats, by the arm's name.
        figure: The name of the compared figure.

    Returns:
        Two empty cells if the line names no other arm, or if the other arm has no figures of the line's commit.
    """
    other_arm = line.compared_with
    if other_arm is None or other_arm not in figures_by_arm or commits[other_arm] != line.commit:
        return ["", ""]
    value, other_value = (median(figures[figure] for figures in figures_by_arm[arm]) for arm in (line.arm, other_arm))
    return [f"{value / other_value:.2f}", other_arm]
