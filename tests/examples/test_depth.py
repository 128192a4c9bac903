"""The depth study: its questions are answered rightly, its plan follows its protocol, its records survive."""

import hashlib
import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest


ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "digits"))

import depth  # noqa: E402
import depth_figures  # noqa: E402
import depth_plan  # noqa: E402
import depth_report  # noqa: E402
import depth_results  # noqa: E402
import depth_runs  # noqa: E402
import depth_scenes  # noqa: E402
from depth_plan import ARMS, QUICK, Job, Plan, Study  # noqa: E402
from scenes import COLOURS, DIGITS, PLACES, Cell, describe  # noqa: E402


ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")


def spell(number: int) -> str:
    if number < 20:
        return (*ONES, *TEENS)[number]
    tens, ones = divmod(number, 10)
    return {2: "twenty", 3: "thirty"}[tens] + ("" if ones == 0 else " " + ONES[ones])


def draw(rng: random.Random) -> tuple[Cell, ...]:
    return tuple(Cell(place, rng.choice(list(COLOURS)), rng.randrange(10), 0) for place in PLACES)


def read(description: str) -> dict[str, tuple[str, int]]:
    """What a description says: colour and digit by place."""
    cells = [cell.split() for cell in description.removeprefix("scene: ").removesuffix(".").split(", ")]
    return {place: (colour, DIGITS.index(digit)) for place, colour, digit in cells}


def right_answer(question: str, scene: dict[str, tuple[str, int]]) -> str:
    """The answer by the description alone, worked out from the words of the question."""
    words = question.splitlines()[-1].rstrip("?.").replace(",", "").replace(":", "").split()
    match words:
        case ["which", "digit", "is", place]:
            return spell(scene[place][1])
        case ["what", "colour", "is", place]:
            return scene[place][0]
        case ["what", "is", place]:
            return f"{scene[place][0]} {spell(scene[place][1])}"
        case ["is", one, "larger", "than", other]:
            return "yes" if scene[one][1] > scene[other][1] else "no"
        case ["count", "above", "four", *places]:
            return " ".join(spell(sum(scene[p][1] in (5, 6, 7, 8, 9) for p in places[: n + 1])) for n in range(4))
        case ["add", "up", *places]:
            return " ".join(spell(sum(scene[p][1] for p in places[: n + 1])) for n in range(4))
    raise AssertionError(question)


@pytest.mark.parametrize("kind", depth_scenes.KINDS)
def test_every_kind_of_question_is_answered_rightly(kind: str) -> None:
    rng = random.Random(3)
    for _ in range(300):
        scene = draw(rng)
        asked = depth_scenes.ask(kind, scene, rng)
        assert asked.answer == right_answer(asked.question, read(describe(scene, rng)))


def test_comparisons_are_balanced() -> None:
    rng = random.Random(4)
    answers = Counter(depth_scenes.ask("compare", draw(rng), rng).answer for _ in range(2000))
    assert abs(answers["yes"] - answers["no"]) < 200


def test_validation_and_test_share_no_picture_with_each_other_or_with_training() -> None:
    split = {name: set(sources) for name, sources in depth_scenes.split_three_ways().items()}
    assert all(not split[a] & split[b] for a, b in itertools.combinations(split, 2))
    assert sum(map(len, split.values())) == 1797


def test_a_key_tells_every_option_of_a_job() -> None:
    job = Job("12x128", "gwc", "plain", (2e-3, 1e-3), "test", 11)
    others = {"decoder": "3x128", "arm": "none", "variant": "doubled", "split": "validation", "seed": 12}
    changed = [replace(job, **{name: value}) for name, value in others.items()]
    changed += [replace(job, rates=rates) for rates in ((1e-3, 1e-3), (2e-3, 2e-3))]
    assert {*others, "rates"} == {field.name for field in fields(Job)}
    assert len({job.key, *(other.key for other in changed)}) == len(changed) + 1


def test_stage_1_is_shared_where_it_is_the_same() -> None:
    job = Job("12x128", "gwc", "plain", (2e-3, 1e-3), "test", 11)
    for variant in ("adapters", "projector"):
        assert replace(job, variant=variant, rates=(2e-3, 5e-4)).stage1 == job.stage1
    for variant in ("doubled", "unclipped", "warmup"):
        assert replace(job, variant=variant).stage1 != job.stage1


