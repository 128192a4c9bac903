"""What a block's records show, by the tests that docs/study.md named before the first run.

A linear model of arms and processors: arms are compared within processors, all of which ran every arm equally often.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from examples.emoji.study.cells import (
    LAYER_NORM,
    NORM_OR_RATE,
    NOTHING,
    NOTHING_FAST,
    SCALED,
    SCALED_SLOWLY,
    WHAT_TO_DO,
    Block,
    Record,
    complete_seeds,
    counted,
)
from examples.emoji.study.measures import PRIMARY


# Bounds of p at the first look at block 2, after eight seeds, and at the second, after sixteen (O'Brien and Fleming).
FIRST_LOOK = 0.005
SECOND_LOOK = 0.048
# Arms whose adjusted interval lies within so many points to either side are called equal.
EQUAL_WITHIN = 3.0


def share(digits: str) -> float:
    """Percent of right names."""
    return 100 * digits.count("1") / len(digits)


def primary(record: Record) -> float:
    """What decides: the mean of the two artists' shares of right names, in percent."""
    return float(np.mean([share(record["hits"][artist]) for artist in PRIMARY]))


@dataclass(frozen=True)
class Difference:
    """An estimated difference, in points, with its 95% interval and its two-sided p."""

    estimate: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Pair:
    """An arm less another, alone and adjusted for all pairs of arms (Tukey) at the level of this look."""

    arm: str
    other: str
    difference: Difference
    adjusted_low: float
    adjusted_high: float
    adjusted_p: float
    level: float

    @property
    def verdict(self) -> str:
        """Which arm is ahead, or whether they are equal within `EQUAL_WITHIN` points."""
        if self.adjusted_p < self.level:
            return "ahead" if self.difference.estimate > 0 else "behind"
        if self.adjusted_low > -EQUAL_WITHIN and self.adjusted_high < EQUAL_WITHIN:
            return f"equal within {EQUAL_WITHIN:g} points"
        return "unclear"


class ArmModel:
    """Least squares of outcomes on arms and processors.

    Args:
        arms: Name of each run's arm.
        processors: Name of each run's processor.
        outcomes: One number a run.
    """

    def __init__(self, arms: Sequence[str], processors: Sequence[str], outcomes: Sequence[float]) -> None:
        self.arms = list(dict.fromkeys(arms))
        y = np.array(outcomes, dtype=float)  # [num_runs]
        arm_columns = np.array([[arm == name for name in self.arms] for arm in arms], dtype=float)
        processor_columns = self._processor_columns(processors)
        design = np.concatenate([arm_columns, processor_columns], axis=1)  # [num_runs, num_arms + num_processors - 1]

        self.means, residual = self._fit(design, y)
        self.degrees = len(y) - design.shape[1]
        self.variance = residual / self.degrees
        self._covariance = np.linalg.inv(design.T @ design)

        without_arms = np.concatenate([np.ones((len(y), 1)), processor_columns], axis=1)
        _, residual_without_arms = self._fit(without_arms, y)
        self._explained = (residual_without_arms - residual) / (len(self.arms) - 1)

    @staticmethod
    def _processor_columns(processors: Sequence[str]) -> np.ndarray:
        """A column for each processor but the last; they sum to zero, so that an arm's coefficient is its mean."""
        *names, last = dict.fromkeys(processors)
        columns = np.zeros((len(processors), len(names)))
        for row, processor in enumerate(processors):
            if processor == last:
                columns[row] = -1
            else:
                columns[row, names.index(processor)] = 1
        return columns

    @staticmethod
    def _fit(design: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
        """Coefficients, and the sum of squared residuals."""
        coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
        return coefficients, float(((y - design @ coefficients) ** 2).sum())

    def f_test(self) -> float:
        """p of the hypothesis that all arms have the same mean."""
        return float(stats.f.sf(self._explained / self.variance, len(self.arms) - 1, self.degrees))

    def _estimate(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """A weighted sum of the arms' means, and its standard error."""
        contrast = np.zeros(len(self.means))
        for arm, weight in weights.items():
            contrast[self.arms.index(arm)] = weight
        error = (self.variance * contrast @ self._covariance @ contrast) ** 0.5
        return float(contrast @ self.means), float(error)

    def difference(self, weights: Mapping[str, float]) -> Difference:
        """A weighted sum of the arms' means, whose weights sum to 0."""
        estimate, error = self._estimate(weights)
        reach = stats.t.ppf(0.975, self.degrees) * error
        p = 2 * stats.t.sf(abs(estimate) / error, self.degrees)
        return Difference(estimate, estimate - reach, estimate + reach, float(p))

    def pair(self, arm: str, other: str, level: float) -> Pair:
        """An arm less another, adjusted for all pairs, with intervals that cover all of them with 1 - `level`."""
        weights = {arm: 1.0, other: -1.0}
        estimate, error = self._estimate(weights)
        ranged = (len(self.arms), self.degrees)
        reach = stats.studentized_range.ppf(1 - level, *ranged) / 2**0.5 * error
        p = stats.studentized_range.sf(2**0.5 * abs(estimate) / error, *ranged)
        difference = self.difference(weights)
        return Pair(arm, other, difference, estimate - reach, estimate + reach, float(p), level)


def fit(records: Sequence[Record]) -> ArmModel:
    """The model of what decides."""
    return ArmModel(
        arms=[record["arm"] for record in records],
        processors=[record["processor"] for record in records],
        outcomes=[primary(record) for record in records],
    )


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of several tests."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    ranked = sorted(p_values.items(), key=lambda item: item[1])
    for rank, (name, p) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p))
        adjusted[name] = largest
    return adjusted


