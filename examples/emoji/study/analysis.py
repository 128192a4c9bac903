"""Compares the arms of a block by the statistical tests that docs/study.md named before the first run.

An arm is one way to make and train a model, and is run with several seeds. A processor is a kind of CPU or GPU. The
tests are those of a linear model of the runs' outcomes. The linear model has a mean for each arm and an offset for
each processor, so that arms are compared within processors. Every processor ran all arms equally often.
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


# Two arms of block 2 differ if the p of their difference is below a bound. The results are looked at after eight
# seeds, and perhaps again after sixteen seeds. Each look has a bound of its own (O'Brien and Fleming).
FIRST_LOOK = 0.005
SECOND_LOOK = 0.048
# Two arms are called equal if Tukey's interval of their difference lies between minus and plus this many points.
EQUAL_WITHIN = 3.0


def percent_right(digits: str) -> float:
    """The percentage of right names. `digits` has a "1" for each drawing whose name is right, and a "0" for others."""
    return 100 * digits.count("1") / len(digits)


def primary_outcome(record: Record) -> float:
    """The outcome of a run: the percentage of right names, averaged over the two primary artists."""
    percentages = [percent_right(record["hits"][artist]) for artist in PRIMARY]
    return float(np.mean(percentages))


@dataclass(frozen=True)
class Difference:
    """An estimated difference in percentage points, with its 95% interval and its two-sided p."""

    estimate: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Pair:
    """Two arms, and the mean outcome of `arm` less the mean outcome of `other`.

    The adjusted interval and the adjusted p allow for the comparison of all pairs of arms (Tukey).
    """

    arm: str
    other: str
    difference: Difference
    """The difference without the adjustment."""
    adjusted_low: float
    adjusted_high: float
    adjusted_p: float
    level: float
    """The arms differ if `adjusted_p` is below this bound. The confidence of the adjusted interval is 1 - `level`."""

    @property
    def verdict(self) -> str:
        """Whether `arm` is ahead of `other`, behind it, equal within `EQUAL_WITHIN` points, or none of these."""
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
        processor_columns = self._processor_columns(processors)  # [num_runs, num_processors - 1]

        # The first coefficients are the arms' means. The others are the processors' offsets.
        design = np.concatenate([arm_columns, processor_columns], axis=1)
        self._coefficients, squared_residuals = self._fit(design, y)
        self._degrees_of_freedom = len(y) - design.shape[1]
        self._variance = squared_residuals / self._degrees_of_freedom
        self._covariance = self._variance * np.linalg.inv(design.T @ design)  # of the coefficients

        # For the F test: how much worse the fit is if all arms have the same mean.
        one_mean = np.ones((len(y), 1))
        design_with_one_mean = np.concatenate([one_mean, processor_columns], axis=1)
        _, squared_residuals_with_one_mean = self._fit(design_with_one_mean, y)
        squares_between_arms = squared_residuals_with_one_mean - squared_residuals
        self._variance_between_arms = squares_between_arms / (len(self.arms) - 1)

    @staticmethod
    def _processor_columns(processors: Sequence[str]) -> np.ndarray:
        """The columns of the processors' offsets: one for each processor but the last.

        The offsets sum to 0, so an arm's coefficient is its mean over processors. The last processor's offset is minus
        the sum of the others, so a run on the last processor has -1 in every column.
        """
        *names, last = dict.fromkeys(processors)
        columns = np.zeros((len(processors), len(names)))
        for run, processor in enumerate(processors):
            if processor == last:
                columns[run] = -1
            else:
                columns[run, names.index(processor)] = 1
        return columns

    @staticmethod
    def _fit(design: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
        """The coefficients of the least-squares fit, and the sum of its squared residuals."""
        coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
        residuals = y - design @ coefficients
        return coefficients, float((residuals**2).sum())

    def f_test(self) -> float:
        """The p of the hypothesis that all arms have the same mean."""
        ratio = self._variance_between_arms / self._variance
        return float(stats.f.sf(ratio, len(self.arms) - 1, self._degrees_of_freedom))

    def _estimate(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """A weighted sum of the arms' means, and the sum's standard error. Keys of `weights` are the arms' names."""
        contrast = np.zeros(len(self._coefficients))  # the processors' offsets keep the weight 0
        for arm, weight in weights.items():
            contrast[self.arms.index(arm)] = weight
        estimate = contrast @ self._coefficients
        variance = contrast @ self._covariance @ contrast
        return float(estimate), float(variance**0.5)

    def difference(self, weights: Mapping[str, float]) -> Difference:
        """A weighted sum of the arms' means, tested against 0. The sum of the weights must be 0, as with 1 and -1."""
        estimate, error = self._estimate(weights)
        half_width = stats.t.ppf(0.975, self._degrees_of_freedom) * error
        p = 2 * stats.t.sf(abs(estimate) / error, self._degrees_of_freedom)
        return Difference(estimate, low=estimate - half_width, high=estimate + half_width, p=float(p))

    def pair(self, arm: str, other: str, level: float) -> Pair:
        """The difference of two arms, adjusted for the comparison of all pairs of arms.

        Args:
            arm: Name of the first arm.
            other: Name of the arm that is subtracted.
            level: The probability that at least one pair's adjusted interval misses the true difference.
        """
        weights = {arm: 1.0, other: -1.0}
        estimate, error = self._estimate(weights)
        # Tukey's distribution is in units of a mean's standard error. A difference has √2 times that error.
        tukey = stats.studentized_range(len(self.arms), self._degrees_of_freedom)
        half_width = tukey.ppf(1 - level) / 2**0.5 * error
        p = tukey.sf(2**0.5 * abs(estimate) / error)
        return Pair(
            arm=arm,
            other=other,
            difference=self.difference(weights),
            adjusted_low=estimate - half_width,
            adjusted_high=estimate + half_width,
            adjusted_p=float(p),
            level=level,
        )