def records_with(study: Study, decoder: str = "12x128", kinds: list[str] | None = None) -> dict:
    model = {
        "kinds": kinds or ["both"],
        "gate": dict.fromkeys(depth_scenes.KINDS, 1.0),
        "settings": {"num_steps": 1, "learning_rate": 1e-3},
    }
    guessing = {"test": {"guessing": dict.fromkeys(depth_scenes.KINDS, 0.1)}}
    return {"data": guessing, "language_models": {decoder: model}, "runs": {}}


def finish(records: dict, jobs: list[Job], value: dict[float, float] | float) -> None:
    for job in jobs:
        share = value if isinstance(value, float) else value.get(job.rates[1], 0.0)
        kinds = dict.fromkeys(depth_scenes.KINDS, share)
        records["runs"][job.key] = depth_plan.options(job) | {
            "picture": kinds,
            "words": {**dict.fromkeys(kinds, share / 2), "all": 1.0},
        }


def test_the_search_takes_the_best_mean_and_of_equal_ones_the_lower_rate() -> None:
    study = Study()
    records = records_with(study)
    first = Plan(study, records).stage2_search("12x128", "none")
    assert len(first.jobs) == 8
    assert {job.split for job in first.jobs} == {"validation"}
    assert {job.seed for job in first.jobs} == set(study.tuning_seeds)
    assert first.scores == {}
    finish(records, first.jobs, {5e-4: 0.9, 1e-3: 0.9, 2e-3: 0.8})
    assert Plan(study, records).stage2_search("12x128", "none").rate == 5e-4


def test_the_search_goes_on_beyond_an_end_twice_at_most() -> None:
    study = Study()
    records = records_with(study)
    asked = []
    while missing := [
        job for job in Plan(study, records).stage2_search("12x128", "none").jobs if job.key not in records["runs"]
    ]:
        asked.append(sorted({job.rates[1] for job in missing}))
        finish(records, missing, {job.rates[1]: job.rates[1] for job in missing})  # the higher, the better
    assert asked == [[2.5e-4, 5e-4, 1e-3, 2e-3], [4e-3], [8e-3]]
    assert Plan(study, records).stage2_search("12x128", "none").rate == 8e-3


def test_kinds_that_the_language_model_cannot_answer_do_not_count() -> None:
    records = records_with(Study(), kinds=["digit", "both"])
    job = Job("12x128", "gwc", "plain", (2e-3, 1e-3), "test", 11)
    picture = dict.fromkeys(depth_scenes.KINDS, 0.0) | {"digit": 1.0, "both": 0.5}
    records["runs"][job.key] = {"picture": picture}
    assert depth_plan.score(records, job) == 0.75


def test_the_comparison_that_decides_is_the_protocols() -> None:
    study = Study()
    jobs = Plan(study, records_with(study)).deciding()
    assert [(job.seed, job.arm) for job in jobs] == [(seed, arm) for seed in range(11, 19) for arm in ("none", "gwc")]
    assert {(job.decoder, job.variant, job.split) for job in jobs} == {("12x128", "plain", "test")}
    assert not set(study.seeds) & {42, 1, 2}
    titles = [line.title for line in depth_plan.lines(study)]
    assert titles[:4] == ["language model", "rate of stage 2", "rate of stage 1", "the comparison that decides"]


def test_every_arm_and_variant_has_runs() -> None:
    plan = Plan(Study(), records_with(Study()))
    jobs = [job for line in depth_plan.lines(Study()) for job in line.jobs(plan)]
    assert {job.arm for job in jobs} == set(ARMS)
    assert {job.variant for job in jobs} == set(depth_plan.VARIANTS)
    assert {job.decoder for job in jobs} == {"12x128", "3x128", "6x128", "3x256", "24x128"}


def test_eight_seeds_for_the_two_arms_at_three_depths_and_five_for_the_rest() -> None:
    records = records_with(Study())
    seeds = {
        (decoder, arm, variant): len(Plan(Study(), records).runs(decoder, arm, variant))
        for decoder in ("3x128", "6x128", "12x128", "24x128", "3x256")
        for arm in ARMS
        for variant in depth_plan.VARIANTS
        if arm in depth_plan.PAIR or variant == "plain"
    }
    eight = {(decoder, arm, "plain") for decoder in ("3x128", "6x128", "12x128") for arm in ("none", "gwc")}
    assert {case for case, number in seeds.items() if number == 8} == eight
    assert {number for case, number in seeds.items() if case not in eight} == {5}


