"""Tidy rows, which every measure returns, and their means over pictures with 95% intervals.

Tokens of one picture are correlated: each picture counts once, with the mean over its tokens. Intervals are Student's
t over pictures. Statistics that are not means, such as ratios, use the jackknife: Student's t over pseudo-values
(Tukey, 1958; Efron and Stein, 1981). A percentile bootstrap over few pictures is too narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from diagnostics.parts import layer_groups


LEVEL = 0.95
# `modality` is "visual", "text" or empty. A row with a picture holds that picture's value, or its pseudo-value where
# the measure is no mean over pictures; then a row without a picture holds the value over all of them.
COLUMNS = ["measure", "modality", "layer", "picture", "value"]
# Measures by layer that are also given for thirds of the layers.
BY_THIRD = ("gap", "norm_ratio", "turning")


class Estimate(NamedTuple):
    """A mean over pictures with both ends of its interval, NaN without one."""

    mean: float
    low: float = float("nan")
    high: float = float("nan")


@dataclass(frozen=True)
class Summary:
    """What [`summarize_rows`] returns for one model, as JSON holds it: a row for each number."""

    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "Summary":
        """The summary of a model's rows, with means over layers."""
        frame = summarize_rows(with_means(rows))
        with_none = frame.astype(object).where(frame.notna(), None)
        return cls(with_none.to_dict("records"))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """As a table."""
        return pd.DataFrame(self.rows).astype(
            {"layer": "Int64", "n": "Int64", "mean": float, "low": float, "high": float}
        )

    def look(self, measure: str, modality: str = "") -> Estimate | None:
        """One number, a mean over layers if it is measured by layer; `None` if it is not there."""
        chosen = self._choose(measure, modality)
        without_layer = chosen[chosen["layer"].isna()]
        if without_layer.empty:
            return None
        first = without_layer.iloc[0]
        return Estimate(float(first["mean"]), float(first["low"]), float(first["high"]))

    def curve(self, measure: str, modality: str = "") -> pd.DataFrame:
        """The rows of a measure by layer."""
        chosen = self._choose(measure, modality)
        return chosen[chosen["layer"].notna()].sort_values("layer")

    def _choose(self, measure: str, modality: str) -> pd.DataFrame:
        is_chosen = (self.frame["measure"] == measure) & (self.frame["modality"] == modality)
        return self.frame[is_chosen]


def summaries_by_dose(rows: pd.DataFrame) -> dict[tuple[float, str], Summary]:
    """Summaries of one model's rows of a sweep, by dose and control."""
    summaries = {}
    for (dose, control), chosen in rows.groupby(["dose", "control"]):
        measured = chosen.drop(columns=["model", "dose", "control"], errors="ignore")
        summaries[dose, control] = Summary.of(measured)
    return summaries


def make_rows(
    measure: str, values: Any = (), modality: str = "", layers: Sequence[int] | None = None, whole: Any = None
) -> pd.DataFrame:
    """Rows of one measure.

    Args:
        measure: Its name.
        values: By picture, `(num_pictures,)`, or with `layers` `(num_pictures, num_layers)`.
        modality: Of the tokens that are measured, if it is of one.
        layers: Layer numbers of a measure by layer.
        whole: The value over all pictures, a number or `(num_layers,)`, of a measure that is no mean over pictures.
    """
    layer_column: list[Any] = [pd.NA] if layers is None else list(layers)
    by_picture = np.reshape(np.asarray(values, dtype=float), (-1, len(layer_column)))  # [num_pictures, num_layers]
    pictures: list[Any] = list(range(len(by_picture)))
    if whole is not None:
        over_pictures = np.reshape(np.asarray(whole, dtype=float), (1, -1))
        by_picture = np.concatenate([over_pictures, by_picture])
        pictures = [pd.NA, *pictures]

    columns = {
        "measure": measure,
        "modality": modality,
        "layer": pd.array(layer_column * len(pictures), dtype="Int64"),
        "picture": pd.array(np.repeat(pictures, len(layer_column)), dtype="Int64"),
        "value": by_picture.ravel(),
    }
    return pd.DataFrame(columns, columns=COLUMNS)


