"""What the report says, and how it is written: sentences, digits, differences, and text that is not to be trusted."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_report import make_report

from diagnostics.report import (
    Table,
    compare,
    escape,
    headline,
    number,
    render_html,
    render_markdown,
    summarize,
    with_interval,
)
from diagnostics.results import Estimate, Interval, ModelReport, Prompted, Report, from_json, to_json
from diagnostics.statistics import difference


HOSTILE = "a|b <script>alert(1)</script> `c` [d](http://e.org) $x$ &amp; \u202e__f__"


def with_gaps(
    model: ModelReport, intervals: list[Interval], prompts: list[list[Interval]] | None = None
) -> ModelReport:
    """The model with gaps of cosines by group, and by question and group."""

    def gap(interval: Interval) -> Estimate:
        return Estimate(0.0 if interval is None else sum(interval) / 2, interval, [])

    groups = [replace(group, gap=gap(i)) for group, i in zip(model.layers.groups, intervals, strict=True)]
    asked = [Prompted(str(n), 16, [gap(i) for i in row]) for n, row in enumerate(prompts or [])]
    return replace(model, layers=replace(model.layers, groups=groups), prompts=asked)


SLOW, FAST, EITHER = (0.05, 0.08), (-0.17, -0.13), (-0.05, 0.04)


def test_turning_is_said_by_group_of_layers() -> None:
    """A mean over all layers would say that visual tokens turn faster."""
    (model,) = make_report("it").models
    text = headline(with_gaps(model, [SLOW, FAST, EITHER]))["Turning"]
    assert (
        "more slowly in the first third, 0.065 (0.050 to 0.080); faster in the middle third, "
        "−0.150 (−0.170 to −0.130); no clear difference in the last third, −0.005 (−0.050 to 0.040)."
    ) in text
    assert f"largest at layer {model.layers.largest_gap.layer}" in text
    text = headline(with_gaps(model, [(-0.02, 0.3), EITHER, EITHER]))["Turning"].split(":", 1)[1]
    assert text.count("no clear difference") == 3
    assert "slowly" not in text
    assert "faster" not in text


def test_questions_that_change_the_sign_are_named() -> None:
    (model,) = make_report("it").models
    rows = [[SLOW, SLOW, EITHER], [FAST, SLOW, EITHER], [SLOW, SLOW, SLOW]]
    text = headline(with_gaps(model, [SLOW, SLOW, EITHER], rows))["Turning"]
    assert "Asked in 3 ways (16 pictures), in the first third the sign changes with the question" in text
    assert "in the middle third more slowly each time; in the last third it is clear for some questions only" in text
    assert "Asked" not in headline(with_gaps(model, [SLOW, SLOW, EITHER], rows[:1]))["Turning"]
    text = headline(with_gaps(model, [SLOW, SLOW, EITHER], [[SLOW, FAST, EITHER]] * 2))["Turning"]
    assert "in the middle third faster each time; in the last third there is no clear difference each time." in text


def test_one_picture_has_no_spread() -> None:
    report = make_report("it", num_pictures=1)
    first, *sentences = summarize(report)
    assert "With one picture there are no intervals." in first
    text = " ".join(sentences)
    assert "this can't be told from no difference" in text
    assert not re.search(r"slowly|faster|\d to \d|\bp is\b|nan|None", text)
    page = render_html(report, {})
    assert page.count("there are no intervals") == 1
    assert "difference (second" not in page


def test_p_is_given_with_its_floor() -> None:
    (model,) = make_report("it", num_pictures=6).models
    keys = model.key_space
    assert keys is not None

    def said(p_value: list[float] | None) -> str:
        return headline(replace(model, key_space=replace(keys, p_value=p_value, smallest_p=0.031)))["Keys"]

    floor = "0.031 is the smallest possible with 32 swaps"
    assert f"p is 0.031 in every layer ({floor})" in said([0.031] * 6)
    assert f"p is 0.031 to 0.5 ({floor})" in said([0.031, 0.5])
    assert said([0.1, 0.5]).endswith("p is 0.1 to 0.5.")
    assert "p is" not in said(None)


def test_the_headline_names_numbers_of_pictures_and_what_attention_is_beside() -> None:
    report = make_report("first", "second")
    text = summarize(report)
    assert text[0].startswith("2 models on 32 questions about 16 pictures (pictures.json).")
    assert all(line.startswith(("first: ", "second: ")) for line in text[1:])
    gaze = report.models[0].attention.with_sinks
    (line,) = [line for line in text if line.startswith("first: Of the text's attention")]
    low, high = gaze.mass.overall.interval or (0, 0)
    assert f"{100 * gaze.mass.overall.mean:.1f}% ({100 * low:.1f} to {100 * high:.1f}%) falls on the picture" in line
    assert re.search(r"against 4\d\.\d+% \(4[\d.]+ to 4[\d.]+%\) for uniform attention; means over 12 layers", line)
    assert not re.search(r"[*_`#]|&\w+;|&#", " ".join(text))


@pytest.mark.parametrize(
    ("mean", "interval", "shown"),
    [
        (1.5103, (1.5073, 1.5133), "1.5103 (1.5073 to 1.5133)"),
        (1.51, (1.4, 1.62), "1.51 (1.40 to 1.62)"),
        (40.21, (25.3, 55.1), "40 (25 to 55)"),
        (12345.6, (12000.0, 12691.0), "12,346 (12,000 to 12,691)"),
        (-0.0041, (-0.08, 0.07), "0.00 (−0.08 to 0.07)"),
        (-0.041, (-0.08, -0.004), "−0.041 (−0.080 to −0.004)"),
        (2e-9, (1e-9, 3e-9), "2.0e-09 (1.0e-09 to 3.0e-09)"),
        (1.5, (1.5, 1.5), "1.5 (± 0)"),
        (0.99999100, (0.99999057, 0.99999142), "0.99999 (± 4e-07)"),
        (1.23456, None, "1.23"),
    ],
)
def test_digits_keep_the_interval(mean: float, interval: Interval, shown: str) -> None:
    assert with_interval(Estimate(mean, interval, [])) == shown


def test_numbers() -> None:
    assert [number(value) for value in (None, float("nan"), -0.01234, 999.7, 12345.6, 1024)] == [
        "–", "–", "−0.0123", "1,000", "12,346", "1,024",
    ]  # fmt: skip


def test_two_models_have_a_paired_difference() -> None:
    report = make_report("first", "second", "third")
    quantities = {"visual over text": "interface.ratio", "layers": "num_layers", "not there": "attention.nothing"}
    first, second, _ = report.models
    table = compare(report.models[:2], quantities)
    assert table.header == ["", "first", "second", "difference (second − first)"]
    expected = with_interval(difference(second.interface.ratio, first.interface.ratio))
    ratios = [with_interval(model.interface.ratio) for model in (first, second)]
    assert table.rows == [["visual over text", *ratios, expected], ["layers", "12", "12", ""]]
    assert difference(second.interface.ratio, first.interface.ratio).mean < 0
    assert len(compare(report.models, quantities).header) == 4  # no difference of three
    assert compare([first], quantities).header == ["", "first"]
    # Other pictures, as where one of them could not be measured on all: no pairs.
    other = make_report("other", num_pictures=5).models[0]
    assert compare([first, other], quantities).header == ["", "first", "other"]


def test_tables_speak_in_words() -> None:
    page = render_markdown(make_report("first", "second"), [])
    assert "| L2 norm of the gain | 8.1 | 8.1 |" in page
    assert "| visual tokens at the decoder |" in page
    names = r"gain_l2|visual_at_decoder|update_ratio|bottom_third|num_zero|mmd_baseline|projector_input"
    assert not re.search(names, page.split("## Definitions")[0])


class Page(HTMLParser):
    """Collects tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_report() -> Report:
    report = make_report(HOSTILE, "plain")
    model = report.models[0]
    prompts = [replace(prompted, question=prompted.question and HOSTILE) for prompted in model.prompts]
    top = [replace(entry, token=HOSTILE) for entry in model.embeddings.top]
    lens = model.lens and replace(
        model.lens, tokens=[[replace(t, token=HOSTILE) for t in of] for of in model.lens.tokens]
    )
    embeddings = replace(model.embeddings, top=top)
    hostile = replace(model, notes=[HOSTILE], prompts=prompts, lens=lens, embeddings=embeddings)
    models = [hostile, report.models[1]]
    return replace(report, models=models, data=HOSTILE, command=HOSTILE, unreadable=[HOSTILE])


