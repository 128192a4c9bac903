"""The study's plan of runs, its file of records, and its statistics, which are compared with formulas on paper."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from examples.emoji.gains import measure_study_gains
from examples.emoji.study import __main__ as study
from examples.emoji.study.analysis import Comparison, compare_arms, compare_by_seed, interaction_p, tabulate_scores
from examples.emoji.study.cells import (
    FAST_SEEDS,
    SLOW_SEEDS,
    Arm,
    Log,
    Machine,
    Record,
    all_seeds,
    dropped_seeds,
    has_ended,
    runs_that_count,
    seeds_left,
    whole_seeds,
)
from examples.emoji.study.records import RECORDS, STUDY_COMMIT, read_log
from examples.emoji.study.scores import percent_right, primary_score


CPU = Machine("a CPU", "bfloat16")
GPU = Machine("a GPU", "bfloat16")
# The percentage of right names of each arm; a run's seed is added to it in some tests.
MEANS = {Arm.NOTHING: 30.0, Arm.SCALED: 36.0, Arm.LAYER_NORM: 33.0}


def make_record(arm: Arm, seed: int, percent: float = 30.0, machine: Machine = CPU, **fields: Any) -> Record:
    """The record of a run in which this percentage of names is right, for each of the two primary artists."""
    num_right = round(10 * percent)
    right = [["cat", "cat", 1.5]] * num_right
    wrong = [["cat", "dog", -0.5]] * (1000 - num_right)
    return {
        "arm": arm.value,
        "seed": seed,
        "ended": "2026-11-28T10:00:00+00:00",
        "commit": STUDY_COMMIT,
        **machine._asdict(),
        "failed": False,
        "data": "rows",  # stands for the fingerprint of the rows that the run was trained on
        "minutes": 10.0,
        "answers": {"twemoji": right + wrong, "emojione": right + wrong, "openmoji": [["cat", "dog", -2.0]]},
        "perplexity": 18.0,
        "losses": [2.0, 1.0],
        "start": {"norm": 1.0, "names_by_tokens": 20.0},
        "end": {"norm": 2.0, "names_by_tokens": 25.0},
        "gain": None,
        "clipped": {"language_model": 50.0},
        **fields,
    }


def make_seeds(seeds: list[int], machine: Machine = CPU) -> list[Record]:
    """Whole seeds, each with a run of every arm."""
    return [make_record(arm, seed, MEANS[arm], machine) for seed in seeds for arm in Arm]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a file of records."""
    path.write_text("\n".join(json.dumps(line) for line in lines))


def make_log(runs: list[Record], crashes: list[Record] | None = None, end: str | None = None) -> Log:
    return Log(runs, crashes or [], end)


# The statistics


def draw_scores(rng: np.random.Generator, seeds: list[int], effect_at_slow: float = 0.0) -> tuple[Any, np.ndarray]:
    """A table of runs, and the same scores as `[num_seeds, num_arms]`. Seeds differ much, arms of a seed little."""
    arms = list(Arm)
    offsets = rng.normal(0, 10, size=(len(seeds), 1))
    means = np.array([MEANS[arm] for arm in arms])
    matrix = means + offsets + rng.normal(0, 2, size=(len(seeds), 3))
    for row, seed in enumerate(seeds):
        if seed in SLOW_SEEDS:
            matrix[row, arms.index(Arm.SCALED)] += effect_at_slow

    runs = []
    for row, seed in enumerate(seeds):
        for column, arm in enumerate(arms):
            percent = round(matrix[row, column], 1)  # a record has 1000 names
            matrix[row, column] = percent
            runs.append(make_record(arm, seed, percent))
    return tabulate_scores(runs), matrix


