"""Compares the arms by the statistical tests that docs/study.md named before the first run.

An arm is one way to make a model, and is run with several seeds. The tests are those of a linear model of the runs'
scores with a mean for each arm and an offset for each seed, because all arms of a seed share their alignment, the
order of rows, the machine and the learning rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean

import pandas as pd
import statsmodels.formula.api as smf
from scipy import stats
from statsmodels.stats.anova import anova_lm

from examples.emoji.study.records import Arm, Record
from examples.emoji.study.scores import PRIMARY, SECONDARY, percent_right, primary_score


# Arms differ, and arm and rate interact, if the test's p is below this bound.
LEVEL = 0.05
# Scaling once is as good as the LayerNorm if the interval of their difference lies above minus this many points.
MARGIN = 2.0
# In each pair, the arm that comes later in this list is subtracted.
PAIRS = tuple(combinations([Arm.SCALED, Arm.LAYER_NORM, Arm.NOTHING], 2))


@dataclass(frozen=True)
class Difference:
    """The mean score of `arm` less that of `other` in percentage points, with its 95% interval and its p."""

    arm: Arm
    other: Arm
    estimate: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        name = f"{self.arm} less {self.other}"
        return f"{name:30}{self.estimate:7.2f} ({self.low:.2f} to {self.high:.2f}), p {self.p:.4f}"


@dataclass(frozen=True)
class Comparison:
    """The tests of all arms on some seeds.

    Attributes:
        arms_p: The p of the F test that all arms have the same mean.
        pairs: The differences of `PAIRS`.
    """

    arms_p: float
    pairs: tuple[Difference, ...]

    def pair(self, arm: Arm, other: Arm) -> Difference:
        """The difference of two arms, in the order of `PAIRS`."""
        (found,) = [pair for pair in self.pairs if (pair.arm, pair.other) == (arm, other)]
        return found

    def verdict(self, pair: Difference) -> str:
        """Whether a pair's first arm is ahead of the second or behind it; "undecided" if a p isn't below `LEVEL`."""
        if self.arms_p >= LEVEL or pair.p >= LEVEL:
            return "undecided"
        return "ahead" if pair.estimate > 0 else "behind"

    @property
    def scaling_is_as_good(self) -> bool:
        """Whether scaling once is as good as the LayerNorm, within `MARGIN`.

        It must also be ahead of "nothing": if both did nothing, they would be as good as each other too.
        """
        is_ahead_of_nothing = self.verdict(self.pair(Arm.SCALED, Arm.NOTHING)) == "ahead"
        return is_ahead_of_nothing and self.pair(Arm.SCALED, Arm.LAYER_NORM).low > -MARGIN


def tabulate_scores(records: Sequence[Record]) -> pd.DataFrame:
    """A table with a row for each run: its arm, seed, projector's rate, arithmetic and primary score."""
    rows = []
    for record in records:
        rows.append({
            "arm": record["arm"],
            "seed": record["seed"],
            "rate": record["rates"]["projector"],
            "arithmetic": record["arithmetic"],
            "score": primary_score(record),
        })  # fmt: skip
    return pd.DataFrame(rows)


def compare_arms(scores: pd.DataFrame) -> Comparison:
    """The tests of all arms, with seeds as blocks. Every seed has a run of every arm."""
    model = smf.ols("score ~ C(arm) + C(seed)", scores).fit()
    arms_p = anova_lm(model).loc["C(arm)", "PR(>F)"]

    # With seeds whole, a difference of two coefficients is a difference of two arms' means. The first arm by name has
    # no coefficient: its mean is the intercept's.
    def coefficient(arm: Arm) -> str:
        name = f"C(arm)[T.{arm}]"
        return name if name in model.params else "0"

    pairs = []
    for arm, other in PAIRS:
        tested = model.t_test(build_contrast(model.params.index, coefficient(arm), coefficient(other)))
        low, high = tested.conf_int()[0]
        pairs.append(Difference(arm, other, float(tested.effect[0]), float(low), float(high), float(tested.pvalue)))
    return Comparison(float(arms_p), tuple(pairs))


def build_contrast(names: pd.Index, plus: str, minus: str) -> list[float]:
    """The weights of a model's coefficients: 1 for the one named `plus`, -1 for the one named `minus`, else 0."""
    return [float(name == plus) - float(name == minus) for name in names]


def interaction_p(scores: pd.DataFrame) -> float:
    """The p of the F test that the arms' differences are the same at both learning rates."""
    # A seed has one rate, so the offsets of seeds hold the effect of the rate on all arms. Two more coefficients say
    # how much more two of the arms gain at one rate than at the other.
    is_fast = scores["rate"] == scores["rate"].max()
    columns = scores.assign(
        fast_and_scaled=(is_fast & (scores["arm"] == Arm.SCALED)).astype(float),
        fast_and_norm=(is_fast & (scores["arm"] == Arm.LAYER_NORM)).astype(float),
    )
    same = smf.ols("score ~ C(arm) + C(seed)", columns).fit()
    different = smf.ols("score ~ C(arm) + C(seed) + fast_and_scaled + fast_and_norm", columns).fit()
    return float(anova_lm(same, different)["Pr(>F)"].iloc[1])


