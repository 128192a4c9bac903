"""Tests of the report: its box of findings, its numbers, differences and figures. No user's text becomes markup."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from normllava.diagnostics.plots import FIGURES, draw_figures, draw_sweep, save_figure
from normllava.diagnostics.report import (
    DIFFERENCE,
    ModelReport,
    Report,
    box_lines,
    format_factor,
    format_percent,
    join_equal_rows,
    make_sweep_table,
    make_tables,
    measured_on,
    render_html,
    with_interval,
)
from normllava.diagnostics.table import Estimate, Summary, jackknife_rows, make_rows, ratio_rows, summaries_by_dose
from normllava.diagnostics.training_answers import read_training_answers
from normllava.errors import UserError


# A name with characters that HTML, Markdown, TeX or Unicode give a meaning: \u202e reverses the text after it.
HOSTILE = "a|b <script>alert(1)</script> `c` [d](http://e.org) $x$ &amp; \u202e__f__"


def make_rows_of_a_model(
    num_pictures: int = 6, gaps: Sequence[float] = (0.06, -0.15, 0.0), seed: int = 0, with_keys: bool = True
) -> pd.DataFrame:
    """Made-up rows of a model with six layers.

    Args:
        num_pictures: Number of pictures.
        gaps: For each third of the layers, how much more its two layers turn text tokens than image tokens.
        seed: Seed of the random values. A larger seed also makes the ratio larger, so that two models differ.
        with_keys: Whether there are measures of keys.
    """
    rng = np.random.default_rng(seed)
    layers = range(6)
    gap_by_layer = np.repeat(gaps, 2)

    def around(mean: float) -> np.ndarray:
        """A random value near the mean for each picture."""
        return rng.normal(mean, 0.002, num_pictures)

    def around_by_layer(mean: float, num_layers: int = 6) -> np.ndarray:
        """A random value near the mean for each picture and layer."""
        return rng.normal(mean, 0.002, (num_pictures, num_layers))

    rows = [
        make_rows("at_decoder", around(40), "image"),
        ratio_rows("ratio", around(40 + seed), around(20)),
        make_rows("gap", around_by_layer(0) + gap_by_layer, layers=layers),
        ratio_rows("norm_ratio", around_by_layer(40), around_by_layer(20), layers),
        make_rows("attention", around_by_layer(0.3, num_layers=2), layers=[0, 5]),
        make_rows("attention_even", around_by_layer(0.4, num_layers=2), layers=[0, 5]),
        # The gain and the bias have one value for the whole model, and none for a picture.
        make_rows("gain_l2", whole=8.1),
        make_rows("bias_l2", whole=0.1),
    ]
    for modality in ("image", "text"):
        for measure in ("norm", "turning"):
            rows.append(make_rows(measure, around_by_layer(1), modality, layers))
    if with_keys:
        mmd = np.array([0.2, 0.3])  # in layers 0 and 5
        mmd_without_each = around_by_layer(0.25, num_layers=2)  # one row for each picture that is left out
        rows.append(jackknife_rows("keys.mmd", mmd, mmd_without_each, layers=[0, 5]))
        rows.append(make_rows("keys.mmd_halves", layers=[0, 5], whole=mmd))
    return pd.concat(rows, ignore_index=True)


def make_report(rows_by_name: dict[str, pd.DataFrame]) -> Report:
    """A report of several models. `rows_by_name` has each model's rows by the model's name."""
    models = []
    for name, rows in rows_by_name.items():
        num_pictures = int(rows["picture"].max()) + 1
        model = ModelReport(
            name=name,
            model_class="Llava",
            dtype="float32",
            num_layers=6,
            hidden_size=32,
            num_pictures=num_pictures,
            num_tokens={"image": 96},
            excluded={"sink": 2},
            notes=[f"note on {name}"],
            summary=Summary.of(rows),
        )
        models.append(model)
    return Report(
        command="command",
        versions={"torch": "2"},
        data="data",
        passed_over=1,
        unreadable=["row 3: broken"],
        models=models,
    )


def join_rows(rows_by_name: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of all models, with the model's name in the column `model`."""
    return pd.concat([rows.assign(model=name) for name, rows in rows_by_name.items()])


