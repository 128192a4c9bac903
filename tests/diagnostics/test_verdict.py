"""The judgement of a sweep, at the borders of each rule, and the sentences that tell it."""

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from diagnostics.report import tell_sweep
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


# Changes of three pictures: the interval of the first is above 0, the interval of the second holds 0.
CLEAR = np.array([0.2, 0.3, 0.4])
UNCLEAR = np.array([-0.2, 0.3, 0.4])
ZERO = np.zeros(3)


def sweep_rows(changes: dict[float, np.ndarray], answers: str = "several", mlp_is_told: bool = True) -> pd.DataFrame:
    """Rows of a sweep of three pictures with these changes at each dose.

    Args:
        changes: Changes of the share of right answers by dose. Their loss changes by the same number with the other
            sign.
        answers: "several" if the data has several answers to the question, "one", or "no".
        mlp_is_told: Whether what layer 1's attention adds is told apart from what its MLP adds.
    """
    rows = []
    for dose, change in {1.0: ZERO, **changes}.items():
        numbers = {"kl": np.ones(3), "changed": np.array([0.0, 1.0, 1.0])}
        if answers != "no":
            numbers |= {"loss": 2 - change, "loss_change": -change}
        if answers == "several":
            numbers |= {"named": 0.5 + change, "named_change": change}
        if dose == 1:
            numbers |= {"length": np.ones(3), "eps": np.zeros(3)}
        if dose == 1 and mlp_is_told:
            numbers |= {"attention_update": 2 * np.ones(3), "mlp_update": 3 * np.ones(3)}
        for measure, values in numbers.items():
            rows.append(make_rows(measure, values).assign(dose=dose, control=""))
    return pd.concat(rows)


def summaries(changes: Sequence[Sequence[float]]) -> dict[float, Summary]:
    """Summaries with one measure, "x", by dose: the first dose is 1, the second 2, and so on.

    Args:
        changes: For each dose, the values of the pictures.
    """
    return {float(dose): Summary.of(make_rows("x", values)) for dose, values in enumerate(changes, 1)}