def ratio_rows(
    measure: str, numerator: np.ndarray, denominator: np.ndarray, layers: Sequence[int] | None = None
) -> pd.DataFrame:
    """Rows of the ratio of two means over pictures, `(num_pictures,)` or `(num_pictures, num_layers)` each."""
    numerator_sum = numerator.sum(axis=0)
    denominator_sum = denominator.sum(axis=0)
    whole = numerator_sum / denominator_sum
    with np.errstate(invalid="ignore"):  # Without its only picture nothing is left.
        without_each = (numerator_sum - numerator) / (denominator_sum - denominator)
    return jackknife_rows(measure, whole, without_each, layers=layers)


def jackknife_rows(
    measure: str, whole: np.ndarray, without: np.ndarray, modality: str = "", layers: Sequence[int] | None = None
) -> pd.DataFrame:
    """Rows of any statistic: `whole` of all pictures, a number or `(num_layers,)`, and `without` each picture once,
    `(num_pictures,)` or `(num_pictures, num_layers)`."""
    if len(without) == 1:
        return make_rows(measure, whole[None], modality, layers, whole)

    has_value = ~np.isnan(without.reshape(len(without), -1)).all(axis=1)
    count = has_value.sum()
    pseudo_values = count * whole - (count - 1) * without
    return make_rows(measure, pseudo_values, modality, layers, whole)


def over_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the means over layers, of the measures by layer."""
    keys = [name for name in rows.columns if name not in ("layer", "value")]
    by_layer = rows[rows["layer"].notna()]
    means = by_layer.groupby(keys, dropna=False, sort=False)["value"].mean().reset_index()
    means["layer"] = pd.array([pd.NA] * len(means), dtype="Int64")
    return means[list(rows.columns)]


def with_means(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one model with those of the means over its layers, and for `BY_THIRD` over thirds of them."""
    parts = [rows, over_layers(rows)]

    by_third = rows[rows["measure"].isin(BY_THIRD)]
    last_layer = by_third.loc[by_third["measure"] == "gap", "layer"].max()
    if not pd.isna(last_layer):
        for third, numbers in layer_groups(int(last_layer) + 1).items():
            means = over_layers(by_third[by_third["layer"].isin(numbers)])
            parts.append(means.assign(measure=means["measure"] + ", " + third))

    return pd.concat(parts, ignore_index=True)


def summarize_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over pictures: instead of `picture` and `value` columns `mean`, `low`, `high` (NaN for a single picture)
    and `n`, the number of pictures with a value."""
    keys = [name for name in rows.columns if name not in ("picture", "value")]
    is_picture = rows["picture"].notna()
    split = rows.assign(each=rows["value"].where(is_picture), whole=rows["value"].where(~is_picture))
    groups = split.groupby(keys, dropna=False, sort=False)
    over_pictures = groups.agg(
        whole=("whole", "first"), mean=("each", "mean"), deviation=("each", "std"), n=("each", "count")
    ).reset_index()

    # A single picture has no deviation, so its interval is NaN whatever the quantile.
    n = over_pictures["n"]
    quantile = stdtrit(n.clip(lower=2) - 1, (1 + LEVEL) / 2)
    half_width = quantile * over_pictures["deviation"] / np.sqrt(n.clip(lower=1))
    mean = over_pictures["whole"].fillna(over_pictures["mean"])
    return over_pictures[keys].assign(mean=mean, low=mean - half_width, high=mean + half_width, n=n.astype("Int64"))


def subtract_rows(second: pd.DataFrame, first: pd.DataFrame) -> pd.DataFrame:
    """Rows of the second model minus those of the first, paired: both are of the same pictures in the same order."""
    keys = COLUMNS[:-1]
    pairs = first.merge(second, on=keys, suffixes=("_first", "_second"))
    pairs["value"] = pairs["value_second"] - pairs["value_first"]
    return pairs[COLUMNS]