def make_sweep_rows(num_pictures: int = 6) -> pd.DataFrame:
    """Made-up rows of a sweep, in which × 0.3 costs two of three right answers and × 3 changes nothing."""
    ones = np.ones(num_pictures)
    every_third_one = (np.arange(num_pictures) % 3 == 0).astype(float)
    rows = []
    # `named` is 1 where the model's answer is right, else 0.
    for dose, named in ((0.3, every_third_one), (1.0, ones), (3.0, ones)):
        values_by_measure = {
            "changed": 1 - named,
            "loss": 2 - named,
            "loss_change": 1 - named,
            "named": named,
            "named_change": named - 1,
        }
        if dose == 1:
            values_by_measure |= {"length": 2 * ones, "guessing": ones / 3}
        for measure, values in values_by_measure.items():
            rows.append(make_rows(measure, values).assign(dose=dose))
    return pd.concat(rows)


def test_the_box_of_a_model_without_a_sweep() -> None:
    """The gap is above 0 in the first third, below 0 in the middle third and 0 in the last.

    The mean over all layers is below 0, and would hide the first third.
    """
    rows = make_rows_of_a_model(gaps=(0.06, -0.15, 0.0))
    (model,) = make_report({"model": rows}).models
    assert box_lines(model) == [
        "Image embeddings enter with 2.0 times the norm of text embeddings.",
        "Layers turn image tokens more slowly than text tokens in the first third; faster in the middle third; "
        "no clear difference in the last third.",
        "The text gives the picture 30% of its attention; an even share would be 40%.",
        "What to do: make a sweep (--sweep), on rows with answers, to see whether another norm answers better.",
    ]


def test_the_box_of_a_model_with_a_sweep_has_five_lines() -> None:
    (model,) = make_report({"model": make_rows_of_a_model()}).models
    lines = box_lines(replace(model, sweep=["Right answers: ...", "What to do: ..."]))
    assert len(lines) == 5
    assert lines[1:3] == ["Right answers: ...", "What to do: ..."]


@pytest.mark.parametrize(
    ("gaps", "line"),
    [
        pytest.param(
            (0.0, 0.0, 0.0), "No clear difference in how fast layers turn image and text tokens.", id="nothing clear"
        ),
        pytest.param((0.1, 0.1, 0.1), "Layers turn image tokens more slowly than text tokens.", id="all slower"),
        pytest.param(
            (0.0, -0.1, -0.1),
            "Layers turn image tokens faster than text tokens in the middle third and the last third; "
            "no clear difference in the first third.",
            id="clear differences first",
        ),
    ],
)
def test_thirds_of_the_layers_that_turn_alike_are_told_together(gaps: Sequence[float], line: str) -> None:
    (model,) = make_report({"model": make_rows_of_a_model(gaps=gaps, seed=1)}).models
    assert line in box_lines(model)


def test_one_picture_gives_no_intervals_and_no_judgement_of_turning(tmp_path: Path) -> None:
    rows = make_rows_of_a_model(num_pictures=1)
    rows_by_name = {"first": rows, "second": rows}
    report = make_report(rows_by_name)
    assert measured_on(report) == "Measured on one picture (data), which gives no intervals: nothing is judged."

    text = " ".join(box_lines(report.models[0]))
    assert "How fast layers turn image tokens is not judged" in text
    assert not re.search(r"slowly|faster|clear|nan|None", text)

    page = render_html(report, join_rows(rows_by_name), tmp_path)
    assert not re.search(r"\bnan\b|\bNone\b|&lt;NA&gt;", page)


@pytest.mark.parametrize(
    ("factor", "shown"),
    [
        (0.0093, "0.0093"),
        (0.97, "0.97"),
        (1.004, "1.0"),
        (1.5436, "1.5"),
        (37.2, "37"),
        (99.7, "100"),
        (1234, "1,234"),
    ],
)
def test_a_factor_has_two_digits(factor: float, shown: str) -> None:
    assert format_factor(factor) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0, "0%"), (0.0034, "0.34%"), (0.0312, "3.1%"), (0.0996, "10%"), (0.144, "14%"), (0.994, "99%"),
        (0.996, "over 99%"), (1, "100%"),
    ],
)  # fmt: skip
def test_a_percentage_has_two_digits_and_only_all_is_100(share: float, shown: str) -> None:
    assert format_percent(share) == shown


def test_the_table_of_a_sweep_has_intervals_and_judgements() -> None:
    table = make_sweep_table(make_sweep_rows())
    assert table.index.tolist() == ["× 0.3", "× 1", "× 3"]
    assert table["answers"].tolist() == ["clearly worse", "as it is", "no change"]
    # The interval of two right answers among six is cut off at 0.
    assert table["share of right answers"].tolist() == ["0.33 (0.00 to 0.88)", "1 (± 0)", "1 (± 0)"]
    assert table["norm over text's"].tolist() == ["0.6", "2", "6"]