def test_an_exchanged_rate_is_the_other_arms_and_shares_stage_1() -> None:
    records = records_with(Study())
    plan = Plan(Study(), records)
    for arm, rate in (("none", 5e-4), ("gwc", 2e-3)):
        finish(records, plan.stage2_search("12x128", arm).jobs, {rate: 0.9})
        finish(records, Plan(Study(), records).stage2_search("12x128", arm).jobs, {rate: 0.9})  # beyond an end
    plan = Plan(Study(), records)
    for arm, rate in (("none", 2e-3), ("gwc", 5e-4)):
        own, other = plan.runs("12x128", arm)[0], plan.runs("12x128", arm, "exchanged")[0]
        assert other.rates[1] == rate != own.rates[1]
        assert other.stage1 == own.stage1


def test_what_is_recorded_is_not_run_again() -> None:
    study = Study()
    records = records_with(study)
    line = next(line for line in depth_plan.lines(study) if line.title == "the comparison that decides")
    jobs = depth.missing(line, Plan(study, records))
    left = depth.time_left(study, Plan(study, records))
    finish(records, jobs[:3], 0.5)
    assert depth.missing(line, Plan(study, records)) == jobs[3:]
    assert depth.time_left(study, Plan(study, records)) < left


def test_a_study_that_is_stopped_has_whole_pairs() -> None:
    plan = Plan(Study(), records_with(Study()))
    for line in depth_plan.lines(Study()):
        if line.cases:
            jobs = [job for job in line.jobs(plan) if job.seed in Study().seeds[: Study().few]]
            halves = jobs[: len(jobs) // 5], jobs[len(jobs) // 5 :]
            assert {job.seed for job in halves[0]}.isdisjoint(job.seed for job in halves[1]), line.title


def test_the_next_lines_language_model_is_made_beside_the_runs(tmp_path: Path) -> None:
    study, records = two_depths()
    del records["language_models"]["3x256"]
    runner = object.__new__(depth.Runner)
    runner.study, runner.results, runner.place = study, tmp_path / "depth.json", None
    runner.results.write_text(depth_plan.dump(records))
    runner.pool = SimpleNamespace(submit=lambda task, place, what: (task.__name__, what))
    runner.bar = SimpleNamespace(set_description=lambda title: None)
    planned = {line.title: line for line in depth_plan.lines(study)}
    doubled, width, compared = (planned[title] for title in ("twice the steps", "width, rates", "width"))
    model = ("make_language_model", "3x256")
    first, *others = runner.submit(doubled, width)
    assert first == model
    assert others == list(runner.submit(doubled, None))
    assert {task for task, _ in others} == {"run_jobs"}
    assert list(runner.submit(width, compared)) == [model]  # no run can start without it


def test_records_of_runs_that_end_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "depth.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: depth_plan.add_record(path, "runs", f"job{n:02}", {"n": n}), range(40)))
    runs = depth_plan.read_records(path)["runs"]
    assert [record["n"] for record in runs.values()] == list(range(40))


def test_records_survive_a_write_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "depth.json"
    depth_plan.add_record(path, "runs", "first", {"n": 1})

    def cut_off(*args: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut_off)
        with pytest.raises(OSError, match="no space"):
            depth_plan.add_record(path, "runs", "second", {"n": 2})
    assert depth_plan.read_records(path)["runs"] == {"first": {"n": 1}}


def test_the_interval_is_students() -> None:
    # t(0.975, 4) = 2.776445, standard deviation of 1 to 5 = 1.581139
    assert depth_plan.t_interval([1, 2, 3, 4, 5]) == pytest.approx((3, 3 - 1.963243, 3 + 1.963243), abs=1e-5)


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([1.0, 2.0, 1.5, 1.2], "The norm helps"),
        ([-1.0, -2.0, -1.5, -1.2], "The norm hurts"),
        ([3.0, -1.0, 2.0, 0.5], "No clear difference"),
        ([], "Not run yet"),
    ],
)
def test_the_verdict_follows_the_interval(differences: list[float], word: str) -> None:
    assert word in depth_report.verdict(dict(enumerate(differences)), "12x128")