def test_comparisons_of_arms_match_the_formulas_of_a_randomized_block_design() -> None:
    scores, matrix = draw_scores(np.random.default_rng(0), all_seeds())
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
    scores, _ = draw_scores(np.random.default_rng(1), all_seeds())
    shifted = scores.assign(score=scores["score"] + 40 * (scores["seed"] == 101))
    for pair, same_pair in zip(compare_arms(scores).pairs, compare_arms(shifted).pairs, strict=True):
        assert pair.estimate == pytest.approx(same_pair.estimate)
        assert pair.low == pytest.approx(same_pair.low)


def test_the_interaction_of_arm_and_rate_matches_the_formulas_of_a_split_plot() -> None:
    scores, matrix = draw_scores(np.random.default_rng(2), all_seeds(), effect_at_slow=3.0)
    is_fast = np.array([seed in FAST_SEEDS for seed in all_seeds()])
    fast, slow = matrix[is_fast], matrix[~is_fast]

    def interaction_residuals(group: np.ndarray) -> np.ndarray:
        return group - group.mean(axis=0) - group.mean(axis=1, keepdims=True) + group.mean()

    # Each rate's seeds have arm means of their own. What is left over has 2 x 7 x 2 degrees of freedom.
    error = (interaction_residuals(fast) ** 2).sum() + (interaction_residuals(slow) ** 2).sum()
    both = (interaction_residuals(matrix) ** 2).sum()
    ratio = (both - error) / 2 / (error / 28)
    assert interaction_p(scores) == pytest.approx(stats.f.sf(ratio, 2, 28), rel=1e-6)


def test_each_seeds_difference_is_tested_as_by_a_paired_t_test() -> None:
    scores, matrix = draw_scores(np.random.default_rng(3), all_seeds())
    arms = list(Arm)
    (pair,) = [pair for pair in compare_by_seed(scores) if (pair.arm, pair.other) == (Arm.SCALED, Arm.NOTHING)]
    tested = stats.ttest_rel(matrix[:, arms.index(Arm.SCALED)], matrix[:, arms.index(Arm.NOTHING)])
    assert pair.p == pytest.approx(tested.pvalue)
    assert (pair.low, pair.high) == pytest.approx(tuple(tested.confidence_interval()))


def compare_made_up(percents: dict[Arm, list[float]]) -> Comparison:
    """The comparison of the first sixteen runs of each arm, which have these percentages of right names."""
    runs = []
    for arm, percents_of_arm in percents.items():
        for seed, percent in zip(all_seeds(), percents_of_arm, strict=True):
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
    scores, _ = draw_scores(rng, all_seeds())
    comparison = compare_arms(scores)
    clear_pair = comparison.pair(Arm.SCALED, Arm.NOTHING)
    assert comparison.verdict(clear_pair) == "ahead"
    unclear = Comparison(arms_p=0.06, pairs=comparison.pairs)
    assert unclear.verdict(clear_pair) == "undecided"


@pytest.mark.parametrize(
    ("more_at_slow_rate", "titles"),
    [
        (0.0, ["scaled once, both rates", "LayerNorm at T, both rates"]),
        (
            10.0,
            [
                "scaled once, rate 0.0002",
                "LayerNorm at T, rate 0.0002",
                "scaled once, rate 5e-05",
                "LayerNorm at T, rate 5e-05",
            ],
        ),
    ],
)
def test_the_studys_gains_are_told_apart_by_rate_only_if_rates_change_them(
    more_at_slow_rate: float, titles: list[str]
) -> None:
    runs = []
    for seed in (101, 109, 102, 110):
        for arm in Arm:
            noise = (7 * seed + 3 * len(arm)) % 5 / 10
            more = more_at_slow_rate if seed >= 109 and arm is Arm.SCALED else 0.0
            runs.append(make_record(arm, seed, MEANS[arm] + more + noise))
    gains = measure_study_gains(tabulate_scores(runs))
    assert [gain.title for gain in gains] == titles

    # In `MEANS` scaled once is 6 points above nothing and the LayerNorm 3, and the noise is at most 0.4.
    expected = [6.0, 3.0] if more_at_slow_rate == 0 else [6.0, 3.0, 16.0, 3.0]
    assert [gain.mean for gain in gains] == pytest.approx(expected, abs=0.4)
    assert all(gain.low < gain.mean < gain.high for gain in gains)


