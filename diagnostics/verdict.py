"""Judges one model's sweep: does another norm of its image tokens give better answers, and what may the reason be?

`sweep.jinja` prints the judgement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.scaling import DOSES, OWN_PICTURE, UNCHANGED_DOSE
from diagnostics.table import Estimate, Summary


# The report prints the changes at these two doses: about a third of the norm, and three times the norm.
SMALLER = 0.3
LARGER = 3.0
# At the smallest dose, tokens may be so small that the eps in layer 1's RMSNorm matters. RMSNorm then gives a token
# less than the usual norm.
SMALLEST = min(DOSES)
# The report speaks of the eps if less than this share of the usual norm is left.
KEPT_BY_EPS = 0.9


class Advice(StrEnum):
    """Whether to rescale the image tokens of this model."""

    MAY_HELP = "Rescaling this trained model may help"
    HARMS = "Don't rescale this trained model"
    UNCLEAR = "Rescaling this trained model makes no clear difference"


class Place(StrEnum):
    """How the norm of image tokens compares with the norms of what attention and the MLP of layer 1 add to them."""

    BELOW_ATTENTION = "The norm of these image tokens is below what attention adds"
    ABOVE_BOTH = "The norm of these image tokens is above what both add: layer 1 leaves them mostly as they came"
    BETWEEN = "The norm of these image tokens lies between the two: the first MLP overwrites most of what entered"
    NEAR_ONE = "The norm of these image tokens is about as large as one of the two"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one model's sweep, as `sweep.jinja` prints it.

    Attributes:
        advice: Whether to rescale; `None` if the data has no answers, because then no dose can be judged.
        better: Doses at which answers are clearly better.
        worse: Doses at which answers are clearly worse.
        num_tried: Number of doses other than 1.
        by_right_answers: Whether `better` and `worse` are judged by the share of right answers; if not, by the loss.
        num_pictures: Number of pictures that were asked about.
        num_named: Number of pictures whose question has several answers in the data, from which the model can choose.
        right: Share of right answers of the model as it is; `None` if no question has several answers.
        loss: Loss of the right answers of the model as it is; `None` if the data has no answers.
        right_changes: Changes of `right` at `SMALLER` and at `LARGER`; empty if `right` is `None`.
        loss_changes: Changes of `loss` at `SMALLER` and at `LARGER`; empty if `loss` is `None`.
        changed: Share of greedy answers that differ from those of the model as it is, at `SMALLER` and at `LARGER`.
        image_norm: Norm of the image tokens that enter the decoder, over the norm of text tokens.
        attention_norm: Norm of what layer 1's attention adds to image tokens, over the norm of text tokens; `None` if
            it can't be told apart from what the MLP adds.
        mlp_norm: Norm of what layer 1's MLP adds to image tokens, over the norm of text tokens; `None` if
            `attention_norm` is `None`.
        place: How `image_norm` compares with `attention_norm` and `mlp_norm`; `None` if these are `None`.
        kept_by_eps: Norm that layer 1's RMSNorm gives image tokens at `SMALLEST`, as a share of the usual norm; `None`
            if the share is at least `KEPT_BY_EPS`.
    """

    advice: Advice | None
    better: list[float]
    worse: list[float]
    num_tried: int
    by_right_answers: bool
    num_pictures: int
    num_named: int
    right: Estimate | None
    loss: Estimate | None
    right_changes: list[Estimate]
    loss_changes: list[Estimate]
    changed: list[Estimate]
    image_norm: Estimate
    attention_norm: Estimate | None
    mlp_norm: Estimate | None
    place: Place | None
    kept_by_eps: float | None


def judge_sweep(points: Mapping[tuple[float, str], Summary]) -> Verdict:
    """The verdict on a model.

    Args:
        points: The summaries of the model's sweep by dose and control.
    """
    # Only answers about a question's own picture are judged.
    by_dose = {dose: summary for (dose, control), summary in points.items() if control == OWN_PICTURE}
    as_it_is = by_dose[UNCHANGED_DOSE]

    # If the data has no answers, no dose is better or worse.
    better: list[float] = []
    worse: list[float] = []
    right_changes: list[Estimate] = []
    loss_changes: list[Estimate] = []

    loss = as_it_is.look("loss")
    if loss is not None:
        better = doses_below_zero(by_dose, "loss_change")
        worse = doses_above_zero(by_dose, "loss_change")
        loss_changes = estimates_to_print(by_dose, "loss_change")

    # If questions have several answers in the data, the share of right answers decides instead of the loss.
    right = as_it_is.look("named")
    if right is not None:
        right = clip_share(right)
        better = doses_above_zero(by_dose, "named_change")
        worse = doses_below_zero(by_dose, "named_change")
        right_changes = estimates_to_print(by_dose, "named_change")

    advice = None if loss is None else choose_advice(better, worse)

    image_norm = get_estimate(as_it_is, "length")  # sweep.csv calls the norm of image tokens `length`
    attention_norm = as_it_is.look("attention_update")
    mlp_norm = as_it_is.look("mlp_update")
    return Verdict(
        advice=advice,
        better=better,
        worse=worse,
        num_tried=len(doses_tried(by_dose)),
        by_right_answers=right is not None,
        num_pictures=count_pictures(as_it_is, "kl"),  # every picture has a value of `kl`
        num_named=count_pictures(as_it_is, "named"),
        right=right,
        loss=loss,
        right_changes=right_changes,
        loss_changes=loss_changes,
        changed=[clip_share(changed) for changed in estimates_to_print(by_dose, "changed")],
        image_norm=image_norm,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        place=place_norm(image_norm, attention_norm, mlp_norm),
        kept_by_eps=share_kept_by_eps(image_norm.mean, get_estimate(as_it_is, "eps").mean),
    )


