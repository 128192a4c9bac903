"""The report: its sentences, digits, differences and figures, and texts of users that must not become markup."""

import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from diagnostics.plots import FIGURES, draw_figures, save_figure
from diagnostics.report import (
    DIFFERENCE,
    ModelReport,
    Report,
    compare_turning,
    make_tables,
    measured_on,
    render_html,
    sentences,
    with_interval,
)
from diagnostics.table import Estimate, Summary, jackknife_rows, make_rows, ratio_rows


# A name with everything that HTML, Markdown, TeX or Unicode could take for a command.
HOSTILE = "a|b <script>alert(1)</script> `c` [d](http://e.org) $x$ &amp; \u202e__f__"


def make_rows_of_a_model(
    num_pictures: int = 6, gaps: Sequence[float] = (0.06, -0.15, 0.0), seed: int = 0, with_keys: bool = True
) -> pd.DataFrame:
    """Made-up rows of a model with six layers. The gap of cosines is `gaps[i]` in both layers of third `i`."""
    rng = np.random.default_rng(seed)
    layers = range(6)
    gap_by_layer = np.repeat(gaps, 2)

    def around(mean: float, *shape: int) -> np.ndarray:
        """Random values near the mean: an array of `shape`, by default one value, for each picture."""
        return mean + rng.normal(0, 0.002, (num_pictures, *shape))

    rows = [
        make_rows("at_decoder", around(40), "visual"),
        ratio_rows("ratio", around(40 + seed), around(20)),  # models with another seed have another ratio
        make_rows("gap", around(0, 6) + gap_by_layer, "", layers),
        ratio_rows("norm_ratio", around(40, 6), around(20, 6), layers),
        make_rows("attention", around(0.3, 2), "", [0, 5]),
        make_rows("attention_even", around(0.4, 2), "", [0, 5]),
        make_rows("gain_l2", whole=8.1),
        make_rows("bias_l2", whole=0.1),
    ]
    for modality in ("visual", "text"):
        rows += [make_rows(name, around(1, 6), modality, layers) for name in ("norm", "turning")]
    if with_keys:
        whole = np.array([0.2, 0.3])
        rows.append(jackknife_rows("keys.mmd", whole, around(0.25, 2), layers=[0, 5]))
        rows.append(make_rows("keys.mmd_halves", layers=[0, 5], whole=whole))
    return pd.concat(rows, ignore_index=True)


def make_report(*models: tuple[str, pd.DataFrame]) -> Report:
    reports = []
    for name, rows in models:
        num_pictures = int(rows["picture"].max()) + 1
        report = ModelReport(
            name=name,
            model_class="Llava",
            dtype="float32",
            num_layers=6,
            hidden_size=32,
            num_pictures=num_pictures,
            num_tokens={"visual": 96},
            excluded={"sink": 2},
            notes=[f"note on {name}"],
            summary=Summary.of(rows),
        )
        reports.append(report)
    return Report(
        command="command",
        versions={"torch": "2"},
        data="data",
        passed_over=1,
        unreadable=["row 3: broken"],
        models=reports,
    )


def test_sentences_compare_turning_in_each_third_of_the_layers() -> None:
    """The thirds differ in sign, which the mean over all layers, a faster turning, would hide."""
    (model,) = make_report(("it", make_rows_of_a_model())).models
    text = sentences(model)[1]
    assert re.search(r"more slowly in the first third, .*faster in the middle third, .*no clear difference in", text)


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.0, 0.2), "no clear difference"),
        ((0.001, 0.2), "more slowly"),
        ((-0.2, 0.0), "no clear difference"),
        ((-0.2, -0.001), "faster"),
        ((), "no clear difference"),
    ],
)
def test_turning_differs_if_its_interval_lies_on_one_side_of_zero(interval: tuple[float, ...], said: str) -> None:
    assert compare_turning(Estimate(0.1, *interval)) == said