def fit_primary(records: Sequence[Record]) -> ArmModel:
    """The linear model of the records' `primary_outcome`."""
    return ArmModel(
        arms=[record["arm"] for record in records],
        processors=[record["processor"] for record in records],
        outcomes=[primary_outcome(record) for record in records],
    )


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjust the p of several tests by Holm's method. Keys are the tests' names.

    The smallest p is multiplied by the number of tests, the second smallest by that number less one, and so on. No
    adjusted p is above 1, or below the adjusted p of a test with a smaller p.
    """
    adjusted: dict[str, float] = {}
    adjusted_p = 0.0
    num_left = len(p_values)
    for name in sorted(p_values, key=lambda test: p_values[test]):
        multiplied_p = min(1.0, num_left * p_values[name])
        adjusted_p = max(adjusted_p, multiplied_p)
        adjusted[name] = adjusted_p
        num_left -= 1
    return adjusted


def judge_block_2(records: Sequence[Record]) -> tuple[float, list[Pair]]:
    """Block 2's results.

    Returns:
        The p of the F test.
        All pairs of arms.
    """
    num_seeds = len({record["seed"] for record in records})
    level = SECOND_LOOK if num_seeds > len(BLOCK_2.seeds) else FIRST_LOOK
    model = fit_primary(records)
    # In each pair, the arm that comes later in this list is subtracted.
    names = [SCALED.name, LAYER_NORM.name, NOTHING.name]
    pairs = [model.pair(arm, other, level) for arm, other in combinations(names, 2)]
    return model.f_test(), pairs


def needs_more_seeds(records: Sequence[Record]) -> bool:
    """Whether block 2's first seeds are done, and leave open whether `SCALED` or `LAYER_NORM` is better."""
    if len(complete_seeds(BLOCK_2, records)) < len(BLOCK_2.seeds):
        return False
    model = fit_primary(records_that_count(BLOCK_2, records))
    pair = model.pair(SCALED.name, LAYER_NORM.name, FIRST_LOOK)
    return pair.verdict == "unclear"


def judge_block_1(records: Sequence[Record]) -> dict[str, Difference]:
    """Block 1's results: the effects of its two factors, and their interaction.

    T is the mean norm of text embeddings. With a new projector, the norm of image tokens is k times T, where k > 1.

    One factor is the norm at which image tokens enter the decoder: T in `SCALED` and `SCALED_SLOWLY`, and k times T in
    the other two arms. The other factor is how fast the projector's second layer learns, relative to its weights: in
    `SCALED` and `NOTHING_FAST` it learns k times as fast as in the other two arms.

    Returns:
        `norm`: what the smaller norm gains, averaged over both rates.
        `rate`: what the faster second layer gains, averaged over both norms.
        `interaction`: how much more the faster second layer gains at the smaller norm than at the larger.
    """
    model = fit_primary(records)
    # The weights 0.5 and -0.5 give the mean of two arms less the mean of the other two.
    norm = {SCALED.name: 0.5, SCALED_SLOWLY.name: 0.5, NOTHING_FAST.name: -0.5, NOTHING.name: -0.5}
    rate = {SCALED.name: 0.5, SCALED_SLOWLY.name: -0.5, NOTHING_FAST.name: 0.5, NOTHING.name: -0.5}
    # The faster second layer's gain at norm T less its gain at norm kT.
    interaction = {SCALED.name: 1.0, SCALED_SLOWLY.name: -1.0, NOTHING_FAST.name: -1.0, NOTHING.name: 1.0}
    return {
        "norm": model.difference(norm),
        "rate": model.difference(rate),
        "interaction": model.difference(interaction),
    }


