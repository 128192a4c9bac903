"""Tests what a block's records show. docs/study.md named these tests before the first run.

A linear model has a mean for each arm and an offset for each processor, so arms are compared within processors. Every
processor ran all arms equally often.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from examples.emoji.study.cells import (
    BLOCK_1,
    BLOCK_2,
    LAYER_NORM,
    NOTHING,
    NOTHING_FAST,
    SCALED,
    SCALED_SLOWLY,
    Block,
    Record,
    complete_seeds,
    records_that_count,
)
from examples.emoji.study.measures import PRIMARY


# A pair of block 2's arms differs if its p is below this bound (O'Brien and Fleming). The first look comes after eight
# seeds, the second after sixteen.
FIRST_LOOK = 0.005
SECOND_LOOK = 0.048
# Two arms are called equal if the adjusted interval of their difference lies between minus and plus so many points.
EQUAL_WITHIN = 3.0


def percent_right(digits: str) -> float:
    """The percentage of right names, from a record's digits: 1 where a drawing's name was right, otherwise 0."""
    return 100 * digits.count("1") / len(digits)


def primary_outcome(record: Record) -> float:
    """The outcome that decides: the mean of the two primary artists' percentages of right names."""
    return float(np.mean([percent_right(record["hits"][artist]) for artist in PRIMARY]))


@dataclass(frozen=True)
class Difference:
    """An estimated difference in percentage points, with its 95% interval and its two-sided p."""

    estimate: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Pair:
    """The difference of two arms: `arm` less `other`.

    The adjusted interval and p take into account that all pairs of arms are compared (Tukey).
    """

    arm: str
    other: str
    difference: Difference
    """The difference of this pair alone, without the adjustment."""
    adjusted_low: float
    adjusted_high: float
    adjusted_p: float
    level: float
    """The pair differs if `adjusted_p` is below this bound; the adjusted interval covers 1 - `level`."""

    @property
    def verdict(self) -> str:
        """Whether `arm` is ahead of `other`, behind it, or equal within `EQUAL_WITHIN` points."""
        if self.adjusted_p < self.level:
            return "ahead" if self.difference.estimate > 0 else "behind"
        if self.adjusted_low > -EQUAL_WITHIN and self.adjusted_high < EQUAL_WITHIN:
            return f"equal within {EQUAL_WITHIN:g} points"
        return "unclear"


