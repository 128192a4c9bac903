"""The verdict on a sweep, at the borders of each rule, and the sentences that tell it.

A sweep asks questions about pictures while image tokens are multiplied by factors, the doses. At dose 1 the model is
unchanged.
"""

import re

import numpy as np
import pandas as pd
import pytest

from diagnostics.report import tell_sweep
from diagnostics.scaling import OWN_PICTURE
from diagnostics.table import Estimate, Summary, make_rows, summaries_by_dose
from diagnostics.verdict import (
    KEPT_BY_EPS,
    SMALLEST,
    Advice,
    Place,
    choose_advice,
    clip_share,
    doses_above_zero,
    doses_below_zero,
    judge_sweep,
    place_norm,
    share_kept_by_eps,
)


# Changes of three pictures.
CLEAR = np.array([0.2, 0.3, 0.4])  # the interval is above 0
UNCLEAR = np.array([-0.2, 0.3, 0.4])  # the interval contains 0
ZERO = np.zeros(3)


def sweep_rows(
    changes: dict[float, np.ndarray], answers: str = "several", updates_are_known: bool = True
) -> pd.DataFrame:
    """Rows of a sweep of three pictures.

    Args:
        changes: For each dose but 1, the change of the share of right answers of each picture. The loss of the right
            answer changes by the same number with the opposite sign.
        answers: "several" if the model can choose from the different answers of several rows, "one" if all rows have
            the same answer, so that only its loss is measured, and "no" if rows have no answers.
        updates_are_known: Whether what layer 1's attention adds is told apart from what its MLP adds.
    """
    rows = []
    for dose, change in {1.0: ZERO, **changes}.items():
        values_by_measure = {"kl": np.ones(3), "changed": np.array([0.0, 1.0, 1.0])}
        if answers != "no":
            values_by_measure |= {"loss": 2 - change, "loss_change": -change}
        if answers == "several":  # `named` is the share of right answers
            values_by_measure |= {"named": 0.5 + change, "named_change": change}
        if dose == 1:  # `length` is the norm of image tokens over the norm of text tokens
            values_by_measure |= {"length": np.ones(3), "eps": np.zeros(3)}
        if dose == 1 and updates_are_known:
            values_by_measure |= {"attention_update": 2 * np.ones(3), "mlp_update": 3 * np.ones(3)}
        for measure, values in values_by_measure.items():
            rows.append(make_rows(measure, values).assign(dose=dose, control=OWN_PICTURE))
    return pd.concat(rows)


@pytest.mark.parametrize(
    ("changes", "advice", "better", "worse"),
    [
        pytest.param({0.3: -CLEAR, 3.0: -CLEAR}, Advice.HARMS, [], [0.3, 3.0], id="both worse"),
        pytest.param({0.3: -UNCLEAR, 3.0: -CLEAR}, Advice.HARMS, [], [3.0], id="one worse"),
        pytest.param({0.3: -CLEAR, 3.0: CLEAR}, Advice.MAY_HELP, [3.0], [0.3], id="one worse, one better"),
        pytest.param({0.3: UNCLEAR, 3.0: ZERO}, Advice.UNCLEAR, [], [], id="nothing clear"),
    ],
)
def test_advice_follows_clear_changes_of_right_answers(
    changes: dict[float, np.ndarray], advice: Advice, better: list[float], worse: list[float]
) -> None:
    verdict = judge_sweep(summaries_by_dose(sweep_rows(changes)))
    assert verdict.advice == advice
    assert verdict.better == better
    assert verdict.worse == worse
    assert verdict.num_tried == 2