def test_nothing_is_said_of_a_comparison_before_its_last_seed() -> None:
    study = Study()
    records = records_with(study)
    jobs = Plan(study, records).deciding()
    finish(records, jobs[:-1], 0.123)
    texts = depth_report.render(depth_results.Results(study, records), {})
    assert "**Not run yet.**" in texts["summary"]
    assert "12.3" not in str(texts)
    finish(records, jobs[-1:], 0.123)
    look_inside(records, jobs)
    text = depth_report.render(depth_results.Results(study, records), {})["summary"]
    assert "**No clear difference at 12 layers of width 128**: GWC less no norm is 0.0 (0.0 to 0.0) points" in text


def look_inside(records: dict, jobs: list[Job], ratio: float = 1.0) -> None:
    """Add to finished runs what else a record holds."""
    for job in jobs:
        layers = int(job.decoder.split("x")[0])
        by_modality = {"visual": [1.0] * (layers + 1), "text": [1.0] * (layers + 1)}
        inside = {"ratio": ratio, "gap": [ratio / 10] * 3, "norm": by_modality, "attention": [0.5] * layers}
        inside |= {"cosine": {name: values[1:] for name, values in by_modality.items()}, "gradients": [1.0] * layers}
        inside["decoded"] = [0.1, 0.75, *[0.2] * (layers - 1)]
        losses = {"loss": 0.1, "curve": [[10, 1.0], [20, 0.1]]}
        records["runs"][job.key] |= {"stage1": losses, "stage2": losses}
        records["runs"][job.key] |= {"blanked": {"all": 0.1}}
        records["runs"][job.key] |= {"inside": {"stage1": inside, "stage2": inside}}


def finish_line(study: Study, records: dict, title: str, share: Callable[[Job], float]) -> None:
    """Finish the runs of a line of the protocol, and what they are compared with, with shares that differ by seed."""
    for line in depth_plan.lines(study):
        while jobs := depth.missing(line, Plan(study, records)):
            for job in jobs:
                finish(records, [job], share(job) + job.seed / 1000)
            look_inside(records, jobs)
        if line.title == title:
            return


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table in Markdown, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def two_depths() -> tuple[Study, dict]:
    """A study whose norm gains 10 points at twelve layers and none at three and six."""
    study, records = Study(), records_with(Study())
    for decoder in (*study.depths, *study.wide):
        records["language_models"][decoder] = records["language_models"]["12x128"]
    finish_line(study, records, "depth", lambda job: 0.6 if (job.decoder, job.arm) == ("12x128", "gwc") else 0.5)
    return study, records


def test_what_counts_against_the_mechanism_follows_the_intervals() -> None:
    study, records = two_depths()
    table = rows_of(depth_report.against_table(depth_results.Results(study, records)))
    found = {measured: (points, against) for _, measured, points, against in table}
    assert [point[0] for point, *_ in table] == sorted(point[0] for point, *_ in table)
    assert {point[0] for point, *_ in table} == set("1234567")
    assert found["GWC at T less no norm"] == ("10.0 (10.0 to 10.0)", "no")
    assert found["gain at 12x128 less gain at 3x128"] == ("10.0 (10.0 to 10.0)", "no")
    assert found["gain at 24x128 less gain at 12x128"] == ("not run yet", "")
    finish(records, Plan(study, records).runs("12x128", "none"), 0.7)
    found = {row[1]: row for row in rows_of(depth_report.against_table(depth_results.Results(study, records)))}
    assert found["GWC at T less no norm"][3] == "yes"
    finish(records, Plan(study, records).runs("12x128", "none")[::2], 0.5)
    found = {row[1]: row for row in rows_of(depth_report.against_table(depth_results.Results(study, records)))}
    assert found["GWC at T less no norm"][3] == "not clear"


def test_nothing_is_said_of_other_depths_before_the_comparison_that_decides() -> None:
    study, records = two_depths()
    del records["runs"][Plan(study, records).deciding()[-1].key]
    results = depth_results.Results(study, records)
    assert results.pairs == []
    assert results.arms == []