@pytest.mark.parametrize(
    ("changes", "answers", "advice", "better", "worse"),
    [
        ({0.3: -CLEAR, 3.0: -CLEAR}, "several", Advice.HARMS, [], [0.3, 3.0]),
        ({0.3: -UNCLEAR, 3.0: -CLEAR}, "several", Advice.HARMS, [], [3.0]),
        ({0.3: -CLEAR, 3.0: CLEAR}, "several", Advice.MAY_HELP, [3.0], [0.3]),
        ({0.3: UNCLEAR, 3.0: ZERO}, "several", Advice.UNCLEAR, [], []),
        # By the loss, which falls where right answers rise.
        ({0.3: -CLEAR, 3.0: UNCLEAR}, "one", Advice.HARMS, [], [0.3]),
        ({0.3: -CLEAR, 3.0: CLEAR}, "one", Advice.MAY_HELP, [3.0], [0.3]),
        # Without answers nothing is better or worse.
        ({0.3: -CLEAR, 3.0: CLEAR}, "no", None, [], []),
    ],
)
def test_advice_follows_what_is_clear(
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
    assert verdict.num_tried == len(changes)


def test_a_dose_that_helps_counts_more_than_those_that_harm() -> None:
    assert choose_advice(better=[3.0], worse=[0.03, 0.1, 0.3]) == Advice.MAY_HELP
    assert choose_advice(better=[], worse=[0.03]) == Advice.HARMS
    assert choose_advice(better=[], worse=[]) == Advice.UNCLEAR


def test_an_interval_that_ends_at_zero_is_not_clear() -> None:
    """Two equal values have an interval without width. Dose 1 is the model as it is and is never better or worse."""
    by_dose = summaries([[5, 5], [0, 0], [1, 1], [-1, -1]])
    assert doses_above_zero(by_dose, "x") == [3.0]
    assert doses_below_zero(by_dose, "x") == [4.0]


@pytest.mark.parametrize(
    ("image", "attention", "mlp", "place"),
    [
        ((1.0, 2.0), (2.1, 3.0), (9.0, 9.5), Place.BELOW_ATTENTION),
        ((1.0, 2.0), (2.0, 3.0), (9.0, 9.5), Place.NEAR_ONE),
        ((3.1, 8.0), (2.0, 3.0), (8.1, 9.0), Place.BETWEEN),
        ((3.1, 8.1), (2.0, 3.0), (8.1, 9.0), Place.NEAR_ONE),
        ((3.0, 8.0), (2.0, 3.0), (8.1, 9.0), Place.NEAR_ONE),
        ((9.1, 9.2), (2.0, 3.0), (8.1, 9.0), Place.ABOVE_BOTH),
        ((9.0, 9.2), (2.0, 3.0), (8.1, 9.0), Place.NEAR_ONE),
        ((9.1, 9.2), (9.0, 9.1), (8.1, 9.0), Place.NEAR_ONE),
    ],
)
def test_norms_differ_where_their_intervals_do_not_meet(
    image: tuple[float, float], attention: tuple[float, float], mlp: tuple[float, float], place: Place
) -> None:
    def estimate(low: float, high: float) -> Estimate:
        return Estimate((low + high) / 2, low, high)

    assert place_norm(estimate(*image), estimate(*attention), estimate(*mlp)) == place


def test_a_norm_has_no_place_if_the_updates_are_not_told_apart() -> None:
    assert place_norm(Estimate(1.5, 1.0, 2.0), None, None) is None


def test_eps_is_told_where_it_takes_a_tenth() -> None:
    """The expected share is computed with RMSNorm itself."""
    token = np.array([3.0, 4.0])

    def rms_norm(token: np.ndarray, eps: float) -> float:
        return float(np.linalg.norm(token / np.sqrt(np.mean(token**2) + eps)))

    for eps, is_told in ((0.002, False), (0.003, True)):
        kept = rms_norm(SMALLEST * token, eps) / rms_norm(SMALLEST * token, 0)
        assert (kept < KEPT_BY_EPS) == is_told
        told = share_kept_by_eps(image_norm=5.0, eps_norm=(len(token) * eps) ** 0.5)
        if is_told:
            assert told == pytest.approx(kept)
        else:
            assert told is None


def test_a_share_ends_at_none_and_at_all() -> None:
    assert clip_share(Estimate(0.9, 0.7, 1.1)) == (0.9, 0.7, 1.0)
    assert clip_share(Estimate(0.1, -0.1, 0.3)) == (0.1, 0.0, 0.3)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({0.3: -CLEAR, 3.0: ZERO}, {}, r"^Don't rescale this trained model: the share of right answers, 0\.5 .* as it "
         r"is on 3 pictures, changes with image tokens × 0\.3 by −0\.30 \(.*\) and × 3 by nothing \(all pictures agree"
         r"\); the right answer's loss, .*In right answers, clearly worse: × 0\.3; clearly better: none\.\n"),
        ({0.3: CLEAR, 3.0: CLEAR}, {}, r"may help: .*none; clearly better: × 0\.3, × 3\.\n(.*\n)*It may see more at "
         r"× 0\.3, × 3: of 2 norms tried, one can look better by chance\."),
        ({0.3: -CLEAR, 3.0: ZERO}, {"answers": "one"}, r"model: the right answer's loss, .* In loss, clearly worse: "),
        ({0.3: -CLEAR, 3.0: ZERO}, {"answers": "no"}, r"^Rows without answers tell only what changes: .* changes a "
         r"share of 0\.7 \(0\.0 to 1\.0\) at × 0\.3 and 0\.7"),
        ({0.3: ZERO, 3.0: ZERO}, {}, r"attention adds 2 \(± 0\) and its MLP 3 \(± 0\): .*\. Theirs is below what "),
        ({0.3: ZERO, 3.0: ZERO}, {"mlp_is_told": False}, r"attention and MLP add was not told apart"),
        ({0.3: ZERO, 3.0: ZERO}, {}, r"\nNo other norm is clearly better on these pictures\. A trained model is"),
    ],
)  # fmt: skip
def test_what_is_said(changes: dict[float, np.ndarray], options: dict, said: str) -> None:
    text = "\n".join(tell_sweep(sweep_rows(changes, **options)))
    assert re.search(said, text)
    assert not re.search(r"\bnan\b|\bNone\b", text)