def choose_advice(better: list[float], worse: list[float]) -> Advice:
    """The advice, from the doses that are clearly better and clearly worse.

    A dose that is clearly better is worth a try even if others are worse.
    """
    if better:
        return Advice.MAY_HELP
    if worse:
        return Advice.HARMS
    return Advice.UNCLEAR


def doses_above_zero(by_dose: Mapping[float, Summary], measure: str) -> list[float]:
    """Doses at which a measure of change is clearly above 0, which means that its whole interval is above 0."""
    return [dose for dose in doses_tried(by_dose) if get_estimate(by_dose[dose], measure).low > 0]


def doses_below_zero(by_dose: Mapping[float, Summary], measure: str) -> list[float]:
    """Doses at which a measure of change is clearly below 0, which means that its whole interval is below 0."""
    return [dose for dose in doses_tried(by_dose) if get_estimate(by_dose[dose], measure).high < 0]


def doses_tried(by_dose: Mapping[float, Summary]) -> list[float]:
    """All doses except 1, which leaves the model as it is, in increasing order."""
    return sorted(dose for dose in by_dose if dose != UNCHANGED_DOSE)


def estimates_to_print(by_dose: Mapping[float, Summary], measure: str) -> list[Estimate]:
    """The estimates of a measure at `SMALLER` and at `LARGER`, the two doses that the report prints."""
    return [get_estimate(by_dose[SMALLER], measure), get_estimate(by_dose[LARGER], measure)]


def get_estimate(summary: Summary, measure: str) -> Estimate:
    """The estimate of a measure that every sweep has."""
    estimate = summary.look(measure)
    assert estimate is not None, measure  # shows the measure's name if it fails
    return estimate


def count_pictures(summary: Summary, measure: str) -> int:
    """Number of pictures that have a value of a measure."""
    counts = summary.frame.loc[summary.frame["measure"] == measure, "n"]
    return 0 if counts.empty else int(counts.max())


def clip_share(estimate: Estimate) -> Estimate:
    """The estimate of a share, with its interval cut off at 0 and at 1."""
    return Estimate(estimate.mean, low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


def place_norm(image: Estimate, attention: Estimate | None, mlp: Estimate | None) -> Place | None:
    """How the norm of image tokens compares with the norms of what attention and the MLP add to them.

    Two norms count as different if their intervals don't overlap.

    Args:
        image: Norm of image tokens.
        attention: Norm of what attention adds; `None` if it is not known.
        mlp: Norm of what the MLP adds; `None` if it is not known.

    Returns:
        The place; `None` if one of the norms is not known.
    """
    if attention is None or mlp is None:
        return None

    if image.high < attention.low:
        return Place.BELOW_ATTENTION
    if image.low > attention.high and image.low > mlp.high:
        return Place.ABOVE_BOTH
    if image.low > attention.high and image.high < mlp.low:
        return Place.BETWEEN
    return Place.NEAR_ONE


def share_kept_by_eps(image_norm: float, eps_norm: float) -> float | None:
    """The norm that layer 1's RMSNorm gives a token at the smallest dose, as a share of the usual norm.

    RMSNorm divides a token by √(mean square + eps). So a token of norm n comes out with n / √(n² + e²) of the usual
    norm, where e is the norm of a token whose mean square is eps.

    Args:
        image_norm: Norm of the token as it is, before it is multiplied by the dose.
        eps_norm: The norm e.

    Returns:
        The share; `None` if it is at least `KEPT_BY_EPS`.
    """
    norm_at_smallest = SMALLEST * image_norm
    kept = norm_at_smallest / (norm_at_smallest**2 + eps_norm**2) ** 0.5
    return kept if kept < KEPT_BY_EPS else None
