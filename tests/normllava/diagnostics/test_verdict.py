"""Tests of the verdicts on a sweep and on turning, at the limits of each rule, and of the lines that tell a verdict.

A sweep asks questions about pictures while image tokens are multiplied by factors, the doses. At dose 1 the model is
unchanged. Turning is how much layers change the direction of tokens.
"""

import numpy as np
import pandas as pd
import pytest

from normllava.diagnostics.report import tell_sweep
from normllava.diagnostics.table import Estimate, make_rows, summaries_by_dose
from normllava.diagnostics.verdict import (
    Advice,
    Change,
    Score,
    Turning,
    choose_advice,
    clip_share,
    find_best,
    judge_change,
    judge_sweep,
    judge_turning,
)


# Changes of three pictures.
CLEAR = np.array([0.2, 0.3, 0.4])  # the mean is 0.3, and its interval is above 0
UNCLEAR = np.array([-0.2, 0.3, 0.4])  # the mean is 1/6, and its interval contains 0
ZERO = np.zeros(3)


def sweep_rows(changes: dict[float, np.ndarray], answers: str = "several") -> pd.DataFrame:
    """Rows of a sweep of three pictures. At dose 1, the share of right answers is 0.5, and the loss is 2. Guessing
    gets 0.25.

    Args:
        changes: For each dose but 1, the change of the share of right answers of each picture. The loss of the right
            answer changes by the same number with the opposite sign.
        answers: "several" if the model can choose from the different answers of several rows, "one" if all rows have
            the same answer, so that only its loss is measured, and "no" if rows have no answers.
    """
    rows = []
    for dose, change in {1.0: ZERO, **changes}.items():
        values_by_measure = {"changed": np.array([0.0, 1.0, 1.0])}
        if answers != "no":
            values_by_measure |= {"loss": 2 - change, "loss_change": -change}
        if answers == "several":  # `named` is the share of right answers
            values_by_measure |= {"named": 0.5 + change, "named_change": change}
        if dose == 1 and answers == "several":
            values_by_measure |= {"guessing": np.full(3, 0.25)}
        if dose == 1:  # `length` is the norm of image tokens over the norm of text tokens
            values_by_measure |= {"length": np.ones(3)}
        for measure, values in values_by_measure.items():
            rows.append(make_rows(measure, values).assign(dose=dose))
    return pd.concat(rows)


@pytest.mark.parametrize(
    ("changes", "advice", "best"),
    [
        pytest.param({0.3: -CLEAR, 3.0: -CLEAR}, Advice.LEAVE, None, id="both worse"),
        pytest.param({0.3: -UNCLEAR, 3.0: -CLEAR}, Advice.LEAVE, None, id="one worse"),
        pytest.param({0.3: -CLEAR, 3.0: CLEAR}, Advice.TRY_ANOTHER_NORM, 3.0, id="one worse, one better"),
        pytest.param({0.3: CLEAR, 3.0: CLEAR / 2}, Advice.TRY_ANOTHER_NORM, 0.3, id="both better, one most"),
        pytest.param({0.3: UNCLEAR, 3.0: ZERO}, Advice.LEAVE_OR_ASK_MORE, None, id="nothing clear"),
    ],
)
@pytest.mark.parametrize("answers", ["several", "one"])
def test_advice_follows_clear_changes(
    changes: dict[float, np.ndarray], answers: str, advice: Advice, best: float | None
) -> None:
    """`sweep_rows` lets the loss rise where right answers fall, so both scores give the same advice."""
    score = Score.RIGHT_ANSWERS if answers == "several" else Score.LOSS
    verdict = judge_sweep(summaries_by_dose(sweep_rows(changes, answers)))
    assert verdict.score == score
    assert verdict.advice == advice
    assert verdict.best == best
    assert list(verdict.scores) == [0.3, 1.0, 3.0]
    assert list(verdict.changes) == [0.3, 3.0]


def test_without_answers_nothing_is_judged() -> None:
    verdict = judge_sweep(summaries_by_dose(sweep_rows({0.3: -CLEAR, 3.0: CLEAR}, answers="no")))
    assert verdict.score == Score.CHANGED_ANSWERS
    assert verdict.advice == Advice.GIVE_ANSWERS
    assert verdict.changes == {}
    assert verdict.best is None