class ArmModel:
    """A linear model of the runs' outcomes by arm and processor, fitted by least squares.

    Args:
        arms: Name of each run's arm.
        processors: Name of each run's processor.
        outcomes: Outcome of each run.
    """

    def __init__(self, arms: Sequence[str], processors: Sequence[str], outcomes: Sequence[float]) -> None:
        self.arms = list(dict.fromkeys(arms))
        y = np.array(outcomes, dtype=float)  # [num_runs]
        is_arm = np.array(arms)[:, None] == np.array(self.arms)
        arm_columns = is_arm.astype(float)  # [num_runs, num_arms]
        processor_columns = self._processor_columns(processors)
        design = np.concatenate([arm_columns, processor_columns], axis=1)  # [num_runs, num_arms + num_processors - 1]

        # The first coefficients are the arms' means, the others the processors' offsets.
        self._coefficients, residual = self._fit(design, y)
        self.degrees = len(y) - design.shape[1]
        self.variance = residual / self.degrees
        # The coefficients' covariance, as a multiple of `variance`.
        self._covariance = np.linalg.inv(design.T @ design)

        # The F test compares the model with one in which all arms have the same mean.
        one_mean = np.ones((len(y), 1))
        _, residual_of_one_mean = self._fit(np.concatenate([one_mean, processor_columns], axis=1), y)
        self._explained = (residual_of_one_mean - residual) / (len(self.arms) - 1)

    @staticmethod
    def _processor_columns(processors: Sequence[str]) -> np.ndarray:
        """A column for each processor but the last, whose offset is minus the sum of the others.

        The offsets sum to zero, so an arm's coefficient is its mean over processors.
        """
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
        """The coefficients and the sum of squared residuals."""
        coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
        return coefficients, float(((y - design @ coefficients) ** 2).sum())

    def f_test(self) -> float:
        """The p of the hypothesis that all arms have the same mean."""
        return float(stats.f.sf(self._explained / self.variance, len(self.arms) - 1, self.degrees))

    def _estimate(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """A weighted sum of the arms' means, and its standard error."""
        contrast = np.zeros(len(self._coefficients))
        for arm, weight in weights.items():
            contrast[self.arms.index(arm)] = weight
        error = (self.variance * contrast @ self._covariance @ contrast) ** 0.5
        return float(contrast @ self._coefficients), float(error)

    def difference(self, weights: Mapping[str, float]) -> Difference:
        """The weighted sum of the arms' means as a difference. The weights must sum to 0."""
        estimate, error = self._estimate(weights)
        reach = stats.t.ppf(0.975, self.degrees) * error
        p = 2 * stats.t.sf(abs(estimate) / error, self.degrees)
        return Difference(estimate, estimate - reach, estimate + reach, float(p))

    def pair(self, arm: str, other: str, level: float) -> Pair:
        """The difference of two arms, adjusted for the comparison of all pairs of arms.

        Args:
            arm: Name of the first arm.
            other: Name of the arm that is subtracted.
            level: The adjusted intervals of all pairs together cover the differences with probability 1 - `level`.
        """
        weights = {arm: 1.0, other: -1.0}
        estimate, error = self._estimate(weights)
        # Tukey's distribution is that of a range in units of one mean's error; a difference's error is √2 times that.
        tukey = stats.studentized_range(len(self.arms), self.degrees)
        reach = tukey.ppf(1 - level) / 2**0.5 * error
        p = tukey.sf(2**0.5 * abs(estimate) / error)
        return Pair(
            arm=arm,
            other=other,
            difference=self.difference(weights),
            adjusted_low=estimate - reach,
            adjusted_high=estimate + reach,
            adjusted_p=float(p),
            level=level,
        )


def fit_primary(records: Sequence[Record]) -> ArmModel:
    """The model of the outcome that decides."""
    return ArmModel(
        arms=[record["arm"] for record in records],
        processors=[record["processor"] for record in records],
        outcomes=[primary_outcome(record) for record in records],
    )


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p of several tests, by name, adjusted by Holm's method."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    ranked = sorted(p_values.items(), key=lambda item: item[1])
    for rank, (name, p) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p))
        adjusted[name] = largest
    return adjusted


def judge_block_2(records: Sequence[Record]) -> tuple[float, list[Pair]]:
    """Block 2's results: the F test's p, and all pairs of arms."""
    num_seeds = len({record["seed"] for record in records})
    level = SECOND_LOOK if num_seeds > len(BLOCK_2.seeds) else FIRST_LOOK
    model = fit_primary(records)
    names = [SCALED.name, LAYER_NORM.name, NOTHING.name]
    pairs = [model.pair(arm, other, level) for arm, other in combinations(names, 2)]
    return model.f_test(), pairs


def needs_more_seeds(records: Sequence[Record]) -> bool:
    """Whether the first look at block 2 leaves open whether "scaled once" or "LayerNorm at T" is better."""
    runs = records_that_count(BLOCK_2, records)
    if len(complete_seeds(BLOCK_2, records)) < len(BLOCK_2.seeds):
        return False
    pair = fit_primary(runs).pair(SCALED.name, LAYER_NORM.name, FIRST_LOOK)
    return pair.verdict == "unclear"


def judge_block_1(records: Sequence[Record]) -> dict[str, Difference]:
    """Block 1's results: what a smaller norm gains, what a faster second layer gains, and their interaction."""
    model = fit_primary(records)
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
    model = fit_primary(records)
    return {
        "norm, at relative rate 1": model.difference({SCALED.name: 1, NOTHING_FAST.name: -1}),
        "norm, at relative rate 1/k": model.difference({SCALED_SLOWLY.name: 1, NOTHING.name: -1}),
        "rate, at norm T": model.difference({SCALED.name: 1, SCALED_SLOWLY.name: -1}),
        "rate, at norm kT": model.difference({NOTHING_FAST.name: 1, NOTHING.name: -1}),
    }


def norm_and_rate_interact(effects: Mapping[str, Difference]) -> bool:
    """Whether the interaction is clear, so that main effects say nothing by themselves."""
    return effects["interaction"].p < 0.05


def adjust_main_effects(effects: Mapping[str, Difference]) -> dict[str, float]:
    """Holm's p of block 1's two main effects."""
    return holm({"norm": effects["norm"].p, "rate": effects["rate"].p})