def test_what_is_not_run_is_named_and_no_row_of_a_table() -> None:
    study, records = two_depths()
    texts = depth_report.render(depth_results.Results(study, records), {})
    assert (
        "- 12x128 twice the steps\n- 3x256 the recipes, rates searched\n- 3x128 twice the steps\n" in texts["results"]
    )
    assert "17 comparisons are [not run yet]" in texts["summary"]
    assert [row[:2] for row in rows_of(depth_report.pair_table(depth_results.Results(study, records)))] == [
        [decoder, "the recipes, rates searched"] for decoder in ("12x128", "3x128", "6x128")
    ]


def test_arms_are_compared_at_each_rate() -> None:
    study, records = Study(), records_with(Study())
    shares = {("none", 1e-3): 0.6, ("none", 5e-4): 0.5, ("gwc", 5e-4): 0.9, ("gwc", 1e-3): 0.75}
    finish_line(study, records, "each other's rate", lambda job: shares.get((job.arm, job.rates[1]), 0.1))
    rows = rows_of(depth_report.rate_table(depth_results.Results(study, records)))
    assert [row[:3] for row in rows] == [
        ["no norm", "0.001", "8"],
        ["no norm", "0.0005", "5"],
        ["GWC at T", "0.0005", "8"],
        ["GWC at T", "0.001", "5"],
        ["GWC less no norm, each at its own", "0.0005, 0.001", "8"],
        ["GWC less no norm", "0.001", "5"],
        ["GWC less no norm", "0.0005", "5"],
    ]
    assert [row[3] for row in rows[4:]] == ["30.0 (30.0 to 30.0)", "15.0 (15.0 to 15.0)", "40.0 (40.0 to 40.0)"]
    in_words = ["15.0 (15.0 to 15.0)", "7.5 (7.5 to 7.5)", "20.0 (20.0 to 20.0)"]
    assert [row[6] for row in rows[4:]] == in_words
    assert [row[7] for row in rows[4:]] == in_words  # what is left of a gain about pictures that is twice as large


def test_speed_is_when_the_loss_stays_below() -> None:
    def record(*losses: float) -> dict:
        return {"stage2": {"curve": [[10 * number, loss] for number, loss in enumerate(losses, start=1)]}}

    assert depth_report.steps_to(record(1.0, 0.4, 0.6, 0.4, 0.3), 0.5) == 40
    assert depth_report.steps_to(record(0.4, 0.3), 0.5) == 10
    assert depth_report.steps_to(record(0.4, 0.3, 0.6), 0.5) == float("inf")
    assert depth_report.steps_to({"diverged": "loss is nan"}, 0.5) == float("inf")


def test_runs_that_diverged_count_with_their_score_and_have_no_inside() -> None:
    study, records = two_depths()
    jobs = Plan(study, records).runs("12x128", "none")

    def diverge(chosen: list[Job]) -> depth_results.Results:
        finish(records, chosen, 0.0)
        for job in chosen:
            records["runs"][job.key]["diverged"] = "the loss is nan"
        return depth_results.Results(study, records)

    results = diverge(jobs[:1])
    row = rows_of(depth_report.inside_table(results))[0]
    assert row[2:5] == ["no norm", "8, 1 diverged", "45.1"]  # seven runs of 51.2 to 51.8, and none right
    assert row[-1] == "75% at layer 1"
    results = diverge(jobs)
    assert rows_of(depth_report.inside_table(results))[0][2:7] == ["no norm", "8, 8 diverged", "0.0", "", "–"]
    for draw in (depth_figures.draw_inside, depth_figures.draw_losses):
        assert all(len(axis.lines) > 0 for axis in draw(results, ["12x128"]).axes)


def test_other_arms_of_other_depths_have_rows() -> None:
    study, records = two_depths()
    starts = {"small-start": 0.7, "scale": 0.6}
    finish_line(study, records, "other starts, shallowest", lambda job: starts.get(job.arm, 0.5))
    rows = rows_of(depth_report.inside_table(depth_results.Results(study, records)))
    assert [[row[0], *row[2:6]] for row in rows[-2:]] == [
        ["3x128", "no norm, second layer small", "5", "71.3", "20.0 (20.0 to 20.0)"],
        ["3x128", "scale for each channel, no norm", "5", "61.3", "10.0 (10.0 to 10.0)"],
    ]


