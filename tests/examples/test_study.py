"""The study's committed records, and its statistics, which are compared with formulas on paper."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

from examples.emoji.gains import measure_study_gains
from examples.emoji.study.__main__ import describe_study
from examples.emoji.study.analysis import (
    Comparison,
    compare_arms,
    compare_by_seed,
    interaction_p,
    tabulate_scores,
)
from examples.emoji.study.records import Arm, Record, Study, read_study
from examples.emoji.study.scores import percent_right, primary_score


# The seeds of the protocol, by learning rate of the projector.
SEEDS_BY_RATE = {2e-4: range(101, 109), 5e-5: range(109, 117)}
ALL_SEEDS = [*SEEDS_BY_RATE[2e-4], *SEEDS_BY_RATE[5e-5]]
# The percentage of right names of each arm in records that are made up.
MEANS = {Arm.NOTHING: 30.0, Arm.SCALED: 36.0, Arm.LAYER_NORM: 33.0}


def rate_of(seed: int) -> float:
    """The projector's learning rate for a seed."""
    (rate,) = [rate for rate, seeds in SEEDS_BY_RATE.items() if seed in seeds]
    return rate


def make_record(arm: Arm, seed: int, percent: float) -> Record:
    """The record of a run in which this percentage of names is right, for each of the two primary artists."""
    num_right = round(10 * percent)
    right = [["cat", "cat", 1.5]] * num_right
    wrong = [["cat", "dog", -0.5]] * (1000 - num_right)
    return {
        "arm": arm.value,
        "seed": seed,
        "rates": {"projector": rate_of(seed)},
        "arithmetic": "bfloat16",
        "minutes": 10.0,
        "answers": {"twemoji": right + wrong, "emojione": right + wrong, "openmoji": [["cat", "dog", -2.0]]},
        "perplexity": 18.0,
        "losses": [2.0] * 29,
        "layers": {"turning": {"visual": [0.8, 0.1], "text": [0.9, 0.1]}, "attention": [0.3, 0.1]},
        "start": {"norm": 1.0, "names_by_tokens": 20.0},
        "end": {"norm": 2.0, "names_by_tokens": 25.0},
        "gain": None,
        "clipped": {"language_model": 50.0},
    }


# The records


def test_the_committed_records_are_those_that_the_protocol_asks_for() -> None:
    study = read_study()
    assert {run["commit"][:7] for run in study.runs} == {"28e4395"}
    assert len({run["data"] for run in study.runs}) == 1  # all were trained on the same rows
    assert not any(run["failed"] for run in study.runs)

    runs_by_seed: dict[int, list[Record]] = {}
    for run in study.runs:
        assert run["rates"]["projector"] == rate_of(run["seed"])
        runs_by_seed.setdefault(run["seed"], []).append(run)

    # Each seed is whole: a run of each arm, all on one kind of processor in one arithmetic.
    for runs in runs_by_seed.values():
        assert sorted(run["arm"] for run in runs) == sorted(Arm)
        assert len({(run["processor"], run["arithmetic"]) for run in runs}) == 1

    assert sorted(runs_by_seed) == [101, 102, 103, 104, 109, 110, 111, 112]


def make_up_study(more_for_scaled_at_slow_rate: float = 0.0) -> Study:
    """A study of two seeds a rate with the arms' `MEANS`, almost without noise."""
    runs = []
    for seed in (101, 102, 109, 110):
        for number, arm in enumerate(Arm):
            noise = (7 * seed + 3 * number) % 5 / 10
            more = more_for_scaled_at_slow_rate if arm is Arm.SCALED and rate_of(seed) == 5e-5 else 0.0
            runs.append(make_record(arm, seed, MEANS[arm] + noise + more))
    return Study(runs, "no time is left")


def test_the_report_gives_the_hours_and_the_end_and_judges_each_pair() -> None:
    text = describe_study(make_up_study())
    assert text.startswith("12 runs, which took 2.0 hours together. The study ended: no time is left\n")
    assert "Both rates, 4 seeds: F test of arms" in text
    # By `MEANS` they differ by 3, and by the noise by 0.05.
    assert re.search(r"scaled once less LayerNorm at T +2\.95 \(.*\), p 0\.0000: ahead$", text, re.MULTILINE)
    assert "Scaled once is as good as the LayerNorm within 2 points." in text


