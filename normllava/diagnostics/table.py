"""The rows that every measure returns, and their means over pictures with 95% intervals.

Tokens of one picture are correlated, so each picture counts once, with the mean over its tokens. Intervals are
Student's t intervals over pictures. For statistics that are not means over pictures, such as ratios, they are
Student's t intervals over the jackknife's pseudo-values, one for each picture (Tukey, 1958; Efron and Stein, 1981). A
percentile bootstrap is not used, because its intervals are too narrow over few pictures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from normllava.parts import layer_groups


# An interval holds the true mean with this probability.
LEVEL = 0.95
# Columns of the rows that measures return. `modality` is "image", "text" or empty. `value` is the measure's value for
# the picture whose number is in `picture`. A measure that is no mean over pictures also has a row for all pictures,
# where `picture` is missing; in its rows for single pictures the values are pseudo-values.
COLUMNS = ["measure", "modality", "layer", "picture", "value"]
# Measures by layer that are also reported as means over each third of the layers.
BY_THIRD = ("gap", "norm_ratio", "turning")


class Estimate(NamedTuple):
    """A mean over pictures, and the ends `low` and `high` of its interval; both are NaN if there is no interval."""

    mean: float
    low: float = float("nan")
    high: float = float("nan")


@dataclass(frozen=True)
class Summary:
    """What [`summarize_rows`] returns for one model, as a list of dictionaries that can be saved as JSON.

    Attributes:
        rows: For each measure, modality and layer, a dictionary with the keys `measure`, `modality`, `layer`, `mean`,
            `low`, `high` and `n`.
    """

    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "Summary":
        """The summary of a model's rows, with means over layers."""
        frame = summarize_rows(with_means(rows))
        # JSON has no NaN, so missing numbers are `None`.
        frame_with_none = frame.astype(object).where(frame.notna(), None)
        return cls(frame_with_none.to_dict("records"))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The summary as a table."""
        return pd.DataFrame(self.rows).astype(
            {"layer": "Int64", "n": "Int64", "mean": float, "low": float, "high": float}
        )

    def look(self, measure: str, modality: str = "") -> Estimate | None:
        """The estimate of a measure, averaged over layers if the measure is by layer; `None` if it is missing."""
        chosen = self._choose(measure, modality)
        without_layer = chosen[chosen["layer"].isna()]
        if without_layer.empty:
            return None
        first = without_layer.iloc[0]
        return Estimate(float(first["mean"]), float(first["low"]), float(first["high"]))

    def curve(self, measure: str, modality: str = "") -> pd.DataFrame:
        """The rows of a measure by layer, in the order of the layers."""
        chosen = self._choose(measure, modality)
        return chosen[chosen["layer"].notna()].sort_values("layer")

    def _choose(self, measure: str, modality: str) -> pd.DataFrame:
        """The rows of a measure, with and without a layer."""
        is_chosen = (self.frame["measure"] == measure) & (self.frame["modality"] == modality)
        return self.frame[is_chosen]


def summaries_by_dose(rows: pd.DataFrame) -> dict[float, Summary]:
    """Summaries of one model's rows of a sweep, by dose in ascending order."""
    summaries = {}
    for dose, group in rows.groupby("dose"):
        # Rows that come from sweep.csv also have a column `model`.
        summaries[dose] = Summary.of(group.drop(columns=["model", "dose"], errors="ignore"))
    return summaries


def make_rows(
    measure: str, values: Any = (), modality: str = "", layers: Sequence[int] | None = None, whole: Any = None
) -> pd.DataFrame:
    """Rows of one measure.

    Args:
        measure: The measure's name.
        values: A value for each picture, `(num_pictures,)`; with `layers`, `(num_pictures, num_layers)`.
        modality: `"image"` or `"text"` if only tokens of this modality are measured.
        layers: Layer numbers of a measure by layer.
        whole: The value over all pictures, a number or `(num_layers,)`, of a measure that is no mean over pictures.
    """
    # A measure without layers is written as a measure of a single layer whose number is missing.
    layer_numbers: list[Any] = [pd.NA] if layers is None else list(layers)

    table = np.reshape(np.asarray(values, dtype=float), (-1, len(layer_numbers)))  # [num_pictures, num_layers]
    picture_numbers: list[Any] = list(range(len(table)))
    if whole is not None:
        over_pictures = np.reshape(np.asarray(whole, dtype=float), (1, -1))
        table = np.concatenate([over_pictures, table])
        picture_numbers = [pd.NA, *picture_numbers]

    # The table becomes one column of values: all layers of the first picture, then all layers of the next, and so on.
    columns = {
        "measure": measure,
        "modality": modality,
        "layer": pd.array(layer_numbers * len(picture_numbers), dtype="Int64"),
        "picture": pd.array(np.repeat(picture_numbers, len(layer_numbers)), dtype="Int64"),
        "value": table.ravel(),
    }
    return pd.DataFrame(columns, columns=COLUMNS)


