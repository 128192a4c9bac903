"""The depth study: its questions are answered rightly, its plan follows its protocol, its records survive."""

import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "digits"))

import depth  # noqa: E402
import depth_plan  # noqa: E402
import depth_report  # noqa: E402
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
    return {"data": {}, "language_models": {decoder: model}, "runs": {}}


def finish(records: dict, jobs: list[Job], value: dict[float, float] | float) -> None:
    for job in jobs:
        share = value if isinstance(value, float) else value.get(job.rates[1], 0.0)
        records["runs"][job.key] = {"picture": dict.fromkeys(depth_scenes.KINDS, share)}


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


def test_what_is_recorded_is_not_run_again() -> None:
    study = Study()
    records = records_with(study)
    line = next(line for line in depth_plan.lines(study) if line.title == "the comparison that decides")
    jobs = depth.missing(line, Plan(study, records))
    left = depth.time_left(study, Plan(study, records))
    finish(records, jobs[:3], 0.5)
    assert depth.missing(line, Plan(study, records)) == jobs[3:]
    assert depth.time_left(study, Plan(study, records)) < left


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
    assert word in depth_report.verdict(differences)


def test_nothing_is_said_of_a_comparison_before_its_last_seed() -> None:
    study = Study()
    records = records_with(study)
    jobs = Plan(study, records).deciding()
    finish(records, jobs[:-1], 0.123)
    text = depth_report.render(depth_report.Results(study, records), with_map=False)
    assert "**Not run yet.**" in text
    assert "12.3" not in text
    finish(records, jobs[-1:], 0.123)
    for job in jobs:
        numbers = {"ratio": 1.0, "gap": [0.0] * 3}
        records["runs"][job.key] |= {"stage1": {"loss": 1.0}, "stage2": {"loss": 1.0}}
        records["runs"][job.key] |= {"words": {"all": 1.0}, "blanked": {"all": 0.1}}
        records["runs"][job.key] |= {"inside": {"stage1": numbers, "stage2": numbers}}
    text = depth_report.render(depth_report.Results(study, records), with_map=False)
    assert "**No clear difference**: GWC less no norm 0.0 (0.0 to 0.0) points over 8 seeds." in text


def test_the_page_has_a_place_for_the_results() -> None:
    page = depth_report.PAGE.read_text(encoding="utf-8")
    filled = depth_report.fill_in(page, "figures")
    assert filled.split(depth_report.MARKS[0])[0] == page.split(depth_report.MARKS[0])[0]
    assert depth_report.fill_in(filled, "figures") == filled


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
    assert "points over 2 seeds" in depth_report.render(depth_report.Results(QUICK, records), with_map=False)
    before = (tmp_path / "depth.json").read_bytes()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "depth.json").read_bytes() == before