def test_a_failed_run_counts_with_no_right_name() -> None:
    failed = make_record(Arm.SCALED, 101, failed=True)
    del failed["answers"], failed["end"], failed["perplexity"], failed["gain"]
    runs = [run for run in make_seeds(all_seeds()) if not (run["arm"] == Arm.SCALED and run["seed"] == 101)]
    scores = tabulate_scores([*runs, failed])
    assert scores.query("arm == 'scaled once' and seed == 101")["score"].tolist() == [0]
    assert "failed runs, %" in study.report([*runs, failed])


def test_a_name_is_right_for_its_drawing_and_for_a_near_copy() -> None:
    """A ram is drawn as an ewe is. The score is the mean over two artists."""
    answers = {
        "twemoji": [("ram", "ewe", -0.1), ("ewe", "ewe", 1.0), ("cat", "ewe", -1.0), ("dog", "ewe", -2.0)],
        "emojione": [("ewe", "ewe", 1.0), ("cat", "ewe", -1.0), ("dog", "ewe", -1.0), ("fox", "ewe", -1.0)],
    }
    record = {"answers": answers, "failed": False}
    assert percent_right(record, "twemoji") == 50
    assert primary_score(record) == (50 + 25) / 2


# The end


def test_results_are_shown_only_at_the_end() -> None:
    a_result = "scaled once less LayerNorm at T"
    runs = make_seeds(all_seeds())
    progress = study.describe_progress(make_log(runs[:-1]))
    assert progress.startswith("15 of 16 seeds are whole: 101, 102, 103, 104, 105, 106, 107, 108 at 0.0002; 109, 110")
    assert progress.endswith("1 seeds are left, each of 3 runs")
    assert a_result not in progress

    assert a_result in study.describe_progress(make_log(runs))