def test_kinds_that_fail_the_gate_are_neither_in_tables_nor_on_the_map() -> None:
    study, records = two_depths()
    for model in records["language_models"].values():
        model["kinds"] = ["both", "sum"]
    results = depth_results.Results(study, records)
    for asked, gain in (("picture", "10.0 (10.0 to 10.0)"), ("words", "5.0 (5.0 to 5.0)")):
        cells = dict(zip(depth_scenes.KINDS, rows_of(depth_report.kind_table(results, asked))[0][3:], strict=True))
        assert cells.pop("both") == cells.pop("sum") == gain
        assert set(cells.values()) == {"says nothing"}
    texts = [text.get_text() for text in depth_figures.draw_map(results).axes[0].texts]
    assert texts == ["+0.0"] * 6 + ["+10.0"] * 3  # score, both and sum at 3, 6 and 12 layers


def test_a_search_is_shown_once_it_is_done() -> None:
    study, records = Study(), records_with(Study())
    finish(records, Plan(study, records).stage2_search("12x128", "none").jobs, {2e-3: 0.9})
    assert "no norm" not in depth_report.search_table(depth_results.Results(study, records))  # the grid goes on
    finish(records, Plan(study, records).stage2_search("12x128", "none").jobs, {2e-3: 0.9})
    row = ["12x128", "no norm", "the recipes, rates searched", "stage 2"]
    assert rows_of(depth_report.search_table(depth_results.Results(study, records)))[0][:4] == row


def test_score_and_parity_are_correlated_over_all_arms() -> None:
    study, records = two_depths()
    order = list(ARMS)
    finish_line(study, records, "the dial and other starts", lambda job: 0.9 - order.index(job.arm) / 20)
    for case in depth_results.Results(study, records).arms:
        jobs = Plan(study, records).runs(*case)
        finish(records, jobs, 0.9 - order.index(case[1]) / 20)
        look_inside(records, jobs, ratio=1.5 + order.index(case[1]))  # the longer, the worse
    found = depth_report.correlations(depth_results.Results(study, records))
    assert [row[2] for row in found] == ["no"] * 4
    overs = ["51 runs of 9 arms", "43 runs of 8 arms"] * 2
    assert [row[1].split(",")[0] for row in found] == [f"-1.00 over {over}" for over in overs]


def test_figures_are_drawn_of_what_is_done(tmp_path: Path) -> None:
    study = Study()
    assert depth_figures.draw_figures(depth_results.Results(study, records_with(study)), tmp_path) == {}
    results = depth_results.Results(*two_depths())
    assert sorted(depth_figures.draw_figures(results, tmp_path).values()) == sorted(tmp_path.iterdir())
    inside = depth_figures.draw_inside(results, ["3x128", "12x128"])
    layers = {axis.get_title(): list(axis.lines[0].get_xdata()) for axis in inside.axes}  # the last row's
    assert layers["tokens that read as their digit"] == list(range(13))  # what enters, and after each layer
    assert layers["attention to the picture"] == list(range(1, 13))


def test_the_report_changes_nothing_of_the_page_but_what_is_between_its_marks() -> None:
    page = depth_report.PAGE.read_text(encoding="utf-8")
    texts = depth_report.render(depth_results.Results(*two_depths()), {})
    filled = depth_report.fill_in(page, texts)
    outside = [re.sub(r"(<!-- (\w+) -->).*?(<!-- /\2 -->)", r"\1\3", text, flags=re.S) for text in (page, filled)]
    assert outside[0] == outside[1]
    assert all(text in filled for text in texts.values())
    assert depth_report.fill_in(filled, texts) == filled


def test_the_readme_says_what_was_measured() -> None:
    results = depth_results.Results(Study(), depth_plan.read_records(depth.RESULTS))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for decoder, variant in results.pairs:
        means = [f"{mean(results.scores(case).values()):.1f}" for case in depth_results.pair_of(decoder, variant)]
        gains = results.gains(decoder, variant)
        bold = "**" if depth_results.side(gains) else ""
        assert " | ".join([*means, f"{bold}{depth_results.interval(gains)}{bold}"]) in readme, (decoder, variant)
    for decoder in (Study().main, Study().depths[0]):
        start = results.less_none((decoder, "small-start", "plain"))
        assert f"{depth_results.interval(start)} points" in readme