def describe_gain(difference: Difference) -> str:
    """A difference in words with its 95% interval, such as "lose 2.0 points (1.0 to 3.0)"."""
    verb = "gain" if difference.estimate >= 0 else "lose"
    points = f"{verb} {abs(difference.estimate):.1f} points"
    if difference.low < 0 < difference.high:
        return f"{points} ({difference.low:.1f} to {difference.high:.1f} gained)"

    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"{points} ({low:.1f} to {high:.1f})"


def sentence(effects: Mapping[str, Difference]) -> str:
    """What may be said of block 1's effects: one of the sentences that docs/study.md allows."""
    if norm_and_rate_interact(effects):
        return "Norm and rate interact: read the simple effects."

    adjusted = adjust_main_effects(effects)
    norm = effects["norm"]
    rate = effects["rate"]
    norm_is_clear = adjusted["norm"] < 0.05
    rate_is_clear = adjusted["rate"] < 0.05

    if norm_is_clear and rate_is_clear:
        return (
            f"Smaller image embeddings {describe_gain(norm)}; models with a faster second layer {describe_gain(rate)}."
        )
    if norm_is_clear:
        return (
            f"At equal relative rates, smaller image embeddings {describe_gain(norm)}; "
            f"a faster second layer explains less than {max(0.0, rate.high):.1f}."
        )
    if rate_is_clear:
        return (
            f"At equal norms, models with a faster second layer {describe_gain(rate)}; "
            f"smaller image embeddings explain less than {max(0.0, norm.high):.1f}."
        )
    bounds = [norm.low, norm.high, rate.low, rate.high]
    largest = max(abs(bound) for bound in bounds)
    return f"Undecided; effects above {largest:.1f} points are excluded."


def tabulate_means(records: Sequence[Record]) -> pd.DataFrame:
    """The mean of each recorded measure by arm, measures in rows and arms in columns. It has no tests."""
    rows = []
    for record in records:
        row = {"arm": record["arm"], "what decides, %": primary_outcome(record)}
        for artist, digits in record["hits"].items():
            row[f"{artist}, %"] = percent_right(digits)
        row["perplexity of text"] = record["perplexity"]
        row["last loss"] = record["losses"][-1]
        for moment in ("start", "end"):
            row[f"norm over T, {moment}"] = record[moment]["norm"]
            row[f"names by tokens, {moment}, %"] = record[moment]["names_by_tokens"]
        row["gain over its start"] = record["gain"]
        for module, clipped in record["clipped"].items():
            row[f"steps clipped, {module}, %"] = clipped
        rows.append(row)
    means = pd.DataFrame(rows).groupby("arm", sort=False).mean(numeric_only=True)
    return means.T


def describe_effects(differences: Mapping[str, Difference]) -> str:
    """A line for each difference, by its name."""
    lines = []
    for name, difference in differences.items():
        interval = f"({difference.low:.2f} to {difference.high:.2f})"
        lines.append(f"{name:60}{difference.estimate:7.2f} {interval:20} p {difference.p:.4f}")
    return "\n".join(lines)


def report(block: Block, records: Sequence[Record]) -> str:
    """A block's results as text.

    Args:
        block: The block.
        records: Its records, as `records_that_count` returns them.
    """
    num_seeds = len({record["seed"] for record in records})
    lines = [
        f"Block {block.number}, {num_seeds} seeds: {block.question}",
        "",
        tabulate_means(records).to_string(float_format="%.2f"),
    ]

    if block.number == BLOCK_1.number:
        effects = judge_block_1(records)
        if norm_and_rate_interact(effects):
            effects |= simple_effects(records)
        adjusted = adjust_main_effects(effects)
        lines += ["", describe_effects(effects), f"Holm's p: {adjusted}", sentence(effects)]
        return "\n".join(lines)

    p, pairs = judge_block_2(records)
    differences = {f"{pair.arm} less {pair.other}": pair.difference for pair in pairs}
    lines += ["", f"F test of arms: p {p:.4f}", describe_effects(differences)]
    for pair in pairs:
        interval = f"{pair.adjusted_low:.2f} to {pair.adjusted_high:.2f}"
        tested = f"Tukey {interval}, p {pair.adjusted_p:.4f}, bound {pair.level}"
        lines.append(f"{pair.arm} less {pair.other}: {pair.verdict} ({tested})")
    return "\n".join(lines)