def test_the_study_ends_early_only_by_a_line_and_with_four_seeds_of_each_rate(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    runs = make_seeds([101, 102, 103, 104, 109, 110, 111])
    write_lines(path, runs)
    assert not has_ended(read_log(path))

    end = {"study_ended": "no time is left"}
    write_lines(path, [*runs, end])
    with pytest.raises(ValueError, match="of the seeds 109 to 116 3 are whole"):
        read_log(path)

    write_lines(path, [*runs, end, *make_seeds([112])])
    log = read_log(path)
    assert has_ended(log)
    assert "no time is left" in study.describe_progress(log)


def test_the_committed_records_can_be_reported() -> None:
    assert study.describe_progress(read_log(RECORDS))


# The plan of runs


def test_both_rates_advance_together() -> None:
    assert all_seeds() == [101, 109, 102, 110, 103, 111, 104, 112, 105, 113, 106, 114, 107, 115, 108, 116]


@pytest.mark.parametrize(
    "other", [pytest.param(GPU, id="processor"), pytest.param(Machine("a CPU", "float32"), id="arithmetic")]
)
def test_a_seed_is_whole_only_on_one_processor_in_one_arithmetic(other: Machine) -> None:
    whole = make_seeds([101])
    on_two_machines = [make_record(arm, 102, machine=other) for arm in (Arm.NOTHING, Arm.SCALED)]
    on_two_machines.append(make_record(Arm.LAYER_NORM, 102))
    log = make_log(whole + on_two_machines)
    assert whole_seeds(log.runs) == {101: CPU}
    assert runs_that_count(log.runs) == whole
    assert 102 in seeds_left(log)


def test_a_seed_counts_on_the_machine_that_finished_it_first() -> None:
    first_of_cpu = [make_record(Arm.NOTHING, 101)]
    others_of_cpu = [make_record(arm, 101) for arm in (Arm.SCALED, Arm.LAYER_NORM)]
    runs = first_of_cpu + make_seeds([101], GPU) + others_of_cpu
    assert whole_seeds(runs) == {101: GPU}


def test_a_seed_leaves_with_all_its_arms_after_two_crashes_of_a_run() -> None:
    crash = {"crashed": 1, "arm": "scaled once", "seed": 101, **CPU._asdict()}
    crash_of_another_arm = crash | {"arm": "nothing"}
    twice_in_different_arms = make_log([], [crash, crash_of_another_arm])
    assert dropped_seeds(twice_in_different_arms) == []

    log = make_log([*make_seeds([109]), make_record(Arm.NOTHING, 101)], [crash, crash | {"crashed": -9}])
    assert dropped_seeds(log) == [101]
    assert 101 not in seeds_left(log)
    assert {run["seed"] for run in runs_that_count(log.runs)} == {109}
    assert "left the study after two crashes of a run: 101" in study.describe_progress(log)

    # With all others whole, the study has ended.
    others = [seed for seed in all_seeds() if seed != 101]
    assert has_ended(make_log(make_seeds(others), log.crashes))


# The file of records


def test_a_line_that_is_twice_in_the_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = make_seeds([101])
    write_lines(path, records + records)
    assert read_log(path).runs == records


def test_two_different_records_of_a_run_are_refused_but_not_of_two_arithmetics(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    record = make_record(Arm.NOTHING, 101)
    write_lines(path, [record, record | {"arithmetic": "float32"}])
    assert len(read_log(path).runs) == 2

    write_lines(path, [record, record | {"minutes": 11.0}])
    with pytest.raises(ValueError, match="two records of the run"):
        read_log(path)


def test_runs_that_were_trained_on_different_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    record = make_record(Arm.NOTHING, 101)
    other_record = make_record(Arm.SCALED, 101) | {"data": "other rows"}
    write_lines(path, [record, other_record])
    with pytest.raises(ValueError, match="different rows"):
        read_log(path)
    # A run that failed has no fingerprint.
    write_lines(path, [record, other_record | {"data": None, "failed": True}])
    assert len(read_log(path).runs) == 2


def test_runs_count_in_the_order_in_which_they_ended(tmp_path: Path) -> None:
    """The lines of a machine that was done first were copied in behind those of the other."""
    path = tmp_path / "records.jsonl"
    second = make_seeds([101], CPU)
    first = [run | {"ended": "2026-11-28T09:00:00+00:00"} for run in make_seeds([101], GPU)]
    write_lines(path, [*second, *first])
    log = read_log(path)
    assert log.runs == [*first, *second]
    assert whole_seeds(log.runs) == {101: GPU}


def test_a_run_of_another_commit_is_refused_but_not_a_whole_hash(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    *others, last = make_seeds([101])
    whole_hash = STUDY_COMMIT + 33 * "0"
    write_lines(path, [*others, last | {"commit": whole_hash}])
    assert list(whole_seeds(read_log(path).runs)) == [101]

    # Also if no seed is whole, and if all of a seed's runs are of the other commit.
    for records in ([last | {"commit": "4567"}], [run | {"commit": "4567"} for run in make_seeds([101])]):
        write_lines(path, records)
        with pytest.raises(ValueError, match="are of commit 28e4395, not of 4567"):
            read_log(path)


def test_the_study_cannot_end_by_crashes_alone(tmp_path: Path) -> None:
    """All seeds of a rate have left: their results couldn't be judged."""
    path = tmp_path / "records.jsonl"
    crashes = [{"crashed": 1, "arm": "nothing", "seed": seed, **CPU._asdict()} for seed in SLOW_SEEDS]
    twice = [crash | {"ended": time} for crash in crashes for time in ("first", "second")]
    write_lines(path, [*make_seeds(list(FAST_SEEDS)), *twice])
    with pytest.raises(ValueError, match="of the seeds 109 to 116 0 are whole"):
        read_log(path)