def test_the_report_judges_each_rate_alone_if_rates_change_the_differences() -> None:
    text = describe_study(make_up_study(more_for_scaled_at_slow_rate=10.0))
    assert "Both rates" not in text
    fast, slow = text.split("Rate 0.0002, 2 seeds: F test of arms")[1].split("Rate 5e-05, 2 seeds: F test of arms")
    assert re.search(r"scaled once less nothing +(5\.|6\.)", fast)
    assert re.search(r"scaled once less nothing +(15\.|16\.)", slow)


# The statistics


def draw_scores(rng: np.random.Generator, seeds: list[int], effect_at_slow: float = 0.0) -> tuple[Any, np.ndarray]:
    """A table of runs, and the same scores as `[num_seeds, num_arms]`. Seeds differ much, arms of a seed little."""
    arms = list(Arm)
    offsets = rng.normal(0, 10, size=(len(seeds), 1))
    means = np.array([MEANS[arm] for arm in arms])
    matrix = means + offsets + rng.normal(0, 2, size=(len(seeds), 3))
    for row, seed in enumerate(seeds):
        if rate_of(seed) == 5e-5:
            matrix[row, arms.index(Arm.SCALED)] += effect_at_slow

    runs = []
    for row, seed in enumerate(seeds):
        for column, arm in enumerate(arms):
            percent = round(matrix[row, column], 1)  # a record has 1000 names
            matrix[row, column] = percent
            runs.append(make_record(arm, seed, percent))
    return tabulate_scores(runs), matrix


def test_comparisons_of_arms_match_the_formulas_of_a_randomized_block_design() -> None:
    scores, matrix = draw_scores(np.random.default_rng(0), ALL_SEEDS)
    num_seeds, num_arms = matrix.shape
    comparison = compare_arms(scores)

    residuals = matrix - matrix.mean(axis=0) - matrix.mean(axis=1, keepdims=True) + matrix.mean()
    degrees = (num_seeds - 1) * (num_arms - 1)
    assert degrees == 30
    variance = (residuals**2).sum() / degrees
    between_arms = num_seeds * ((matrix.mean(axis=0) - matrix.mean()) ** 2).sum() / (num_arms - 1)
    assert comparison.arms_p == pytest.approx(stats.f.sf(between_arms / variance, num_arms - 1, degrees), rel=1e-6)

    pair = comparison.pair(Arm.SCALED, Arm.LAYER_NORM)
    arms = list(Arm)
    estimate = (matrix[:, arms.index(Arm.SCALED)] - matrix[:, arms.index(Arm.LAYER_NORM)]).mean()
    error = (2 * variance / num_seeds) ** 0.5
    half_width = stats.t.ppf(0.975, degrees) * error
    assert pair.estimate == pytest.approx(estimate)
    assert (pair.low, pair.high) == pytest.approx((estimate - half_width, estimate + half_width))
    assert pair.p == pytest.approx(2 * stats.t.sf(abs(estimate) / error, degrees), rel=1e-6)


def test_a_seed_that_is_better_for_all_arms_changes_no_comparison() -> None:
    scores, _ = draw_scores(np.random.default_rng(1), ALL_SEEDS)
    shifted = scores.assign(score=scores["score"] + 40 * (scores["seed"] == 101))
    for pair, same_pair in zip(compare_arms(scores).pairs, compare_arms(shifted).pairs, strict=True):
        assert pair.estimate == pytest.approx(same_pair.estimate)
        assert pair.low == pytest.approx(same_pair.low)


def test_the_interaction_of_arm_and_rate_matches_the_formulas_of_a_split_plot() -> None:
    scores, matrix = draw_scores(np.random.default_rng(2), ALL_SEEDS, effect_at_slow=3.0)
    is_fast = np.array([rate_of(seed) == 2e-4 for seed in ALL_SEEDS])
    fast, slow = matrix[is_fast], matrix[~is_fast]

    def interaction_residuals(group: np.ndarray) -> np.ndarray:
        return group - group.mean(axis=0) - group.mean(axis=1, keepdims=True) + group.mean()

    # Each rate's seeds have arm means of their own. What is left over has 2 x 7 x 2 degrees of freedom.
    error = (interaction_residuals(fast) ** 2).sum() + (interaction_residuals(slow) ** 2).sum()
    both = (interaction_residuals(matrix) ** 2).sum()
    ratio = (both - error) / 2 / (error / 28)
    assert interaction_p(scores) == pytest.approx(stats.f.sf(ratio, 2, 28), rel=1e-6)