def simple_effects(records: Sequence[Record]) -> dict[str, Difference]:
    """The effect of each factor of block 1 at each level of the other factor.

    These effects count only if the interaction is clear. The relative rate of `SCALED` is called 1.
    """
    model = fit_primary(records)
    return {
        "norm, at relative rate 1": model.difference({SCALED.name: 1, NOTHING_FAST.name: -1}),
        "norm, at relative rate 1/k": model.difference({SCALED_SLOWLY.name: 1, NOTHING.name: -1}),
        "rate, at norm T": model.difference({SCALED.name: 1, SCALED_SLOWLY.name: -1}),
        "rate, at norm kT": model.difference({NOTHING_FAST.name: 1, NOTHING.name: -1}),
    }


def norm_and_rate_interact(effects: Mapping[str, Difference]) -> bool:
    """Whether the interaction is clear, so that the effects of norm and rate say nothing by themselves."""
    return effects["interaction"].p < 0.05


def adjust_main_effects(effects: Mapping[str, Difference]) -> dict[str, float]:
    """The p of block 1's effects of norm and rate, adjusted by Holm's method."""
    return holm({"norm": effects["norm"].p, "rate": effects["rate"].p})


def describe_gain(difference: Difference) -> str:
    """A difference in words with its 95% interval.

    Examples are "gain 4.0 points (2.0 to 6.0)" and "lose 2.0 points (1.0 to 3.0)". If 0 is inside the interval, one
    end is a gain and the other end is a loss. Both ends are given as gains with signs in that case, as in "lose 1.0
    points (-3.0 to 1.0 gained)".
    """
    verb = "gain" if difference.estimate >= 0 else "lose"
    points = f"{verb} {abs(difference.estimate):.1f} points"
    if difference.low < 0 < difference.high:
        return f"{points} ({difference.low:.1f} to {difference.high:.1f} gained)"

    # Both ends have the sign of the estimate, which the verb says.
    low, high = sorted([abs(difference.low), abs(difference.high)])
    return f"{points} ({low:.1f} to {high:.1f})"


def conclude_block_1(effects: Mapping[str, Difference]) -> str:
    """The sentence that docs/study.md allows about block 1's effects."""
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
    # Of an unclear effect, the sentence tells only the interval's upper end, as a limit. After Holm's correction, even
    # an effect whose interval lies below 0 can be unclear. The limit is 0 in that case.
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
    """A table of the means over each arm's runs, with a row for each measure and a column for each arm."""
    rows = []
    for record in records:
        row = {"arm": record["arm"], "primary outcome, %": primary_outcome(record)}
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
    """A line of text for each difference. Keys of `differences` are the names that the lines begin with."""
    lines = []
    for name, difference in differences.items():
        interval = f"({difference.low:.2f} to {difference.high:.2f})"
        lines.append(f"{name:60}{difference.estimate:7.2f} {interval:20} p {difference.p:.4f}")
    return "\n".join(lines)


def report(block: Block, records: Sequence[Record]) -> str:
    """The results of a block as text.

    Args:
        block: The block.
        records: The block's records, as `records_that_count` returns them.
    """
    num_seeds = len({record["seed"] for record in records})
    lines = [
        f"Block {block.number}, {num_seeds} seeds: {block.question}",
        "",
        tabulate_means(records).to_string(float_format="%.2f"),
    ]

    if block.number == BLOCK_1.number:
        lines += report_block_1(records)
    else:
        lines += report_block_2(records)
    return "\n".join(lines)


def report_block_1(records: Sequence[Record]) -> list[str]:
    """The lines of block 1's tests."""
    effects = judge_block_1(records)
    adjusted = adjust_main_effects(effects)
    shown_effects = dict(effects)
    if norm_and_rate_interact(effects):
        shown_effects |= simple_effects(records)
    return ["", describe_effects(shown_effects), f"Holm's p: {adjusted}", conclude_block_1(effects)]


def report_block_2(records: Sequence[Record]) -> list[str]:
    """The lines of block 2's tests."""
    f_test_p, pairs = judge_block_2(records)
    differences = {f"{pair.arm} less {pair.other}": pair.difference for pair in pairs}
    lines = ["", f"F test of arms: p {f_test_p:.4f}", describe_effects(differences)]
    for pair in pairs:
        interval = f"{pair.adjusted_low:.2f} to {pair.adjusted_high:.2f}"
        tested = f"Tukey {interval}, p {pair.adjusted_p:.4f}, bound {pair.level}"
        lines.append(f"{pair.arm} less {pair.other}: {pair.verdict} ({tested})")
    return lines