@pytest.mark.parametrize(
    ("changes", "answers", "advice", "better", "worse"),
    [
        # `sweep_rows` lets the loss rise where right answers fall.
        pytest.param({0.3: -CLEAR, 3.0: UNCLEAR}, "one", Advice.HARMS, [], [0.3], id="loss, one worse"),
        pytest.param({0.3: -CLEAR, 3.0: CLEAR}, "one", Advice.MAY_HELP, [3.0], [0.3], id="loss, worse and better"),
        pytest.param({0.3: -CLEAR, 3.0: CLEAR}, "no", None, [], [], id="no answers"),
    ],
)
def test_advice_follows_the_loss_if_there_is_one_answer_and_is_missing_without_answers(
    changes: dict[float, np.ndarray],
    answers: str,
    advice: Advice | None,
    better: list[float],
    worse: list[float],
) -> None:
    verdict = judge_sweep(summaries_by_dose(sweep_rows(changes, answers)))
    assert verdict.advice == advice
    assert verdict.better == better
    assert verdict.worse == worse


def test_a_dose_that_helps_counts_more_than_doses_that_harm() -> None:
    assert choose_advice(better=[3.0], worse=[0.03, 0.1, 0.3]) == Advice.MAY_HELP
    assert choose_advice(better=[], worse=[0.03]) == Advice.HARMS
    assert choose_advice(better=[], worse=[]) == Advice.UNCLEAR


def test_an_interval_that_ends_at_zero_is_not_clear() -> None:
    """Both pictures have the same value, so the interval is only that value. Dose 1 is always left out."""
    value_by_dose = {1.0: 5, 2.0: 0, 3.0: 1, 4.0: -1}
    by_dose = {dose: Summary.of(make_rows("x", [value, value])) for dose, value in value_by_dose.items()}
    assert doses_above_zero(by_dose, "x") == [3.0]
    assert doses_below_zero(by_dose, "x") == [4.0]


@pytest.mark.parametrize(
    ("image", "attention", "mlp", "place"),
    [
        pytest.param((1.0, 2.0), (2.1, 3.0), (9.0, 9.5), Place.BELOW_ATTENTION, id="below attention"),
        pytest.param((1.0, 2.0), (2.0, 3.0), (9.0, 9.5), Place.NEAR_ONE, id="meets attention from below"),
        pytest.param((3.0, 8.0), (2.0, 3.0), (8.1, 9.0), Place.NEAR_ONE, id="meets attention from above"),
        pytest.param((3.1, 8.0), (2.0, 3.0), (8.1, 9.0), Place.BETWEEN, id="between"),
        pytest.param((3.1, 8.1), (2.0, 3.0), (8.1, 9.0), Place.NEAR_ONE, id="meets the MLP from below"),
        pytest.param((9.0, 9.2), (2.0, 3.0), (8.1, 9.0), Place.NEAR_ONE, id="meets the MLP from above"),
        pytest.param((9.1, 9.2), (2.0, 3.0), (8.1, 9.0), Place.ABOVE_BOTH, id="above both"),
        pytest.param((9.1, 9.2), (9.0, 9.1), (8.1, 9.0), Place.NEAR_ONE, id="above the MLP, meets attention"),
    ],
)
def test_norms_differ_where_their_intervals_do_not_meet(
    image: tuple[float, float], attention: tuple[float, float], mlp: tuple[float, float], place: Place
) -> None:
    """Each norm is given by the ends of its interval, `low` and `high`."""

    def make_estimate(low: float, high: float) -> Estimate:
        return Estimate((low + high) / 2, low, high)

    assert place_norm(make_estimate(*image), make_estimate(*attention), make_estimate(*mlp)) == place


def test_a_norm_has_no_place_if_the_updates_are_not_known() -> None:
    assert place_norm(Estimate(1.5, 1.0, 2.0), None, None) is None


# At the smallest dose, image tokens may be so small that the eps of RMSNorm makes its output smaller.
TOKEN = np.array([3.0, 4.0])  # its norm is 5


def expected_share(eps: float) -> float:
    """The norm that RMSNorm gives `TOKEN` at the smallest dose, over the norm that it would give without eps."""
    token = SMALLEST * TOKEN
    mean_square = np.mean(token**2)
    with_eps = np.linalg.norm(token / np.sqrt(mean_square + eps))
    without_eps = np.linalg.norm(token / np.sqrt(mean_square))
    return float(with_eps / without_eps)