def ratio_rows(
    measure: str, numerator: np.ndarray, denominator: np.ndarray, layers: Sequence[int] | None = None
) -> pd.DataFrame:
    """Rows of the ratio of two means over pictures.

    Args:
        measure: The measure's name.
        numerator: The values of each picture, `(num_pictures,)` or `(num_pictures, num_layers)`.
        denominator: The values of each picture, in the shape of `numerator`.
        layers: What [`make_rows`] takes as `layers`.
    """
    numerator_sum = numerator.sum(axis=0)
    denominator_sum = denominator.sum(axis=0)
    whole = numerator_sum / denominator_sum
    # For each picture, the ratio of all other pictures. For a single picture this is 0 / 0.
    with np.errstate(invalid="ignore"):
        without_each = (numerator_sum - numerator) / (denominator_sum - denominator)
    return jackknife_rows(measure, whole, without_each, layers=layers)


def jackknife_rows(
    measure: str, whole: np.ndarray, without_each: np.ndarray, modality: str = "", layers: Sequence[int] | None = None
) -> pd.DataFrame:
    """Rows of a statistic that is no mean over pictures.

    Args:
        measure: The measure's name.
        whole: The statistic of all pictures, a number or `(num_layers,)`.
        without_each: For each picture, the statistic of all other pictures, `(num_pictures,)` or
            `(num_pictures, num_layers)`; NaN for a picture that has no value.
        modality: What [`make_rows`] takes as `modality`.
        layers: What [`make_rows`] takes as `layers`.
    """
    # A single picture has no pseudo-value, because there are no other pictures. It gets the statistic itself.
    if len(without_each) == 1:
        values = whole[None]  # [1] or [1, num_layers]
        return make_rows(measure, values, modality, layers, whole)

    by_picture = without_each.reshape(len(without_each), -1)  # [num_pictures, num_layers or 1]
    has_value = ~np.isnan(by_picture).all(axis=1)
    num_with_value = has_value.sum()
    pseudo_values = num_with_value * whole - (num_with_value - 1) * without_each
    return make_rows(measure, pseudo_values, modality, layers, whole)


def mean_over_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the mean over layers of each measure by layer. In these rows the layer is missing."""
    group_columns = [name for name in rows.columns if name not in ("layer", "value")]
    by_layer = rows[rows["layer"].notna()]
    means = by_layer.groupby(group_columns, dropna=False, sort=False)["value"].mean().reset_index()
    means["layer"] = pd.array([pd.NA] * len(means), dtype="Int64")
    return means[list(rows.columns)]


def with_means(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one model, their means over layers, and for `BY_THIRD` their means over each third of the layers.

    The third is part of the measure's name, as in `"gap, first third"`.
    """
    tables = [rows, mean_over_layers(rows)]

    rows_by_layer = rows[rows["measure"].isin(BY_THIRD)]
    # The number of layers is taken from the gap, because norms have a further value, after the last layer.
    last_layer = rows_by_layer.loc[rows_by_layer["measure"] == "gap", "layer"].max()
    if not pd.isna(last_layer):
        for third, layers in layer_groups(int(last_layer) + 1).items():
            means = mean_over_layers(rows_by_layer[rows_by_layer["layer"].isin(layers)])
            tables.append(means.assign(measure=means["measure"] + ", " + third))

    return pd.concat(tables, ignore_index=True)


def summarize_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over pictures with their intervals.

    Returns:
        A table with the columns of `rows`, except that `mean`, `low`, `high` and `n` replace `picture` and `value`.
        `low` and `high` are the ends of the interval, NaN for a single picture; `n` is the number of pictures with a
        value.
    """
    group_columns = [name for name in rows.columns if name not in ("picture", "value")]
    has_picture = rows["picture"].notna()
    # A column for the values of single pictures, and a column for values over all pictures.
    split = rows.assign(
        value_of_picture=rows["value"].where(has_picture),
        value_over_pictures=rows["value"].where(~has_picture),
    )
    groups = split.groupby(group_columns, dropna=False, sort=False)
    statistics = groups.agg(
        whole=("value_over_pictures", "first"),
        mean=("value_of_picture", "mean"),
        deviation=("value_of_picture", "std"),
        n=("value_of_picture", "count"),
    )
    statistics = statistics.reset_index()

    # For fewer than two pictures the deviation is NaN, and so is the interval. `clip` only keeps the formulas defined.
    n = statistics["n"]
    degrees_of_freedom = n.clip(lower=2) - 1
    quantile = stdtrit(degrees_of_freedom, (1 + LEVEL) / 2)  # of Student's t
    half_width = quantile * statistics["deviation"] / np.sqrt(n.clip(lower=1))

    # For a measure that is no mean over pictures, the value over all pictures takes the place of the mean.
    mean = statistics["whole"].fillna(statistics["mean"])
    return statistics[group_columns].assign(
        mean=mean, low=mean - half_width, high=mean + half_width, n=n.astype("Int64")
    )


def subtract_rows(second: pd.DataFrame, first: pd.DataFrame) -> pd.DataFrame:
    """Rows of the second model's value minus the first model's value, for each picture.

    Both models have to be measured on the same pictures in the same order.
    """
    shared_columns = [name for name in COLUMNS if name != "value"]
    pairs = first.merge(second, on=shared_columns, suffixes=("_first", "_second"))
    pairs["value"] = pairs["value_second"] - pairs["value_first"]
    return pairs[COLUMNS]