def test_answers_to_a_single_picture_judge_nothing() -> None:
    """Pictures 1 and 2 have no answer, and so no loss. A single picture gives no interval."""
    rows = sweep_rows({0.3: -CLEAR, 3.0: -CLEAR}, answers="one")
    is_loss = rows["measure"].isin(["loss", "loss_change"])
    without_losses = rows[~(is_loss & (rows["picture"] > 0))]
    verdict = judge_sweep(summaries_by_dose(without_losses))
    assert verdict.score == Score.CHANGED_ANSWERS
    assert verdict.advice == Advice.GIVE_ANSWERS


def test_a_dose_that_helps_counts_more_than_doses_that_harm() -> None:
    changes = {0.3: Change.WORSE, 3.0: Change.BETTER}
    for as_it_is in (Estimate(0.5, 0.4, 0.6), Estimate(0.2, 0.1, 0.3)):  # guessing gets 0.2
        assert choose_advice(changes, as_it_is, guessing=0.2) == Advice.TRY_ANOTHER_NORM


@pytest.mark.parametrize(
    ("as_it_is", "advice"),
    [
        pytest.param(Estimate(1.0, 1.0, 1.0), Advice.ASK_HARDER, id="all right"),
        pytest.param(Estimate(0.9, 0.8, 1.0), Advice.LEAVE, id="nearly all right"),
        pytest.param(Estimate(0.3, 0.21, 0.4), Advice.LEAVE, id="above guessing"),
        pytest.param(Estimate(0.3, 0.2, 0.4), Advice.TRAIN_FIRST, id="perhaps guessing"),
    ],
)
def test_where_no_norm_can_be_better_the_advice_says_why(as_it_is: Estimate, advice: Advice) -> None:
    assert choose_advice({3.0: Change.WORSE}, as_it_is, guessing=0.2) == advice


def test_the_best_dose_is_one_that_is_clearly_better() -> None:
    """Dose 3 has the highest score and dose 0.1 the lowest, but their changes are not clear."""
    scores = {0.1: Estimate(0.1), 0.3: Estimate(0.6), 3.0: Estimate(0.9), 10.0: Estimate(0.7)}
    changes = {0.1: Change.UNCLEAR, 0.3: Change.BETTER, 3.0: Change.UNCLEAR, 10.0: Change.BETTER}
    assert find_best(scores, changes, Score.RIGHT_ANSWERS) == 10.0
    assert find_best(scores, changes, Score.LOSS) == 0.3


@pytest.mark.parametrize(
    ("difference", "change"),
    [
        pytest.param(Estimate(0.1, 0.0, 0.2), Change.UNCLEAR, id="from 0 up"),
        pytest.param(Estimate(0.1, 0.001, 0.2), Change.BETTER, id="above 0"),
        pytest.param(Estimate(-0.1, -0.2, 0.0), Change.UNCLEAR, id="up to 0"),
        pytest.param(Estimate(-0.1, -0.2, -0.001), Change.WORSE, id="below 0"),
        pytest.param(Estimate(0.0, -0.1, 0.1), Change.UNCLEAR, id="around 0"),
        pytest.param(Estimate(0.0, 0.0, 0.0), Change.NONE, id="all pictures agree"),
    ],
)
def test_a_change_is_clear_if_its_interval_lies_on_one_side_of_zero(difference: Estimate, change: Change) -> None:
    opposite = {Change.BETTER: Change.WORSE, Change.WORSE: Change.BETTER}
    assert judge_change(difference, smaller_is_better=False) == change
    # `UNCLEAR` and `NONE` have no opposite.
    assert judge_change(difference, smaller_is_better=True) == opposite.get(change, change)


