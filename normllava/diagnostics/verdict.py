"""Judges a report's numbers: what is clear, and what the owner of the model can do.

A difference is clear if its whole 95% interval lies on one side of 0. The templates print these judgements.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from normllava.diagnostics.scaling import UNCHANGED_DOSE
from normllava.diagnostics.table import Estimate, Summary


# A sweep multiplies the norm of image tokens by several doses. The box at the top of the report shows the answers at
# these two doses: about a third of the norm, and three times the norm.
SMALLER = 0.3
LARGER = 3.0


class Turning(StrEnum):
    """How fast layers turn image tokens, compared with text tokens."""

    SLOWER = "more slowly"
    FASTER = "faster"
    UNCLEAR = "no clear difference"


class Score(StrEnum):
    """What the answers of a sweep are judged by. The values are the measures' names in `sweep.csv`."""

    RIGHT_ANSWERS = "named"
    LOSS = "loss"
    CHANGED_ANSWERS = "changed"  # a change may be for better or worse, so nothing is judged


class Change(StrEnum):
    """What another norm of the image tokens does to the score."""

    BETTER = "clearly better"
    WORSE = "clearly worse"
    UNCLEAR = "no clear change"
    NONE = "no change"  # each picture's score stays the same


class Advice(StrEnum):
    """What to do with this model. `sweep.jinja` says it in a sentence."""

    TRY_ANOTHER_NORM = "try another norm"
    LEAVE = "leave"
    LEAVE_OR_ASK_MORE = "leave, or ask more"
    ASK_HARDER = "ask harder"
    TRAIN_FIRST = "train first"
    GIVE_ANSWERS = "give answers"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one model's sweep.

    Attributes:
        advice: What to do.
        score: What the answers are judged by.
        scores: The score at each dose, dose 1 too, in ascending order of the doses.
        guessing: Share of right answers that the commonest answer to each question gives; `None` if the score isn't
            right answers.
        changes: What each dose does to the score, without dose 1; empty if the score can't be judged.
        best: The clearly better dose with the best score; `None` if no dose is clearly better.
        num_pictures: Number of pictures that were asked about.
        num_scored: Number of pictures that have a score. If the score is right answers, these are the pictures whose
            question has several answers in the data, from which the model can choose.
        image_norm: Norm of the image tokens that enter the decoder, over the norm of text tokens.
    """

    advice: Advice
    score: Score
    scores: dict[float, Estimate]
    guessing: float | None
    changes: dict[float, Change]
    best: float | None
    num_pictures: int
    num_scored: int
    image_norm: Estimate


def judge_sweep(summary_by_dose: Mapping[float, Summary]) -> Verdict:
    """The verdict on a model, from the summaries of its sweep by dose in ascending order."""
    summary_as_it_is = summary_by_dose[UNCHANGED_DOSE]

    score = choose_score(summary_by_dose)
    scores = estimate_scores(summary_by_dose, score)
    guessing = None
    if score is Score.RIGHT_ANSWERS:
        guessing = get_estimate(summary_as_it_is, "guessing").mean
    changes = judge_changes(summary_by_dose, score)

    return Verdict(
        advice=choose_advice(changes, scores[UNCHANGED_DOSE], guessing),
        score=score,
        scores=scores,
        guessing=guessing,
        changes=changes,
        best=find_best(scores, changes, score),
        num_pictures=count_pictures(summary_as_it_is, "length"),  # every picture has a length
        num_scored=count_pictures(summary_as_it_is, score),
        image_norm=get_estimate(summary_as_it_is, "length"),  # sweep.csv calls the norm of image tokens `length`
    )


def choose_score(summary_by_dose: Mapping[float, Summary]) -> Score:
    """What answers are judged by: right answers if the model had a choice, else the right answer's loss.

    Either needs an interval, and so at least two pictures. Otherwise only the share of changed answers is shown.
    """
    for score in (Score.RIGHT_ANSWERS, Score.LOSS):
        estimate = summary_by_dose[UNCHANGED_DOSE].look(score)
        if estimate is not None and math.isfinite(estimate.low):  # there is an interval
            return score
    return Score.CHANGED_ANSWERS


def estimate_scores(summary_by_dose: Mapping[float, Summary], score: Score) -> dict[float, Estimate]:
    """The score at each dose."""
    scores = {}
    for dose, summary in summary_by_dose.items():
        estimate = get_estimate(summary, score)
        if score is not Score.LOSS:  # the other scores are shares
            estimate = clip_share(estimate)
        scores[dose] = estimate
    return scores


def judge_changes(summary_by_dose: Mapping[float, Summary], score: Score) -> dict[float, Change]:
    """What each dose does to the score, without dose 1, which leaves the model as it is."""
    if score is Score.CHANGED_ANSWERS:
        return {}

    changes = {}
    for dose, summary in summary_by_dose.items():
        if dose != UNCHANGED_DOSE:
            difference = get_estimate(summary, f"{score}_change")
            changes[dose] = judge_change(difference, smaller_is_better=score is Score.LOSS)
    return changes


def judge_change(difference: Estimate, smaller_is_better: bool) -> Change:
    """The judgement of a difference from the model as it is."""
    if difference.low == 0 and difference.high == 0:
        return Change.NONE
    if difference.low > 0:
        return Change.WORSE if smaller_is_better else Change.BETTER
    if difference.high < 0:
        return Change.BETTER if smaller_is_better else Change.WORSE
    return Change.UNCLEAR


def choose_advice(changes: Mapping[float, Change], as_it_is: Estimate, guessing: float | None) -> Advice:
    """What to do.

    A dose that is clearly better is worth a try even if others are worse. If no dose is clearly better or worse, more
    pictures may show a difference. But nothing shows in a model that answers everything right, or that guesses.

    Args:
        changes: What each dose does to the score, without dose 1.
        as_it_is: The score at dose 1.
        guessing: Share of right answers that the commonest answer to each question gives; `None` if the score isn't
            right answers.
    """
    if not changes:  # nothing can be judged, because the data has too few answers
        return Advice.GIVE_ANSWERS
    if Change.BETTER in changes.values():
        return Advice.TRY_ANOTHER_NORM
    if guessing is not None and as_it_is.mean == 1:
        return Advice.ASK_HARDER
    if guessing is not None and as_it_is.low <= guessing:
        return Advice.TRAIN_FIRST
    if Change.WORSE in changes.values():
        return Advice.LEAVE
    return Advice.LEAVE_OR_ASK_MORE


def find_best(scores: Mapping[float, Estimate], changes: Mapping[float, Change], score: Score) -> float | None:
    """The clearly better dose with the best score; `None` if no dose is clearly better."""
    better = [dose for dose, change in changes.items() if change is Change.BETTER]
    if not better:
        return None

    choose = min if score is Score.LOSS else max
    return choose(better, key=lambda dose: scores[dose].mean)


def judge_turning(gaps: Mapping[str, Estimate | None]) -> dict[Turning, list[str]]:
    """The names of the groups of layers by how fast they turn image tokens, with `Turning.UNCLEAR` last.

    The result is empty if a group has no interval, because then nothing can be judged.

    Args:
        gaps: By the group's name, cosine of image tokens minus cosine of text tokens, each between a layer's input and
            output; `None` if the gap was not measured.
    """
    groups: dict[Turning, list[str]] = {}
    for name, gap in gaps.items():
        if gap is None or math.isnan(gap.low):
            return {}
        groups.setdefault(compare_turning(gap), []).append(name)

    if Turning.UNCLEAR in groups:
        groups[Turning.UNCLEAR] = groups.pop(Turning.UNCLEAR)  # moves to the end
    return groups


def compare_turning(gap: Estimate) -> Turning:
    """How fast image tokens turn. A larger cosine of a layer's input and output means slower turning."""
    if gap.low > 0:
        return Turning.SLOWER
    if gap.high < 0:
        return Turning.FASTER
    return Turning.UNCLEAR


def get_estimate(summary: Summary, measure: str) -> Estimate:
    """The estimate of a measure that every sweep has, and so never `None`."""
    estimate = summary.look(measure)
    assert estimate is not None, measure
    return estimate


def count_pictures(summary: Summary, measure: str) -> int:
    """Number of pictures that have a value of a measure."""
    counts = summary.frame.loc[summary.frame["measure"] == measure, "n"]
    return 0 if counts.empty else int(counts.max())


def clip_share(estimate: Estimate) -> Estimate:
    """The estimate of a share, with its interval cut off at 0 and at 1."""
    return Estimate(estimate.mean, low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))