def norm_at_mean_square(eps: float) -> float:
    """The norm that `TOKEN` would have if its mean square were `eps`."""
    return (len(TOKEN) * eps) ** 0.5


def test_the_share_that_eps_leaves_is_that_of_rms_norm() -> None:
    expected = expected_share(eps=0.003)
    assert expected < KEPT_BY_EPS
    assert share_kept_by_eps(image_norm=5.0, eps_norm=norm_at_mean_square(0.003)) == pytest.approx(expected)


def test_an_eps_that_hardly_matters_is_not_told() -> None:
    assert expected_share(eps=0.002) >= KEPT_BY_EPS
    assert share_kept_by_eps(image_norm=5.0, eps_norm=norm_at_mean_square(0.002)) is None


def test_the_interval_of_a_share_is_cut_off_at_0_and_1() -> None:
    assert clip_share(Estimate(0.9, 0.7, 1.1)) == (0.9, 0.7, 1.0)
    assert clip_share(Estimate(0.1, -0.1, 0.3)) == (0.1, 0.0, 0.3)


def sweep_text(changes: dict[float, np.ndarray], answers: str = "several", updates_are_known: bool = True) -> str:
    """The sentences on a sweep, each in a line of its own. The arguments are those of [`sweep_rows`]."""
    text = "\n".join(tell_sweep(sweep_rows(changes, answers, updates_are_known)))
    assert not re.search(r"\bnan\b|\bNone\b", text)
    return text


def test_right_answers_that_become_fewer_are_told() -> None:
    text = sweep_text({0.3: -CLEAR, 3.0: ZERO})
    assert text.startswith("Don't rescale this trained model: the share of right answers, 0.5 ")
    assert re.search(r"as it is on 3 pictures, changes with image tokens × 0\.3 by −0\.30 \(", text)
    assert " and × 3 by nothing (all pictures agree); the right answer's loss, " in text
    assert "In right answers, clearly worse: × 0.3; clearly better: none.\n" in text


def test_doses_that_help_are_told_with_a_warning() -> None:
    text = sweep_text({0.3: CLEAR, 3.0: CLEAR})
    assert text.startswith("Rescaling this trained model may help: ")
    assert "clearly worse: none; clearly better: × 0.3, × 3.\n" in text
    assert "\nThe model may see more at × 0.3, × 3: of 2 norms tried, one can look better by chance." in text


def test_without_a_choice_of_answers_the_loss_is_told() -> None:
    text = sweep_text({0.3: -CLEAR, 3.0: ZERO}, answers="one")
    assert "model: the right answer's loss, " in text
    assert " In loss, clearly worse: " in text


def test_without_answers_the_share_of_changed_answers_is_told() -> None:
    text = sweep_text({0.3: -CLEAR, 3.0: ZERO}, answers="no")
    assert text.startswith("Rows without answers tell only what changes: ")
    assert "changes a share of 0.7 (0.0 to 1.0) at × 0.3 and 0.7" in text


def test_the_norms_in_layer_1_are_told() -> None:
    text = sweep_text({0.3: ZERO, 3.0: ZERO})
    assert "layer 1's attention adds 2 (± 0) and its MLP 3 (± 0): " in text
    assert ". The norm of these image tokens is below what attention adds.\n" in text


def test_it_is_said_if_the_norms_in_layer_1_are_not_known() -> None:
    text = sweep_text({0.3: ZERO, 3.0: ZERO}, updates_are_known=False)
    assert "attention and MLP add was not told apart" in text


def test_that_no_dose_helps_is_told() -> None:
    text = sweep_text({0.3: ZERO, 3.0: ZERO})
    assert "\nNo other norm is clearly better on these pictures. A trained model is" in text
