"""Renders a file of results as Markdown: a table for each part, with a row for each arm."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Line, read_lines


# The heading, the name of the figure, the factor that it is multiplied by, and its format.
Column = tuple[str, str, float, str]
TRAINING: list[Column] = [
    ("tokens/s", "tokens_per_second", 1, ",.0f"),
    ("s a step", "seconds_per_step", 1, ".3f"),
    ("% of 989 TFLOP/s", "share_of_peak", 100, ".1f"),
    ("% of the best matrix product", "share_of_product", 100, ".1f"),
    ("layers: % of 989", "layers_share_of_peak", 100, ".1f"),
    ("layers: % of the best matrix product", "layers_share_of_product", 100, ".1f"),
    ("loss", "loss", 1, ".4f"),
    ("padding %", "padding_share", 100, ".0f"),
    ("GiB", "peak_memory_gib", 1, ".2f"),
]
COLUMNS: dict[str, list[Column]] = {
    "ceilings": [
        ("best TFLOP/s", "best_tflops", 1, ".0f"),
        ("median TFLOP/s", "median_tflops", 1, ".0f"),
        ("TB/s", "median_tb_per_second", 1, ".2f"),
    ],
    "norm": [
        ("µs", "microseconds", 1, ".1f"),
        ("error of the output", "output_relative_error", 1, ".1e"),
        ("error of the gradient", "gradient_relative_error", 1, ".1e"),
    ],
    "attention": [
        ("ms", "milliseconds", 1, ".2f"),
        ("error of the output", "output_relative_error", 1, ".1e"),
        ("of the query's gradient", "query_relative_error", 1, ".1e"),
        ("of the key's", "key_relative_error", 1, ".1e"),
        ("of the value's", "value_relative_error", 1, ".1e"),
        ("first call, ms", "first_call_ms", 1, ".1f"),
        ("slowest first call, ms", "slowest_first_call_ms", 1, ".1f"),
        ("second call, ms", "second_call_ms", 1, ".1f"),
    ],
    "small": TRAINING,
    "large": TRAINING,
    "large_full": TRAINING,
    "large_4bit": TRAINING,
}
# By part: the heading of the column that compares an arm with the arm that its line names as `beside`, and the figure
# whose ratio the column shows.
COMPARED = {
    "norm": ("time over", "microseconds"),
    "attention": ("time over", "milliseconds"),
    "small": ("tokens/s over", "tokens_per_second"),
    "large": ("tokens/s over", "tokens_per_second"),
    "large_full": ("tokens/s over", "tokens_per_second"),
    "large_4bit": ("tokens/s over", "tokens_per_second"),
}


def render(path: Path) -> str:
    """The tables of all lines in a file, one for each device and part."""
    lines = read_lines(path)
    tables = []
    for device in dict.fromkeys(line.device for line in lines):
        device_lines = [line for line in lines if line.device == device]
        product = best_product(device_lines)
        for part in dict.fromkeys(line.part for line in device_lines):
            part_lines = [line for line in device_lines if line.part == part]
            tables.append(f"{part}, {device}\n\n{render_part(part, part_lines, product)}")
    return "\n".join(tables)


def best_product(lines: list[Line]) -> float | None:
    """The FLOP/s of the fastest matrix product that was measured; `None` if none was."""
    teraflops = []
    for line in lines:
        if line.figures is not None and "best_tflops" in line.figures:
            teraflops.append(line.figures["best_tflops"])
    return max(teraflops) * 1e12 if teraflops else None


def render_part(part: str, lines: list[Line], product: float | None) -> str:
    """The table of a part."""
    columns = COLUMNS[part]
    header = ["", *(heading for heading, *_ in columns)]
    alignment = ["---", *["---:"] * len(columns)]
    if part in COMPARED:
        header += [COMPARED[part][0], ""]
        alignment += ["---:", "---"]
    rows = [header, alignment]

    figures = {line.arm: with_product(line.figures, product) for line in lines if line.figures is not None}
    for line in lines:
        if line.error is not None:
            rows.append([line.arm, render_error(line.error)])
            continue
        cells = [render_cell(figures[line.arm], column) for column in columns]
        if part in COMPARED:
            _, compared_figure = COMPARED[part]
            cells += render_comparison(line, figures, compared_figure)
        rows.append([line.arm, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_product(figures: dict[str, Any], product: float | None) -> dict[str, Any]:
    """The figures of a training with its speed as a share of the fastest matrix product, if one was measured."""
    if product is None or "model_flops_per_second" not in figures:
        return figures
    return figures | {
        "share_of_product": figures["model_flops_per_second"] / product,
        "layers_share_of_product": figures["layers_flops_per_second"] / product,
    }


def render_error(error: str) -> str:
    """The beginning of an error's first line, without bars, which would end the cell."""
    first_line = error.partition("\n")[0]
    return first_line[:150].replace("|", "/")


def render_cell(figures: dict[str, Any], column: Column) -> str:
    """A figure as text; an empty text if the arm doesn't have this figure."""
    _, name, factor, number_format = column
    if name not in figures:
        return ""
    return format(figures[name] * factor, number_format)


def render_comparison(line: Line, figures: dict[str, dict[str, Any]], name: str) -> list[str]:
    """The ratio of an arm's figure to that of the arm that it is compared with, and that arm's name."""
    if line.beside is None or line.beside not in figures:
        return ["", ""]
    ratio = figures[line.arm][name] / figures[line.beside][name]
    return [f"{ratio:.2f}", line.beside]