def test_each_seeds_difference_is_tested_as_by_a_paired_t_test() -> None:
    scores, matrix = draw_scores(np.random.default_rng(3), ALL_SEEDS)
    arms = list(Arm)
    (pair,) = [pair for pair in compare_by_seed(scores) if (pair.arm, pair.other) == (Arm.SCALED, Arm.NOTHING)]
    tested = stats.ttest_rel(matrix[:, arms.index(Arm.SCALED)], matrix[:, arms.index(Arm.NOTHING)])
    assert pair.p == pytest.approx(tested.pvalue)
    assert (pair.low, pair.high) == pytest.approx(tuple(tested.confidence_interval()))


def compare_made_up(percents: dict[Arm, list[float]]) -> Comparison:
    """The comparison of the first sixteen runs of each arm, which have these percentages of right names."""
    runs = []
    for arm, percents_of_arm in percents.items():
        for seed, percent in zip(ALL_SEEDS, percents_of_arm, strict=True):
            runs.append(make_record(arm, seed, percent))
    return compare_arms(tabulate_scores(runs))


def around(mean: float, distance: float, shift: int) -> list[float]:
    """Sixteen numbers around a mean, in one of four patterns that `shift` picks."""
    signs = [1, -1, -1, 1] * 4
    return [mean + distance * signs[(number + shift) % 16] for number in range(16)]


def test_scaling_is_as_good_only_if_its_interval_is_above_minus_two_and_it_is_ahead_of_nothing() -> None:
    nothing = around(28, 0.5, shift=0)
    scaled = around(32, 0.5, shift=1)
    close = compare_made_up({Arm.NOTHING: nothing, Arm.SCALED: scaled, Arm.LAYER_NORM: around(33, 0.5, shift=2)})
    assert close.verdict(close.pair(Arm.SCALED, Arm.LAYER_NORM)) == "behind"
    assert close.scaling_is_as_good  # though behind: by less than 2 points

    far = compare_made_up({Arm.NOTHING: nothing, Arm.SCALED: scaled, Arm.LAYER_NORM: around(34, 0.5, shift=2)})
    assert not far.scaling_is_as_good

    # No arm does anything, so scaling is equal to the norm, and not as good.
    equal = compare_made_up({arm: around(30, 0.5, shift) for shift, arm in enumerate(Arm)})
    assert equal.pair(Arm.SCALED, Arm.LAYER_NORM).low > -2
    assert not equal.scaling_is_as_good


def test_no_pair_is_clear_if_the_f_test_is_not() -> None:
    rng = np.random.default_rng(15)
    scores, _ = draw_scores(rng, ALL_SEEDS)
    comparison = compare_arms(scores)
    clear_pair = comparison.pair(Arm.SCALED, Arm.NOTHING)
    assert comparison.verdict(clear_pair) == "ahead"
    unclear = Comparison(arms_p=0.06, pairs=comparison.pairs)
    assert unclear.verdict(clear_pair) == "undecided"


def test_the_studys_gains_are_differences_from_nothing() -> None:
    scores = tabulate_scores(make_up_study().runs)
    gains = {gain.title: gain for gain in measure_study_gains(scores)}
    assert list(gains) == ["scaled once, all steps", "LayerNorm, all steps"]
    # By `MEANS` they gain 6 and 3, and the noise is at most 0.4.
    assert gains["scaled once, all steps"].mean == pytest.approx(6.0, abs=0.4)
    assert gains["LayerNorm, all steps"].mean == pytest.approx(3.0, abs=0.4)
    for gain in gains.values():
        assert gain.low < gain.mean < gain.high
        assert gain.num_pairs == 4


def test_a_name_is_right_for_its_drawing_and_for_a_near_copy() -> None:
    """A ram is drawn as an ewe is. The score is the mean over two artists."""
    answers = {
        "twemoji": [("ram", "ewe", -0.1), ("ewe", "ewe", 1.0), ("cat", "ewe", -1.0), ("dog", "ewe", -2.0)],
        "emojione": [("ewe", "ewe", 1.0), ("cat", "ewe", -1.0), ("dog", "ewe", -1.0), ("fox", "ewe", -1.0)],
    }
    record = {"answers": answers}
    assert percent_right(record, "twemoji") == 50
    assert primary_score(record) == (50 + 25) / 2