def test_a_sweep_has_a_chapter_and_its_figure_takes_the_place_of_the_overview(tmp_path: Path) -> None:
    rows_by_name = {"first": make_rows_of_a_model(), "second": make_rows_of_a_model(seed=1)}
    sweep_rows_by_name = {"first": make_sweep_rows(), "second": make_sweep_rows()}
    for name in ("overview", "sweep"):
        (tmp_path / f"{name}.png").write_bytes(b"a figure")

    sweep_rows = join_rows(sweep_rows_by_name)
    page = render_html(make_report(rows_by_name), join_rows(rows_by_name), tmp_path, sweep_rows)
    summary, chapters = page.split("<h2>Other norms of the image embeddings</h2>")
    assert '<figure class="sweep">' in summary
    assert '<figure class="overview">' not in summary
    assert '<figure class="overview">' in chapters
    assert not re.search(r"\bnan\b|\bNone\b", page)


def test_the_figure_of_a_sweep_has_a_curve_over_the_norm_and_a_ring_at_dose_1() -> None:
    points = summaries_by_dose(make_sweep_rows())
    figure = draw_sweep({"first": points, "second": points})
    (axes,) = figure.axes
    curve, ring, *_ = axes.lines  # of the first model
    assert curve.get_xdata() == pytest.approx([0.6, 2, 6])
    assert curve.get_ydata() == pytest.approx([100 / 3, 100, 100])  # percent
    assert ring.get_xdata() == pytest.approx([2])
    assert ring.get_ydata() == pytest.approx([100])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second", "norm as it is"]


@pytest.mark.parametrize(
    ("estimate", "shown"),
    [
        pytest.param(Estimate(1.5103, 1.5073, 1.5133), "1.5103 (1.5073 to 1.5133)", id="four decimals"),
        pytest.param(Estimate(12345.6, 12000.0, 12691.0), "12,346 (12,000 to 12,691)", id="thousands"),
        pytest.param(Estimate(-0.0041, -0.08, 0.07), "0.00 (−0.08 to 0.07)", id="no minus before zero"),
        pytest.param(Estimate(1.5, 1.5, 1.5), "1.5 (± 0)", id="no width"),
        pytest.param(Estimate(0.99999123, 0.99999081, 0.99999165), "0.99999 (± 0)", id="float32's rounding"),
        pytest.param(Estimate(9.7979585, 9.79795845, 9.79795855), "9.798 (± 0)", id="a norm that is constant"),
        pytest.param(Estimate(5e5, 499990.0, 500010.0), "500,000 (± 10)", id="narrow and large"),
        pytest.param(Estimate(1.132774, 1.132734, 1.132814), "1.13277 (± 0.00004)", id="narrow"),
        pytest.param(Estimate(1.23456), "1.23", id="no interval"),
        pytest.param(Estimate(12345.6), "12,346", id="no interval, thousands"),
    ],
)
def test_a_mean_is_shown_with_as_many_digits_as_its_interval_needs(estimate: Estimate, shown: str) -> None:
    assert with_interval(estimate) == shown


def test_two_models_have_a_paired_difference_except_of_keys_and_values() -> None:
    """The keys of two models share no scale, so their difference means nothing."""
    rows_by_name = {"first": make_rows_of_a_model(), "second": make_rows_of_a_model(seed=1)}
    tables = make_tables(make_report(rows_by_name).models, join_rows(rows_by_name))

    ratio = tables["Norms up to the decoder"].loc["ratio"]
    # A cell is the mean and its interval: "2.00 (1.99 to 2.01)".
    means = [float(ratio[column].split()[0]) for column in ("first", "second", DIFFERENCE)]
    assert means == pytest.approx([40 / 20, 41 / 20, 1 / 20], abs=2e-3)

    # The two models' gaps are the same but for random values, so the difference is near 0.
    gap = tables["Norm and turning by layer"].loc["gap, first third"]
    assert re.match(r"−?0\.00\d+ \(", gap[DIFFERENCE])

    # The gain is one number for each model, and a difference without an interval is not shown.
    assert tables["The norm after the projector"].loc["gain l2"].tolist() == ["8.1", "8.1", ""]
    assert set(tables["Keys and values"][DIFFERENCE]) == {""}


def test_one_model_has_no_column_of_differences() -> None:
    rows_by_name = {"first": make_rows_of_a_model()}
    tables = make_tables(make_report(rows_by_name).models, join_rows(rows_by_name))
    assert tables["Norms up to the decoder"].columns.tolist() == ["first"]