def test_one_picture_has_no_spread(tmp_path: Path) -> None:
    rows = make_rows_of_a_model(num_pictures=1)
    report = make_report(("it", rows), ("other", rows))
    assert measured_on(report).endswith("one gives no intervals.")
    text = " ".join(sentences(report.models[0]))
    assert "this can't be told from no difference" in text
    assert not re.search(r"slowly|faster|nan|None", text)
    page = render_html(report, pd.concat([rows.assign(model=name) for name in ("it", "other")]), tmp_path)
    assert not re.search(r"\bnan\b|\bNone\b|&lt;NA&gt;", page)


@pytest.mark.parametrize(
    ("mean", "interval", "shown"),
    [
        (1.5103, (1.5073, 1.5133), "1.5103 (1.5073 to 1.5133)"),
        (12345.6, (12000.0, 12691.0), "12,346 (12,000 to 12,691)"),
        (-0.0041, (-0.08, 0.07), "0.00 (−0.08 to 0.07)"),
        (1.5, (1.5, 1.5), "1.5 (± 0)"),
        (0.99999123, (0.99999081, 0.99999165), "0.99999123 (± 4e-07)"),
        (1.132774, (1.132734, 1.132814), "1.13277 (± 4e-05)"),
        (1.23456, (), "1.23"),
        (12345.6, (), "12,346"),
    ],
)
def test_digits_keep_the_interval(mean: float, interval: tuple[float, ...], shown: str) -> None:
    assert with_interval(Estimate(mean, *interval)) == shown


def test_two_models_have_a_paired_difference_but_for_keys_and_values() -> None:
    """The keys of two models share no scale, so their difference means nothing."""
    named = [("first", make_rows_of_a_model()), ("second", make_rows_of_a_model(seed=1))]
    rows = pd.concat([rows.assign(model=name) for name, rows in named])
    tables = make_tables(make_report(*named).models, rows)

    ratio = tables["Norms up to the decoder"].loc["ratio"]
    means = [float(ratio[column].split()[0]) for column in ("first", "second", DIFFERENCE)]
    assert means == pytest.approx([2, 2.05, 0.05], abs=2e-3)
    gap = tables["Norm and turning by layer"].loc["gap, first third"]
    assert re.match(r"−?0\.00\d+ \(", gap[DIFFERENCE])
    assert set(tables["Keys and values"][DIFFERENCE]) == {""}
    assert tables["The norm after the projector"].loc["gain l2"].tolist() == ["8.1", "8.1", ""]
    assert DIFFERENCE not in make_tables(make_report(named[0]).models, rows)["Keys and values"]


def test_the_page_is_self_contained_and_texts_are_not_markup(tmp_path: Path) -> None:
    named = [(HOSTILE, make_rows_of_a_model()), ("plain", make_rows_of_a_model(seed=1, with_keys=False))]
    report = replace(make_report(*named), data=HOSTILE, command=HOSTILE, unreadable=[HOSTILE])
    figures = draw_figures({model.name: model.summary for model in report.models})
    assert {*figures, "attention_map", "key_map", "sweep"} == set(FIGURES)
    assert plt.get_fignums() == []  # a notebook would show open figures below every cell
    for name, figure in figures.items():
        save_figure(figure, tmp_path / f"{name}.png")
    rows = pd.concat([rows.assign(model=name) for name, rows in named])
    page = render_html(report, rows, tmp_path)
    assert "<script" not in page
    assert page.count("<img") == len(figures)
    links = re.findall(r'(?:src|href)="([^"]*)', page)
    assert len(links) == len(figures)
    assert all(link.startswith("data:image/png;base64,") for link in links)
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    assert text.count(HOSTILE) > 6
    assert not re.search(r"\bnan\b|\bNone\b", text)
    (tmp_path / "keys.png").unlink()
    assert render_html(report, rows, tmp_path).count("<figure>") == len(figures) - 1
