"""What a sweep says of one model: does another norm of its image tokens give better answers, and why might it?

Judged here, printed by `sweep.jinja`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.scaling import AS_IT_IS, DOSES, OWN
from diagnostics.table import Estimate, Summary


# The doses whose changes are told, a third and three times the norm.
SMALLER, LARGER = 0.3, 3.0
# At this dose the eps of layer 1's norm may matter; it is told where less than this share of a token's norm is left.
SMALLEST = min(DOSES)
KEPT_BY_EPS = 0.9


class Advice(StrEnum):
    """Whether to rescale the image tokens of this model."""

    MAY_HELP = "Rescaling this trained model may help"
    HARMS = "Don't rescale this trained model"
    UNCLEAR = "Rescaling this trained model makes no clear difference"


class Place(StrEnum):
    """Where the norm of image tokens lies beside what layer 1's attention and its MLP add to them."""

    BELOW_ATTENTION = "Theirs is below what attention adds"
    ABOVE_BOTH = "Theirs is above what both add: layer 1 leaves them mostly as they came"
    BETWEEN = "Theirs lies between the two: the first MLP overwrites most of what entered"
    NEAR_ONE = "Theirs is about one of the two"


@dataclass(frozen=True)
class Verdict:
    """What `sweep.jinja` prints.

    Attributes:
        advice: `None` without answers, which alone can be better or worse.
        better: Doses at which answers are clearly better.
        worse: Doses at which they are clearly worse.
        num_tried: Doses tried beside the model as it is.
        by_right_answers: Whether better and worse are judged by the share of right answers, not by their loss.
        num_pictures: Pictures that were asked about.
        num_named: Those whose question has several answers, so that one can be right.
        right: Share of right answers of the model as it is; `None` if no question has several.
        loss: Of the right answers; `None` without answers.
        right_changes, loss_changes: From there, at `SMALLER` and at `LARGER`; empty without answers.
        changed: Share of greedy answers that are others, at `SMALLER` and at `LARGER`.
        image_norm: Norm of the image tokens that enter the decoder, over the text's.
        attention_norm, mlp_norm: Of what layer 1's attention and its MLP add to them; `None` if not told apart.
        place: Where the first lies beside the other two; `None` if these aren't told apart.
        kept_by_eps: Share of its usual norm that layer 1's attention is given at `SMALLEST`; `None` if nearly all.
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
    """Judge a model by its summaries by dose and control."""
    own = {dose: summary for (dose, control), summary in points.items() if control == OWN}
    as_it_is = own[AS_IT_IS]
    right = as_it_is.look("named")
    loss = as_it_is.look("loss")
    image_norm = get_estimate(as_it_is, "length")  # sweep.csv's name for this norm
    attention_norm = as_it_is.look("attention_update")
    mlp_norm = as_it_is.look("mlp_update")

    better: list[float] = []
    worse: list[float] = []
    if right is not None:
        better = doses_above_zero(own, "named_change")
        worse = doses_below_zero(own, "named_change")
    elif loss is not None:
        better = doses_below_zero(own, "loss_change")
        worse = doses_above_zero(own, "loss_change")

    return Verdict(
        advice=None if loss is None else choose_advice(better, worse),
        better=better,
        worse=worse,
        num_tried=len(own) - 1,
        by_right_answers=right is not None,
        num_pictures=count_pictures(as_it_is, "kl"),
        num_named=count_pictures(as_it_is, "named"),
        right=None if right is None else as_share(right),
        loss=loss,
        right_changes=[] if right is None else changes_told(own, "named_change"),
        loss_changes=[] if loss is None else changes_told(own, "loss_change"),
        changed=[as_share(change) for change in changes_told(own, "changed")],
        image_norm=image_norm,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        place=place_norm(image_norm, attention_norm, mlp_norm),
        kept_by_eps=kept_by_eps(image_norm.mean, get_estimate(as_it_is, "eps").mean),
    )


def choose_advice(better: list[float], worse: list[float]) -> Advice:
    """One dose that is clearly better is worth a try, whatever the others do."""
    if better:
        return Advice.MAY_HELP
    if worse:
        return Advice.HARMS
    return Advice.UNCLEAR


def doses_above_zero(own: Mapping[float, Summary], measure: str) -> list[float]:
    """Doses at which a change is clearly above 0: its whole interval is."""
    return [dose for dose in doses_tried(own) if get_estimate(own[dose], measure).low > 0]


def doses_below_zero(own: Mapping[float, Summary], measure: str) -> list[float]:
    """Doses at which a change is clearly below 0: its whole interval is."""
    return [dose for dose in doses_tried(own) if get_estimate(own[dose], measure).high < 0]


def doses_tried(own: Mapping[float, Summary]) -> list[float]:
    """All doses but the model as it is, in order."""
    return sorted(dose for dose in own if dose != AS_IT_IS)


def changes_told(own: Mapping[float, Summary], measure: str) -> list[Estimate]:
    """A measure at the two doses that are told."""
    return [get_estimate(own[SMALLER], measure), get_estimate(own[LARGER], measure)]


def get_estimate(summary: Summary, measure: str) -> Estimate:
    """A number that every sweep has."""
    estimate = summary.look(measure)
    assert estimate is not None, measure
    return estimate


def count_pictures(summary: Summary, measure: str) -> int:
    """Pictures that have a value of a measure."""
    counts = summary.frame.loc[summary.frame["measure"] == measure, "n"]
    return 0 if counts.empty else int(counts.max())


def as_share(estimate: Estimate) -> Estimate:
    """A share whose interval ends at 0 and at 1."""
    return Estimate(estimate.mean, low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


def place_norm(image: Estimate, attention: Estimate | None, mlp: Estimate | None) -> Place | None:
    """Where the norm of image tokens lies; two numbers differ where their intervals don't overlap."""
    if attention is None or mlp is None:
        return None

    if image.high < attention.low:
        return Place.BELOW_ATTENTION
    if image.low > attention.high and image.low > mlp.high:
        return Place.ABOVE_BOTH
    if image.low > attention.high and image.high < mlp.low:
        return Place.BETWEEN
    return Place.NEAR_ONE


def kept_by_eps(image_norm: float, eps_norm: float) -> float | None:
    """Share of its usual norm that layer 1's RMSNorm gives a token at the smallest dose; `None` if nearly all of it.

    RMSNorm divides by √(mean square + eps): a token of norm n comes out with n / √(n² + e²) of its usual norm, where e
    is the norm of a token whose mean square is eps.
    """
    norm = SMALLEST * image_norm
    kept = norm / (norm**2 + eps_norm**2) ** 0.5
    return kept if kept < KEPT_BY_EPS else None