def judge_what_to_do(records: Sequence[Record]) -> tuple[float, list[Pair]]:
    """Block 2: the F test's p, and all pairs of arms."""
    level = SECOND_LOOK if len({record["seed"] for record in records}) > len(WHAT_TO_DO.seeds) else FIRST_LOOK
    model = fit(records)
    names = [SCALED.name, LAYER_NORM.name, NOTHING.name]
    pairs = [model.pair(arm, other, level) for arm, other in combinations(names, 2)]
    return model.f_test(), pairs


def needs_more_seeds(records: Sequence[Record]) -> bool:
    """Whether the first look at block 2 leaves "scaled once" less "LayerNorm at T" unclear."""
    runs = counted(WHAT_TO_DO, records)
    if len(complete_seeds(WHAT_TO_DO, records)) < len(WHAT_TO_DO.seeds):
        return False
    return fit(runs).pair(SCALED.name, LAYER_NORM.name, FIRST_LOOK).verdict == "unclear"


def judge_norm_or_rate(records: Sequence[Record]) -> dict[str, Difference]:
    """Block 1: what a smaller norm gains, what a faster second layer gains, and their interaction."""
    model = fit(records)
    norm = {SCALED.name: 0.5, SCALED_SLOWLY.name: 0.5, NOTHING_FAST.name: -0.5, NOTHING.name: -0.5}
    rate = {SCALED.name: 0.5, SCALED_SLOWLY.name: -0.5, NOTHING_FAST.name: 0.5, NOTHING.name: -0.5}
    interaction = {SCALED.name: 1.0, SCALED_SLOWLY.name: -1.0, NOTHING_FAST.name: -1.0, NOTHING.name: 1.0}
    return {
        "norm": model.difference(norm),
        "rate": model.difference(rate),
        "interaction": model.difference(interaction),
    }


def simple_effects(records: Sequence[Record]) -> dict[str, Difference]:
    """Block 1's effects at each level of the other factor, which count only where the interaction is clear."""
    model = fit(records)
    return {
        "norm, at relative rate 1": model.difference({SCALED.name: 1, NOTHING_FAST.name: -1}),
        "norm, at relative rate 1/k": model.difference({SCALED_SLOWLY.name: 1, NOTHING.name: -1}),
        "rate, at norm T": model.difference({SCALED.name: 1, SCALED_SLOWLY.name: -1}),
        "rate, at norm kT": model.difference({NOTHING_FAST.name: 1, NOTHING.name: -1}),
    }


def is_interacting(effects: Mapping[str, Difference]) -> bool:
    """Whether the interaction is clear, so that main effects say nothing by themselves."""
    return effects["interaction"].p < 0.05


