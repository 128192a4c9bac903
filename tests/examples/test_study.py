"""The study's plan of runs, its file of records, and its statistics, which are compared with scipy's."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from examples.emoji.study import __main__ as study
from examples.emoji.study.analysis import (
    ArmModel,
    Difference,
    conclude_block_1,
    holm,
    judge_block_1,
    judge_block_2,
    needs_more_seeds,
    report,
    simple_effects,
)
from examples.emoji.study.cells import (
    BLOCK_1,
    BLOCK_2,
    LAYER_NORM,
    NOTHING,
    NOTHING_FAST,
    SCALED,
    SCALED_SLOWLY,
    Arm,
    Block,
    Record,
    cells_left,
    complete_seeds,
    records_that_count,
)


def make_record(block: Block, arm: Arm, seed: int, percent: float = 30.0, processor: str = "a CPU") -> Record:
    """The record of a run in which this percentage of names is right, for each of the two primary artists."""
    num_right = round(10 * percent)  # of 1000 drawings
    digits = "1" * num_right + "0" * (1000 - num_right)
    return {
        "block": block.number,
        "arm": arm.name,
        "seed": seed,
        "processor": processor,
        "data": "rows",  # stands for the fingerprint of the rows that the run was trained on
        "minutes": 10.0,
        "hits": {"twemoji": digits, "emojione": digits, "openmoji": "01"},  # one of OpenMoji's two names is right
        "perplexity": 18.0,
        "losses": [2.0, 1.0],
        "start": {"norm": 1.0, "names_by_tokens": 20.0},
        "end": {"norm": 2.0, "names_by_tokens": 25.0},
        "gain": None,
        "clipped": {"language_model": 50.0},
    }


def make_records(block: Block, percents: dict[Arm, list[float]]) -> list[Record]:
    """Records of a block, all by one processor. Each arm has these percentages of right names, one for each seed."""
    records = []
    for arm, percents_of_arm in percents.items():
        for seed, percent in zip(block.seeds, percents_of_arm, strict=True):
            records.append(make_record(block, arm, seed, percent))
    return records


def eight_around(mean: float, distance: float) -> list[float]:
    """Eight numbers: four at this distance below the mean, and four at the same distance above it."""
    return [mean - distance, mean + distance] * 4


# The statistics


def test_arms_on_one_processor_are_compared_as_scipy_does() -> None:
    rng = np.random.default_rng(0)
    outcomes_a = rng.normal(28, 2, size=8)
    outcomes_b = rng.normal(31, 2, size=8)
    outcomes_c = rng.normal(35, 2, size=8)
    outcomes = np.concatenate([outcomes_a, outcomes_b, outcomes_c])
    arms = ["a"] * 8 + ["b"] * 8 + ["c"] * 8
    model = ArmModel(arms, ["a CPU"] * 24, outcomes)

    f_test = stats.f_oneway(outcomes_a, outcomes_b, outcomes_c)
    assert model.f_test() == pytest.approx(f_test.pvalue, rel=1e-9)

    pair = model.pair("a", "c", level=0.005)
    tukey = stats.tukey_hsd(outcomes_a, outcomes_b, outcomes_c)
    interval = tukey.confidence_interval(1 - 0.005)
    # scipy's results are matrices: in row 0 and column 2 they have the first arm less the third.
    assert pair.adjusted_p == pytest.approx(tukey.pvalue[0, 2], rel=1e-3)
    assert pair.adjusted_low == pytest.approx(interval.low[0, 2], abs=1e-4)
    assert pair.adjusted_high == pytest.approx(interval.high[0, 2], abs=1e-4)

    assert pair.verdict == "behind"
    assert model.pair("c", "a", level=0.005).verdict == "ahead"


def test_two_arms_on_one_processor_are_compared_by_a_t_test() -> None:
    rng = np.random.default_rng(0)
    outcomes_a = rng.normal(28, 2, size=8)
    outcomes_b = rng.normal(31, 2, size=8)
    outcomes = np.concatenate([outcomes_a, outcomes_b])
    arms = ["a"] * 8 + ["b"] * 8
    model = ArmModel(arms, ["a CPU"] * 16, outcomes)
    difference = model.difference({"b": 1, "a": -1})

    t_test = stats.ttest_ind(outcomes_b, outcomes_a)
    low, high = t_test.confidence_interval()
    assert difference.p == pytest.approx(t_test.pvalue, rel=1e-9)
    assert difference.low == pytest.approx(low, abs=1e-9)
    assert difference.high == pytest.approx(high, abs=1e-9)


def test_a_processor_that_is_better_for_all_arms_changes_no_comparison() -> None:
    rng = np.random.default_rng(1)
    arms = ["a", "b"] * 8
    processors = ["a CPU"] * 10 + ["a GPU"] * 6
    outcomes = rng.normal(30, 2, size=16)
    is_on_gpu = np.array(processors) == "a GPU"
    shifted_outcomes = np.where(is_on_gpu, outcomes + 50.0, outcomes)
    a_less_b = {"a": 1, "b": -1}

    without_shift = ArmModel(arms, processors, outcomes).difference(a_less_b)
    with_shift = ArmModel(arms, processors, shifted_outcomes).difference(a_less_b)
    assert with_shift.estimate == pytest.approx(without_shift.estimate)
    assert with_shift.low == pytest.approx(without_shift.low)
    assert with_shift.p == pytest.approx(without_shift.p)

    # A linear model that doesn't know the processors has a much wider interval.
    without_processors = ArmModel(arms, ["a CPU"] * 16, shifted_outcomes).difference(a_less_b)
    width = with_shift.high - with_shift.low
    width_without_processors = without_processors.high - without_processors.low
    assert width_without_processors > 5 * width


def test_arms_are_equal_only_if_the_interval_lies_within_three_points() -> None:
    arms = ["a"] * 16 + ["b"] * 16
    processors = ["a CPU"] * 32

    # Both arms have the same mean. The outcomes first vary little, and then much.
    outcomes_close_to_mean = eight_around(30, 0.5) * 4  # 16 for each arm
    model = ArmModel(arms, processors, outcomes_close_to_mean)
    assert model.pair("a", "b", level=0.048).verdict == "equal within 3 points"

    outcomes_far_from_mean = eight_around(30, 6.0) * 4
    model = ArmModel(arms, processors, outcomes_far_from_mean)
    assert model.pair("a", "b", level=0.048).verdict == "unclear"


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        # The smallest p is doubled, since there are two tests.
        pytest.param({"a": 0.01, "b": 0.6}, {"a": 0.02, "b": 0.6}, id="doubled"),
        # The smallest p is doubled to 0.04. The other p would stay 0.03, but may not be below 0.04.
        pytest.param({"a": 0.03, "b": 0.02}, {"b": 0.04, "a": 0.04}, id="not-below-the-smallest"),
        pytest.param({"a": 0.7, "b": 0.6}, {"b": 1.0, "a": 1.0}, id="at-most-1"),
    ],
)
def test_holms_adjustment(p_values: dict[str, float], adjusted: dict[str, float]) -> None:
    assert holm(p_values) == pytest.approx(adjusted)


# Block 1


def test_effects_of_norm_and_rate_by_hand() -> None:
    means = {SCALED: 36.0, SCALED_SLOWLY: 33.0, NOTHING_FAST: 31.0, NOTHING: 30.0}
    records = make_records(BLOCK_1, {arm: eight_around(mean, 1.0) for arm, mean in means.items()})
    effects = judge_block_1(records)
    estimates = {name: effect.estimate for name, effect in effects.items()}
    assert estimates == pytest.approx({
        "norm": 4.0,  # (36 + 33) / 2 - (31 + 30) / 2
        "rate": 2.0,  # (36 + 31) / 2 - (33 + 30) / 2
        "interaction": 2.0,  # (36 - 33) - (31 - 30)
    })  # fmt: skip

    simple_estimates = {name: effect.estimate for name, effect in simple_effects(records).items()}
    assert simple_estimates == pytest.approx({
        "norm, at relative rate 1": 5.0,  # 36 - 31
        "norm, at relative rate 1/k": 3.0,  # 33 - 30
        "rate, at norm T": 3.0,  # 36 - 33
        "rate, at norm kT": 1.0,  # 31 - 30
    })  # fmt: skip

    # Each arm has eight outcomes at a distance of 1 from its mean, so the variance of a run is 8/7. The effect of norm
    # is the difference of two means of 16 runs each, so its variance is 2/16 of a run's variance. 2.0484 is the 97.5%
    # quantile of Student's t with 28 degrees of freedom: 32 runs less 4 arms.
    half_width = 2.0484 * (8 / 7 * 2 / 16) ** 0.5
    assert effects["norm"].high - 4.0 == pytest.approx(half_width, abs=1e-3)


@pytest.mark.parametrize(
    ("norm_p", "rate_p", "interaction_p", "sentence"),
    [
        pytest.param(
            0.001,
            0.3,
            0.5,
            "At equal relative rates, smaller image embeddings gain 4.0 points (2.0 to 6.0); "
            "a faster second layer explains less than 1.0.",
            id="norm",
        ),
        pytest.param(
            0.3,
            0.001,
            0.5,
            "At equal norms, models with a faster second layer lose 1.0 points (-3.0 to 1.0 gained); "
            "smaller image embeddings explain less than 6.0.",
            id="rate",
        ),
        pytest.param(
            0.001,
            0.04,
            0.5,
            "Smaller image embeddings gain 4.0 points (2.0 to 6.0); "
            "models with a faster second layer lose 1.0 points (-3.0 to 1.0 gained).",
            id="norm-and-rate",
        ),
        # A p of 0.03 would be below 0.05. But it is the smaller of two, so Holm's method doubles it.
        pytest.param(0.03, 0.06, 0.5, "Undecided; effects above 6.0 points are excluded.", id="neither"),
        # If the interaction is clear, the effects of norm and rate are not told, however clear they are.
        pytest.param(0.001, 0.001, 0.01, "Norm and rate interact: read the simple effects.", id="interaction"),
    ],
)
def test_block_1_says_what_its_p_values_allow(
    norm_p: float, rate_p: float, interaction_p: float, sentence: str
) -> None:
    effects = {
        "norm": Difference(estimate=4, low=2, high=6, p=norm_p),
        "rate": Difference(estimate=-1, low=-3, high=1, p=rate_p),
        "interaction": Difference(estimate=0, low=0, high=0, p=interaction_p),
    }
    assert conclude_block_1(effects) == sentence


def test_simple_effects_are_shown_only_if_the_interaction_is_clear() -> None:
    def report_block_1(means: dict[Arm, float]) -> str:
        percents = {arm: eight_around(mean, 1.0) for arm, mean in means.items()}
        return report(BLOCK_1, make_records(BLOCK_1, percents))

    # A small norm gains 3 points, a fast second layer gains 3, and both together gain 6.
    without_interaction = report_block_1({SCALED: 36, SCALED_SLOWLY: 33, NOTHING_FAST: 33, NOTHING: 30})
    assert "rate, at norm T" not in without_interaction
    # A small norm and a fast second layer together gain 10 points, but each alone gains nothing.
    with_interaction = report_block_1({SCALED: 40, SCALED_SLOWLY: 30, NOTHING_FAST: 30, NOTHING: 30})
    assert "rate, at norm T" in with_interaction


# Block 2


def block_2_records(layer_norm_mean: float) -> list[Record]:
    """Records of block 2's first eight seeds. The mean is 37% in "scaled once", and 30% in "nothing"."""
    return make_records(
        BLOCK_2,
        {
            NOTHING: eight_around(30, 2.0),
            SCALED: eight_around(37, 2.0),
            LAYER_NORM: eight_around(layer_norm_mean, 2.0),
        },
    )


