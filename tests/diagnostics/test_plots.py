"""The figures: which there are, that lines can be told apart, and that they can stand in one page."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from made_report import make_pictures, make_points, make_questions, make_report
from matplotlib.figure import Figure

from diagnostics.plots import (
    draw_attention,
    draw_dynamics,
    draw_figures,
    draw_gaps,
    draw_layers,
    draw_maps,
    draw_spaces,
    save,
    to_svg,
)
from diagnostics.results import Report


@pytest.fixture(autouse=True, scope="module")
def without_a_display() -> None:
    plt.switch_backend("agg")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def rows(figure: Figure) -> int:
    return len({round(axis.get_position().y0, 2) for axis in figure.axes})


def gaps(report: Report) -> Figure:
    return draw_gaps([model.name for model in report.models], [model.layers for model in report.models])


def test_all_figures_of_two_models(tmp_path: Path) -> None:
    report = make_report("first", r"with <script>|$\frac{a")
    figures = draw_figures(report, make_pictures(report), make_questions())
    assert set(figures) == {
        "overview", "layers", "norms", "updates", "attraction", "attention", "heads", "keys", "lengths", "tsne",
        "attention_maps",
    }  # fmt: skip
    overview = figures["overview"]
    assert [axis.get_ylabel() for axis in overview.axes[:3]] == [
        "norm of tokens", "turning, 1 − cosine", "attention to the picture",
    ]  # fmt: skip
    assert plt.get_fignums() == []  # else a notebook would show all of them below every cell
    svgs = {name: to_svg(figure, name) for name, figure in figures.items()}
    page = "".join(svgs.values())
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)
    assert "<script" not in page
    assert "with &lt;script&gt;|$\\frac{a" in page
    assert "var(--d55e00, #d55e00)" in page
    assert page == "".join(to_svg(figure, name) for name, figure in figures.items())  # the same when made again
    for name in ("attention_maps", "heads"):
        assert any(axis.get_label() == "<colorbar>" for axis in figures[name].axes)
    save(overview, tmp_path / "overview.pdf")
    assert (tmp_path / "overview.pdf").stat().st_size > 1000
    assert overview.number not in plt.get_fignums()


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_for_each_model(count: int) -> None:
    names = ["first", "second", "a name that goes on " * 9][:count]
    report = make_report(*names, num_pictures=1 if count == 1 else 4)
    layers, attention = [m.layers for m in report.models], [m.attention for m in report.models]
    figure = draw_layers(names, layers, attention)
    assert rows(figure) == count
    widths = {round(axis.get_position().width, 2) for axis in figure.axes}
    assert max(widths) > 0.18  # a long name takes no room from the panels
    assert len(draw_layers(names, layers).axes) == 2 * count


def test_parts_that_are_missing() -> None:
    report = make_report("first", "second")
    first, second = report.models
    lacking = replace(second, attention=None, key_space=None, value_space=None)
    drawn = make_pictures(report, keys=False)
    mixed = draw_figures(replace(report, models=[first, lacking]), drawn, make_questions())
    assert "tsne" not in mixed
    assert "not recorded" in to_svg(mixed["overview"], "overview")
    assert "not recorded" in to_svg(mixed["keys"], "keys")
    none = draw_figures(replace(report, models=[lacking]), None, [])
    assert set(none) == {"overview", "layers", "norms", "updates", "attraction"}


def test_lines_are_told_apart_without_a_legend_over_them() -> None:
    """By colour, dash, and a name at the end, right of the axes; names keep apart."""
    (model,) = make_report("first").models
    figure = draw_attention(["first"], [model.attention])
    assert figure.legends == []
    axis = figure.axes[0]
    assert axis.get_legend() is None
    lines = [line for line in axis.get_lines() if not str(line.get_label()).startswith("_")]
    looks = {(line.get_color(), str(line._dash_pattern)) for line in lines}
    assert len(looks) == len(lines) == 4
    right = axis.get_window_extent().x1
    names = [text for text in axis.texts if text.get_text() in {line.get_label() for line in lines}]
    boxes = sorted((text.get_window_extent() for text in names), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(box.x0 >= right for box in boxes)
    assert all(upper.y0 >= lower.y0 + 7 for lower, upper in pairwise(boxes))
    together = gaps(make_report("first", "second", "third"))
    (legend,) = together.legends
    assert all(not legend.get_window_extent().overlaps(axis.get_window_extent()) for axis in together.axes)


@pytest.mark.parametrize(("low", "high"), [(41.0, 43.0), (2.2, 4.7), (0.9, 5.0), (2.0, 90.0), (0.1, 9e4)])
def test_log_axes_have_a_few_round_numbers(low: float, high: float) -> None:
    (model,) = make_report("it").models
    count = len(model.layers.visual.norm.mean)
    curve = replace(model.layers.visual.norm, mean=[low + (high - low) * n / (count - 1) for n in range(count)])
    curve = replace(curve, interval=[None] * count)
    layers = replace(
        model.layers,
        visual=replace(model.layers.visual, norm=curve),
        text=replace(model.layers.text, norm=curve),
    )
    axis = draw_layers(["it"], [layers]).axes[0]
    bottom, top = axis.get_ylim()
    ticks = zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
    shown = [label.get_text() for tick, label in ticks if bottom <= tick <= top]
    assert 2 <= len(shown) <= 9
    assert all(re.fullmatch(r"[\d.]+(e\+\d+)?", text) for text in shown)
    assert len(axis.get_yticks(minor=True)) == 0


def test_keys_share_an_axis_only_where_they_share_a_basis() -> None:
    report = make_report("first", "second")
    first, second = [(model.key_space, model.value_space) for model in report.models]
    far = replace(first[0], mmd=replace(first[0].mmd, mean=[9.0] * 6))
    for share in (True, False):
        axes = draw_spaces(["first", "second"], [(far, first[1]), second], share).axes
        assert (axes[0].get_ylim() == axes[3].get_ylim()) is share


def test_maps_are_of_different_pictures() -> None:
    report = make_report("it")
    (pictures,) = make_pictures(report)
    assert rows(draw_maps(["it"], [pictures], make_questions())) == 3 + 1  # and the colour bar
    repeated = replace(pictures, seen=[pictures.seen[0], pictures.seen[0], pictures.seen[2]])
    assert rows(draw_maps(["it"], [repeated], make_questions())) == 2 + 1


def test_checkpoints_are_told_apart_by_a_colour_scale() -> None:
    figure = draw_dynamics(make_points(6))
    assert figure.legends == []
    assert all(axis.get_legend() is None for axis in figure.axes)
    (bar,) = [axis for axis in figure.axes if axis.get_label() == "<colorbar>"]
    assert bar.get_ylim() == (0, 500)
    by_layer = figure.axes[2]
    assert len({line.get_color() for line in by_layer.get_lines()}) == 6
    assert len(by_layer.collections) == 6  # a band each
    assert draw_dynamics(make_points(1)).axes