def test_the_page_shows_the_records() -> None:
    page = depth_report.PAGE.read_text(encoding="utf-8")
    results = depth_results.Results(Study(), depth_plan.read_records(depth.RESULTS))
    texts = depth_report.render(results, {})
    drawn = re.sub(r"!\[([^]]*)\]\(\w+\.png\)\n\n\*\1\.\*\n\n", "", page)
    assert all(text in drawn for text in texts.values())


def test_runs_that_began_with_different_backbones_are_not_compared() -> None:
    study, records = two_depths()
    (first, *_), (other, *_) = (Plan(study, records).runs("12x128", arm) for arm in ("none", "gwc"))
    for key, part in ((first.key, "one"), (other.key, "another")):
        records["runs"][key]["language_model"] = part
    with pytest.raises(ValueError, match=f"{other.key} began with another language_model than {first.key}"):
        depth_results.Results(study, records).gains("12x128")
    records["runs"][other.key]["language_model"] = "one"
    depth_results.Results(study, records).gains("12x128")


def test_the_protocol_stays_as_it_was_written() -> None:
    """Everything from its question to the changes; a change of plan adds a dated line there."""
    page = depth_report.PAGE.read_text(encoding="utf-8")
    protocol = page.split("of three layers the norm behind the projector")[1].split("## Changes")[0]
    assert hashlib.sha256(protocol.encode()).hexdigest()[:16] == "0501177834e1d4c4"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> depth_runs.Workplace:
    root = tmp_path_factory.mktemp("depth")
    sizes = depth_scenes.Sizes(train=320, validation=4, test=4, text=200)
    study = replace(QUICK, sizes=sizes, text_steps=0.003, vision_steps=3, text_scenes=2, epochs=(1, 1))
    place = depth_runs.Workplace(study, root, root / "depth.json")
    depth_runs.prepare(place)
    depth_runs.make_language_model(place, "2x128")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["gwc", "gwc-3t", "small-start", "scale"])
def test_an_arm_starts_where_it_says(tiny: depth_runs.Workplace, arm: str) -> None:
    chosen = ARMS[arm]
    parts = (str(tiny.vision), str(tiny.text("2x128")))
    with depth_runs.swapped(depth_runs.Float32LayerNorm, "_normalize", depth_runs.scale, chosen.start == "scale"):
        model, processor = depth_runs.compose(*parts, chosen.norm, chosen.align, vision_feature_layer=-1)
        depth_runs.start_arm(model, processor, chosen, tiny.data)
        pictures = [depth_runs.Image.open(path) for path in sorted((tiny.data / "images" / "train").iterdir())[:64]]
        pixel_values = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
        features = depth_runs.torch.cat(model.model.get_image_features(pixel_values).pooler_output)
    target = depth_runs.measure_target(model.model.language_model)
    assert features.norm(dim=-1).mean().item() == pytest.approx(chosen.dial * target, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "projector", "adapters"])
def test_a_run_gives_the_same_record_again(tiny: depth_runs.Workplace, variant: str) -> None:
    job = Job("2x128", "gwc", variant, (2e-3, 1e-3), "test", 11)
    depth_runs.run_jobs(tiny, [job])
    first = depth_plan.read_records(tiny.results)["runs"][job.key]
    depth_runs.shutil.rmtree(tiny.root / "runs")  # stage 1 too
    again = depth_runs.run_job(tiny, job)
    for name in ("picture", "words", "blanked", "stage1", "stage2", "inside"):
        assert first[name] == again[name], name
    assert set(first["picture"]) >= set(depth_scenes.KINDS)
    assert first["decoder"] == "2x128"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quick_study_runs_through_and_skips_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/digits/depth.py"), "--quick", "--output_dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    records = depth_plan.read_records(tmp_path / "depth.json")
    plan = Plan(QUICK, records)
    assert all(not depth.missing(line, plan) for line in depth_plan.lines(QUICK))
    assert "points over 2 seeds" in depth_report.render(depth_results.Results(QUICK, records), {})["summary"]
    before = (tmp_path / "depth.json").read_bytes()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "depth.json").read_bytes() == before