def test_text_of_models_and_data_is_only_text() -> None:
    report = hostile_report()
    page = Page(render_html(report, {"overview": "<svg></svg>"}))
    assert "script" not in page.tags
    assert all(re.fullmatch(r"#c\d+", link) for link in page.links)
    assert page.text.count(HOSTILE) > 10
    markdown = render_markdown(report, ["overview.png"])
    assert "<script>" not in markdown
    assert "http://" not in markdown
    assert not re.search(r"\[d\]|`c`|\$x\$|__f__|&amp;", markdown)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert (
        len({line.count("|") for line in rows}) <= 4
    )  # no cell is broken in two: 2, 3 and 7 columns, and differences
    assert escape("a|b<i>*_`&\n: c:d") == "a&#124;b&#60;i&#62;&#42;&#95;&#96;&#38;&#10;: c&#58;d"


def test_what_was_not_measured_is_left_out() -> None:
    report = make_report("first", "second")
    lacking = {"attention": None, "key_space": None, "value_space": None, "lens": None, "gradients": None}
    models = [replace(model, **lacking, projector_norm=None, prompts=[]) for model in report.models]
    markdown = render_markdown(replace(report, models=models), [])
    for title in ("Attention to the picture", "Keys and values", "What visual tokens decode to", "Gradients"):
        assert f"## {title}\n" not in markdown
    assert "*Attention.*" not in markdown
    mixed = render_markdown(replace(report, models=[report.models[0], models[1]]), [])
    assert re.search(r"\| L2 norm of the gain \| 8.1 \| – \|", mixed)
    for text in (markdown, mixed, render_html(make_report("it", num_pictures=3), {})):
        assert not re.search(r"\bnan\b|\bNone\b", text)


def test_only_figures_that_are_there_are_shown() -> None:
    report = make_report("it")
    markdown = render_markdown(report, ["overview.png", "keys.svg"])
    assert re.findall(r"\]\(([\w.]+)\)", markdown) == ["overview.png", "keys.svg"]
    page = render_html(report, {"overview": "<svg id='o'></svg>", "keys": "<svg id='k'></svg>"})
    assert Page(page).tags.count("svg") == Page(page).tags.count("figure") == 2
    assert not re.search(r"https?://|@import|url\((?!#)", page)  # it needs nothing else


def test_a_report_that_was_read_says_the_same() -> None:
    report = make_report("first", "second", num_pictures=3)
    again = from_json(Report, json.loads(json.dumps(to_json(report), allow_nan=False)), "report.json")
    assert render_html(again, {}) == render_html(report, {})
    assert isinstance(compare(again.models, {"layers": "num_layers"}), Table)