def test_turning_differs_if_the_interval_of_the_gap_lies_on_one_side_of_zero() -> None:
    gaps = {
        "from 0 up": Estimate(0.1, 0.0, 0.2),
        "above 0": Estimate(0.1, 0.001, 0.2),
        "up to 0": Estimate(-0.1, -0.2, 0.0),
        "below 0": Estimate(-0.1, -0.2, -0.001),
    }
    groups = judge_turning(gaps)
    assert list(groups.items()) == [
        (Turning.SLOWER, ["above 0"]),
        (Turning.FASTER, ["below 0"]),
        (Turning.UNCLEAR, ["from 0 up", "up to 0"]),
    ]


@pytest.mark.parametrize("gap", [Estimate(0.1), None], ids=["no interval", "not measured"])
def test_turning_is_not_judged_without_an_interval(gap: Estimate | None) -> None:
    assert judge_turning({"first third": Estimate(0.1, 0.05, 0.2), "last third": gap}) == {}


def test_the_interval_of_a_share_is_cut_off_at_0_and_1() -> None:
    assert clip_share(Estimate(0.9, 0.7, 1.1)) == (0.9, 0.7, 1.0)
    assert clip_share(Estimate(0.1, -0.1, 0.3)) == (0.1, 0.0, 0.3)


def sweep_lines(changes: dict[float, np.ndarray], answers: str = "several") -> list[str]:
    """The report's lines on a sweep. The arguments are those of [`sweep_rows`]."""
    return tell_sweep(sweep_rows(changes, answers))


def test_right_answers_that_become_fewer_are_told() -> None:
    assert sweep_lines({0.3: -CLEAR, 3.0: ZERO}) == [
        "Right answers: 50% as it is (guessing: 25%); 20% at × 0.3, clearly worse; 50% at × 3, no change.",
        "What to do: leave the norm as it is. No norm tried (0.3 to 3 times) gives clearly more right answers.",
    ]


def test_two_doses_that_do_the_same_are_told_together() -> None:
    answers, _ = sweep_lines({0.3: UNCLEAR, 3.0: -UNCLEAR})
    assert answers == "Right answers: 50% as it is (guessing: 25%); 67% at × 0.3 and 33% at × 3, no clear change."


def test_a_dose_that_helps_is_told_with_a_warning() -> None:
    _, advice = sweep_lines({0.3: -CLEAR, 3.0: UNCLEAR, 10.0: CLEAR})
    assert advice == (
        "What to do: multiply weight and bias of the projector's last layer (of its norm, if it ends with one) by 10, "
        "and ask other questions: the model gives clearly more right answers there, 80%, and of 3 norms tried one can "
        "look better by chance."
    )


def test_where_nothing_is_clear_more_pictures_may_tell() -> None:
    _, advice = sweep_lines({0.3: UNCLEAR, 3.0: ZERO})
    assert advice == (
        "What to do: leave the norm as it is, or ask about more pictures. "
        "No norm tried (0.3 to 3 times) makes a clear difference."
    )


def test_without_a_choice_of_answers_the_loss_is_told() -> None:
    answers, advice = sweep_lines({0.3: -CLEAR, 3.0: CLEAR}, answers="one")
    assert answers == (
        "Loss of the right answer (no question has several answers to choose from): 2 as it is; 2.3 at × 0.3, "
        "clearly worse; 1.7 at × 3, clearly better."
    )
    assert "by 3, and ask other questions: the model has a clearly smaller loss there, 1.7, and of 2" in advice


def test_without_answers_the_share_of_changed_answers_is_told() -> None:
    assert sweep_lines({0.3: -CLEAR, 3.0: ZERO}, answers="no") == [
        "Answers that change: 67% at × 0.3 and 67% at × 3.",
        "What to do: give rows with answers; without them the sweep can't tell better from worse.",
    ]


def test_pictures_without_a_choice_of_answers_are_counted() -> None:
    """Picture 2 has no share of right answers, because there is no choice of answers to its question."""
    rows = sweep_rows({0.3: -CLEAR, 3.0: -CLEAR})
    is_share = rows["measure"].isin(["named", "named_change"])
    answers, _ = tell_sweep(rows[~(is_share & (rows["picture"] == 2))])
    assert answers.startswith("Of 2 pictures whose answers could be judged (3 were asked about), 50% right as it is (")