def test_block_2_gets_more_seeds_only_if_scaling_and_norm_are_unclear() -> None:
    unclear_records = block_2_records(layer_norm_mean=34)
    assert needs_more_seeds(unclear_records)
    longer_block_2, _block_1 = study.planned_blocks(unclear_records)
    assert len(cells_left(longer_block_2, unclear_records, "a CPU")) == 3 * 8  # three arms with eight more seeds

    clear_records = block_2_records(layer_norm_mean=30)
    assert not needs_more_seeds(clear_records)
    # While a run is left, the results aren't looked at.
    all_records_but_one = unclear_records[:-1]
    assert not needs_more_seeds(all_records_but_one)


def test_the_bound_is_lower_at_the_first_look_than_at_the_second() -> None:
    first_records = block_2_records(layer_norm_mean=34)
    f_test_p, pairs = judge_block_2(first_records)
    assert f_test_p < 0.001
    assert [(pair.arm, pair.other, pair.verdict) for pair in pairs] == [
        ("scaled once", "LayerNorm at T", "unclear"),
        ("scaled once", "nothing", "ahead"),
        ("LayerNorm at T", "nothing", "ahead"),
    ]
    assert {pair.level for pair in pairs} == {0.005}

    # With eight more seeds that have the same results, all pairs are clear at the second look.
    more_records = [record | {"seed": record["seed"] + 8} for record in first_records]
    _, pairs = judge_block_2(first_records + more_records)
    assert [pair.verdict for pair in pairs] == ["ahead", "ahead", "ahead"]
    assert {pair.level for pair in pairs} == {0.048}


