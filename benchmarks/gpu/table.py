"""A file of results as Markdown: a table a part, a row an arm."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Line, read_lines


# Heading, figure, factor and format.
Column = tuple[str, str, float, str]
TRAINING: list[Column] = [
    ("tokens/s", "tokens_per_second", 1, ",.0f"),
    ("s a step", "seconds_per_step", 1, ".3f"),
    ("% of 989 TFLOP/s", "share_of_peak", 100, ".1f"),
    ("% of the product", "share_of_product", 100, ".1f"),
    ("layers: % of 989", "layers_share_of_peak", 100, ".1f"),
    ("layers: % of the product", "layers_share_of_product", 100, ".1f"),
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
        ("slowest", "slowest_first_call_ms", 1, ".1f"),
        ("second call, ms", "second_call_ms", 1, ".1f"),
    ],
    "small": TRAINING,
    "large": TRAINING,
    "large_full": TRAINING,
    "large_4bit": TRAINING,
}
# What an arm is compared by with the one beside it.
COMPARED = {
    "norm": ("time over", "microseconds"),
    "attention": ("time over", "milliseconds"),
    "small": ("tokens/s over", "tokens_per_second"),
    "large": ("tokens/s over", "tokens_per_second"),
    "large_full": ("tokens/s over", "tokens_per_second"),
    "large_4bit": ("tokens/s over", "tokens_per_second"),
}


def render(path: Path) -> str:
    """Tables of all lines in a file, one for each device and part."""
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
    """FLOP/s of the best matrix product that was measured."""
    reached = [line.figures["best_tflops"] for line in lines if line.figures and "best_tflops" in line.figures]
    return max(reached) * 1e12 if reached else None


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
            rows.append([line.arm, line.error.splitlines()[0][:150].replace("|", "/")])
            continue
        cells = [cell(figures[line.arm], column) for column in columns]
        if part in COMPARED:
            cells += compare(line, figures, COMPARED[part][1])
        rows.append([line.arm, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_product(figures: dict[str, Any], product: float | None) -> dict[str, Any]:
    """Figures of training with their shares of the measured product, where there is one."""
    if product is None or "model_flops_per_second" not in figures:
        return figures
    return {
        **figures,
        "share_of_product": figures["model_flops_per_second"] / product,
        "layers_share_of_product": figures["layers_flops_per_second"] / product,
    }


def cell(figures: dict[str, Any], column: Column) -> str:
    """A figure as text; nothing where an arm hasn't it."""
    _, name, factor, form = column
    return format(figures[name] * factor, form) if name in figures else ""


def compare(line: Line, figures: dict[str, dict[str, Any]], name: str) -> list[str]:
    """A figure over that of the arm beside it, and what that arm is called."""
    if line.beside is None or line.beside not in figures:
        return ["", ""]
    return [format(figures[line.arm][name] / figures[line.beside][name], ".2f"), line.beside]