def compare_by_seed(scores: pd.DataFrame) -> list[Difference]:
    """Each pair's difference by a paired t test over seeds, to see whether the result depends on the linear model.

    Each seed gives one number, its difference. Only the spread of these numbers counts, whereas the linear model
    estimates one spread for all pairs.
    """
    by_seed = scores.pivot(index="seed", columns="arm", values="score")
    pairs = []
    for arm, other in PAIRS:
        differences = by_seed[arm] - by_seed[other]
        tested = stats.ttest_1samp(differences, 0)
        low, high = tested.confidence_interval()
        pairs.append(Difference(arm, other, differences.mean(), float(low), float(high), float(tested.pvalue)))
    return pairs


def tabulate_means(scores: pd.DataFrame) -> pd.DataFrame:
    """Each arm's mean score with Student's 95% interval over seeds, of all seeds, by rate and by arithmetic."""
    groups = {"all seeds": scores}
    groups |= {f"rate {rate:g}": group for rate, group in scores.groupby("rate", sort=False)}
    groups |= {str(arithmetic): group for arithmetic, group in scores.groupby("arithmetic")}

    columns = {}
    for title, group in groups.items():
        num_seeds = group["seed"].nunique()
        columns[f"{title} (n {num_seeds})"] = {arm.value: describe_mean(group, arm) for arm in Arm}
    return pd.DataFrame(columns)


def describe_mean(scores: pd.DataFrame, arm: Arm) -> str:
    """An arm's mean score, with Student's 95% interval over seeds."""
    of_arm = scores.loc[scores["arm"] == arm, "score"]
    half_width = stats.t.ppf(0.975, len(of_arm) - 1) * of_arm.sem()
    return f"{of_arm.mean():.1f} ({of_arm.mean() - half_width:.1f} to {of_arm.mean() + half_width:.1f})"


def tabulate_secondary(records: Sequence[Record]) -> pd.DataFrame:
    """Means over each arm's runs of what no test decides about: a row for each measure, a column for each arm.

    Turning is 1 - cosine of a token before and after a layer of the decoder. Attention is a mean over layers.
    """
    rows = []
    for record in records:
        row = {"arm": record["arm"]}
        for artist in (*PRIMARY, *SECONDARY):
            row[f"{artist}, %"] = percent_right(record, artist)
        row["norm over T, start"] = record["start"]["norm"]
        row["norm over T, end"] = record["end"]["norm"]
        row["names by tokens, start, %"] = record["start"]["names_by_tokens"]
        row["names by tokens, end, %"] = record["end"]["names_by_tokens"]
        row["turning in layer 0, image"] = record["layers"]["turning"]["visual"][0]
        row["turning in layer 0, text"] = record["layers"]["turning"]["text"][0]
        row["text's attention to the picture, %"] = 100 * mean(record["layers"]["attention"])
        row["perplexity of text"] = record["perplexity"]
        row["loss, steps 10 to 150"] = mean(record["losses"][:15])  # every tenth step has a loss
        row["loss, steps 160 to 290"] = mean(record["losses"][15:])
        row["gain over its start"] = record["gain"]
        for module, clipped in record["clipped"].items():
            row[f"steps clipped, {module}, %"] = clipped
        rows.append(row)
    means = pd.DataFrame(rows).groupby("arm").mean(numeric_only=True)
    return means.loc[list(Arm)].T


def groups_to_test(scores: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The runs that are tested together, by a title: all of them, or those of each rate if arm and rate interact."""
    if interaction_p(scores) >= LEVEL:
        return {"both rates": scores}
    return {f"rate {rate:g}": group for rate, group in scores.groupby("rate", sort=False)}


def describe_comparison(title: str, scores: pd.DataFrame) -> list[str]:
    """The lines of the tests on some seeds."""
    comparison = compare_arms(scores)
    lines = [f"{title}, {scores['seed'].nunique()} seeds: F test of arms, p {comparison.arms_p:.4f}"]
    for pair in comparison.pairs:
        lines.append(f"  {pair}: {comparison.verdict(pair)}")
    is_as_good = "is" if comparison.scaling_is_as_good else "was not shown to be"
    lines.append(f"  Scaled once {is_as_good} as good as the LayerNorm within {MARGIN:g} points.")
    return lines


def report(records: Sequence[Record]) -> str:
    """The study's results as text.

    Args:
        records: The records of the runs. Every seed has one of each arm.
    """
    scores = tabulate_scores(records)
    lines = [
        "Right names, %, means over seeds:",
        tabulate_means(scores).to_string(),
        "",
        tabulate_secondary(records).to_string(float_format="%.2f"),
        "",
    ]

    lines.append(f"Arm x rate: p {interaction_p(scores):.4f}")
    for title, group in groups_to_test(scores).items():
        lines += describe_comparison(title.capitalize(), group)
        lines.append("  Each seed's difference, t over seeds:")
        lines += [f"    {pair}" for pair in compare_by_seed(group)]
    return "\n".join(lines)