def test_results_are_shown_only_when_a_block_is_done() -> None:
    a_result = "scaled once less LayerNorm at T"
    unclear_records = block_2_records(layer_norm_mean=34)

    # Each run took 10 minutes, so the run that is left takes 0.2 hours.
    all_records_but_one = unclear_records[:-1]
    progress = study.describe_progress(all_records_but_one, "a CPU")
    assert progress.startswith("Block 2: 1 of 24 runs left, about 0.2 hours")
    assert a_result not in progress

    # The first look is unclear, so three arms with eight more seeds run before anything is shown.
    progress = study.describe_progress(unclear_records, "a CPU")
    assert progress.startswith("Block 2: 24 of 48 runs left")
    assert a_result not in progress

    # A clear first look ends the block.
    clear_records = block_2_records(layer_norm_mean=30)
    assert f"{a_result}: ahead" in study.describe_progress(clear_records, "a CPU")


# The plan of runs


def seeds_left(records: list[Record], processor: str) -> list[int]:
    """The seeds of the runs of block 2 that a processor has to do, in order, each once."""
    seeds = [cell.seed for cell in cells_left(BLOCK_2, records, processor)]
    return list(dict.fromkeys(seeds))


def arms_left(records: list[Record], processor: str, seed: int) -> list[Arm]:
    """The arms of block 2 that a processor has to run with a seed."""
    return [cell.arm for cell in cells_left(BLOCK_2, records, processor) if cell.seed == seed]