def gain(difference: Difference) -> str:
    """A difference in words, with its 95% interval."""
    verb = "gain" if difference.estimate >= 0 else "lose"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    if difference.low * difference.high < 0:
        return f"{verb} {abs(difference.estimate):.1f} points ({difference.low:.1f} to {difference.high:.1f} gained)"
    return f"{verb} {abs(difference.estimate):.1f} points ({low:.1f} to {high:.1f})"


def sentence(effects: Mapping[str, Difference]) -> str:
    """The one of block 1's allowed sentences that its main effects call for, if they don't interact."""
    if is_interacting(effects):
        return "Norm and rate interact: read the simple effects."

    adjusted = holm({name: effects[name].p for name in ("norm", "rate")})
    norm = effects["norm"]
    rate = effects["rate"]
    norm_is_clear = adjusted["norm"] < 0.05
    rate_is_clear = adjusted["rate"] < 0.05

    if norm_is_clear and rate_is_clear:
        return f"Smaller image embeddings {gain(norm)}; models with a faster second layer {gain(rate)}."
    if norm_is_clear:
        return (
            f"At equal relative rates, smaller image embeddings {gain(norm)}; a faster second layer explains less "
            f"than {max(0.0, rate.high):.1f}."
        )
    if rate_is_clear:
        return (
            f"At equal norms, models with a faster second layer {gain(rate)}; smaller image embeddings explain less "
            f"than {max(0.0, norm.high):.1f}."
        )
    largest = max(abs(bound) for effect in (norm, rate) for bound in (effect.low, effect.high))
    return f"Undecided; effects above {largest:.1f} points are excluded."


def secondary(records: Sequence[Record]) -> pd.DataFrame:
    """Means by arm of all that is recorded; nothing of it is tested."""
    rows = []
    for record in records:
        row = {"arm": record["arm"], "what decides, %": primary(record)}
        for artist, digits in record["hits"].items():
            row[f"{artist}, %"] = share(digits)
        row["perplexity of text"] = record["perplexity"]
        row["last loss"] = record["losses"][-1]
        for moment in ("start", "end"):
            row[f"norm over T, {moment}"] = record[moment]["norm"]
            row[f"names by tokens, {moment}, %"] = record[moment]["names_by_tokens"]
        row["gain over its start"] = record["gain"]
        for module, clipped in record["clipped"].items():
            row[f"steps clipped, {module}, %"] = clipped
        rows.append(row)
    return pd.DataFrame(rows).groupby("arm", sort=False).mean(numeric_only=True).T


def describe_effects(differences: Mapping[str, Difference]) -> str:
    """Differences as lines of a table."""
    lines = []
    for name, difference in differences.items():
        interval = f"({difference.low:.2f} to {difference.high:.2f})"
        lines.append(f"{name:60}{difference.estimate:7.2f} {interval:20} p {difference.p:.4f}")
    return "\n".join(lines)


def report(block: Block, records: Sequence[Record]) -> str:
    """What a block shows; `records` are those that count."""
    seeds = len({record["seed"] for record in records})
    lines = [
        f"Block {block.number}, {seeds} seeds: {block.question}",
        "",
        secondary(records).to_string(float_format="%.2f"),
    ]

    if block.number == NORM_OR_RATE.number:
        effects = judge_norm_or_rate(records)
        if is_interacting(effects):
            effects |= simple_effects(records)
        adjusted = holm({name: effects[name].p for name in ("norm", "rate")})
        lines += ["", describe_effects(effects), f"Holm's p: {adjusted}", sentence(effects)]
        return "\n".join(lines)

    p, pairs = judge_what_to_do(records)
    lines += ["", f"F test of arms: p {p:.4f}"]
    lines.append(describe_effects({f"{pair.arm} less {pair.other}": pair.difference for pair in pairs}))
    for pair in pairs:
        interval = f"{pair.adjusted_low:.2f} to {pair.adjusted_high:.2f}"
        tested = f"Tukey {interval}, p {pair.adjusted_p:.4f}, bound {pair.level}"
        lines.append(f"{pair.arm} less {pair.other}: {pair.verdict} ({tested})")
    return "\n".join(lines)