# Rows of two models: one has the hostile name, the other has no keys.
HOSTILE_ROWS = {HOSTILE: make_rows_of_a_model(), "plain": make_rows_of_a_model(seed=1, with_keys=False)}


@pytest.fixture(scope="module")
def hostile_report() -> Report:
    """A report in which every text that a user may write is `HOSTILE`."""
    return replace(make_report(HOSTILE_ROWS), data=HOSTILE, command=HOSTILE, unreadable=[HOSTILE])


@pytest.fixture(scope="module")
def figure_folder(hostile_report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the report's figures as PNG files."""
    folder = tmp_path_factory.mktemp("figures")
    figures = draw_figures({model.name: model.summary for model in hostile_report.models})
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.png")
    return folder


def test_all_figures_that_do_not_need_a_model_or_a_sweep_are_drawn(figure_folder: Path) -> None:
    drawn = {path.stem for path in figure_folder.iterdir()}
    assert drawn == set(FIGURES) - {"attention_map", "key_map", "sweep"}
    assert plt.get_fignums() == []  # a notebook would show open figures below every cell


def test_the_page_is_self_contained(hostile_report: Report, figure_folder: Path) -> None:
    page = render_html(hostile_report, join_rows(HOSTILE_ROWS), figure_folder)
    num_figures = len(list(figure_folder.iterdir()))
    links = re.findall(r'(?:src|href)="([^"]*)', page)
    assert page.count("<img") == num_figures
    assert len(links) == num_figures
    for link in links:
        assert link.startswith("data:image/png;base64,")


def test_texts_of_users_are_not_markup(hostile_report: Report, tmp_path: Path) -> None:
    page = render_html(hostile_report, join_rows(HOSTILE_ROWS), tmp_path)
    assert "<script" not in page
    text_without_tags = unescape(re.sub(r"<[^>]+>", " ", page))
    assert text_without_tags.count(HOSTILE) > 6  # the model's name in several places, the data, the command, a row
    assert not re.search(r"\bnan\b|\bNone\b", text_without_tags)


def test_a_figure_that_is_missing_is_left_out_of_the_page(hostile_report: Report, tmp_path: Path) -> None:
    (tmp_path / "overview.png").write_bytes(b"the only figure")
    page = render_html(hostile_report, join_rows(HOSTILE_ROWS), tmp_path)
    assert page.count("<figure") == 1


def test_neighbours_with_the_same_texts_are_one_row() -> None:
    texts = {"a": {"m": "1"}, "b": {"m": "1"}, "c": {"m": "2"}, "d": {"m": "1"}}
    assert join_equal_rows(texts) == {"a = b": {"m": "1"}, "c": {"m": "2"}, "d": {"m": "1"}}


def test_the_page_shows_the_first_and_the_last_answers_of_a_run(tmp_path: Path) -> None:
    lines = []
    for step, answers in ((10, ("e", "e")), (20, ("the", "a")), (30, ("<b>blue</b>", "red"))):
        for row, answer in enumerate(answers):
            line = {"step": step, "row": row, "question": f"What is {row}?", "expected": "blue", "answer": answer}
            lines.append(json.dumps(line))
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))

    rows = make_rows_of_a_model()
    report = make_report({"model": rows})
    (model,) = report.models
    report = replace(report, models=[replace(model, answers=read_training_answers(tmp_path))])
    page = render_html(report, join_rows({"model": rows}), tmp_path)
    cells = re.findall(r"<t[hd]>([^<]*)</t[hd]>", page)
    start = cells.index("question")
    assert [unescape(cell) for cell in cells[start : start + 12]] == [
        *("question", "should say", "step 10", "step 30"),
        *("What is 0?", "blue", "e", "<b>blue</b>"),
        *("What is 1?", "blue", "e", "red"),
    ]


def test_an_answer_may_hold_a_line_separator(tmp_path: Path) -> None:
    """JSON leaves U+2028 as it is, and `str.splitlines` would split there."""
    answer = {"step": 1, "row": 0, "question": "a", "expected": "b", "answer": "c\u2028d"}
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer, ensure_ascii=False) + "\n", encoding="utf-8")
    (read,) = read_training_answers(tmp_path)
    assert read.last == "c\u2028d"


def test_half_a_line_of_answers_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text(
        '{"step": 1, "row": 0, "question": "", "expected": "", "answer": ""}\n{"st'
    )
    with pytest.raises(UserError, match=r"answers.jsonl, line 2, is not valid JSON"):
        read_training_answers(tmp_path)