def test_all_arms_of_a_seed_run_on_one_processor() -> None:
    cpu_has_finished_101 = [make_record(BLOCK_2, arm, 101, processor="a CPU") for arm in BLOCK_2.arms]
    cpu_has_begun_102 = [make_record(BLOCK_2, NOTHING, 102, processor="a CPU")]
    gpu_has_begun_103 = [make_record(BLOCK_2, arm, 103, processor="a GPU") for arm in (NOTHING, SCALED)]
    records = cpu_has_finished_101 + cpu_has_begun_102 + gpu_has_begun_103

    # A processor first finishes the seed that it has begun. The seed that the other processor has begun comes last.
    begun_by_none = [104, 105, 106, 107, 108]
    assert seeds_left(records, "a CPU") == [102, *begun_by_none, 103]
    assert seeds_left(records, "a GPU") == [103, *begun_by_none, 102]

    assert arms_left(records, "a GPU", seed=103) == [LAYER_NORM]
    # The CPU has run one arm of seed 102. The GPU would have to run all arms, even this arm.
    assert arms_left(records, "a GPU", seed=102) == [NOTHING, SCALED, LAYER_NORM]

    assert complete_seeds(BLOCK_2, records) == {101: "a CPU"}
    assert records_that_count(BLOCK_2, records) == cpu_has_finished_101


def test_a_seed_counts_on_the_processor_that_finished_it_first() -> None:
    first_of_cpu = [make_record(BLOCK_2, NOTHING, 101, processor="a CPU")]
    all_of_gpu = [make_record(BLOCK_2, arm, 101, processor="a GPU") for arm in BLOCK_2.arms]
    others_of_cpu = [make_record(BLOCK_2, arm, 101, processor="a CPU") for arm in (SCALED, LAYER_NORM)]
    records = first_of_cpu + all_of_gpu + others_of_cpu
    assert complete_seeds(BLOCK_2, records) == {101: "a GPU"}


# The file of records


@pytest.fixture
def records_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the study's file of records, in an empty folder."""
    path = tmp_path / "records.jsonl"
    monkeypatch.setattr(study, "RECORDS", path)
    return path


def write_records(path: Path, records: list[Record]) -> None:
    """Write a file with a record in each line."""
    lines = [json.dumps(record) for record in records]
    path.write_text("\n".join(lines))


def test_a_line_that_is_twice_in_the_file_is_read_once(records_file: Path) -> None:
    records = [make_record(BLOCK_2, arm, 101) for arm in BLOCK_2.arms]
    write_records(records_file, records + records)
    assert study.read_records() == records


def test_two_different_records_of_a_run_are_refused(records_file: Path) -> None:
    record = make_record(BLOCK_2, NOTHING, 101)
    write_records(records_file, [record, record | {"minutes": 11.0}])
    with pytest.raises(ValueError, match="two records of the run"):
        study.read_records()


def test_runs_that_were_trained_on_different_rows_are_refused(records_file: Path) -> None:
    record = make_record(BLOCK_2, NOTHING, 101)
    other_record = make_record(BLOCK_2, SCALED, 101) | {"data": "other rows"}
    write_records(records_file, [record, other_record])
    with pytest.raises(ValueError, match="different rows"):
        study.read_records()
