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


def make_rows(
    measure: str, values: Any = (), modality: str = "", layers: Sequence[int] | None = None, whole: Any = None
) -> pd.DataFrame:
    """Rows of one measure.

    Args:
        values: By picture, `(num_pictures,)`, or with `layers` `(num_pictures, num_layers)`.
        layers: Layer numbers of a measure by layer.
        whole: The value over all pictures, a number or `(num_layers,)`, of a measure that is no mean over pictures.
    """
    numbers: list[Any] = [pd.NA] if layers is None else list(layers)
    columns = np.reshape(np.asarray(values, dtype=float), (-1, len(numbers)))
    pictures: list[Any] = list(range(len(columns)))
    if whole is not None:
        columns = np.concatenate([np.reshape(np.asarray(whole, dtype=float), (1, -1)), columns])
        pictures = [pd.NA, *pictures]
    rows = {
        "measure": measure,
        "modality": modality,
        "layer": pd.array(numbers * len(columns), dtype="Int64"),
        "picture": pd.array([picture for picture in pictures for _ in numbers], dtype="Int64"),
        "value": columns.ravel(),
    }
    return pd.DataFrame(rows, columns=COLUMNS)


def ratio_rows(
    measure: str, numerator: np.ndarray, denominator: np.ndarray, layers: Sequence[int] | None = None
) -> pd.DataFrame:
    """Rows of the ratio of two means over pictures, `(num_pictures,)` or `(num_pictures, num_layers)` each."""
    above, below = numerator.sum(axis=0), denominator.sum(axis=0)
    with np.errstate(invalid="ignore"):  # a single picture leaves nothing
        without = (above - numerator) / (below - denominator)
    return jackknife_rows(measure, above / below, without, layers=layers)


def jackknife_rows(
    measure: str, whole: np.ndarray, without: np.ndarray, modality: str = "", layers: Sequence[int] | None = None
) -> pd.DataFrame:
    """Rows of any statistic: `whole` of all pictures, a number or `(num_layers,)`, and `without` each picture once,
    `(num_pictures,)` or `(num_pictures, num_layers)`."""
    count = np.sum(~np.isnan(without.reshape(len(without), -1)).all(axis=1))  # pictures with a value
    pseudo = whole[None] if len(without) == 1 else count * whole - (count - 1) * without
    return make_rows(measure, pseudo, modality, layers, whole)


def over_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the means over layers, of the measures by layer."""
    keys = [name for name in rows.columns if name not in ("layer", "value")]
    means = rows[rows["layer"].notna()].groupby(keys, dropna=False, sort=False)["value"].mean().reset_index()
    return means.assign(layer=pd.array([pd.NA] * len(means), dtype="Int64"))[list(rows.columns)]


def with_means(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one model with those of the means over its layers, and for `BY_THIRD` over thirds of them."""
    found = [rows, over_layers(rows)]
    chosen = rows[rows["measure"].isin(BY_THIRD)]
    count = chosen.loc[chosen["measure"] == "gap", "layer"].max() + 1
    for name, numbers in ({} if pd.isna(count) else layer_groups(int(count))).items():
        means = over_layers(chosen[chosen["layer"].isin(numbers)])
        found.append(means.assign(measure=means["measure"] + ", " + name))
    return pd.concat(found, ignore_index=True)


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over pictures: instead of `picture` and `value` columns `mean`, `low`, `high` (NaN for a single picture)
    and `n`, the number of pictures with a value."""
    keys = [name for name in rows.columns if name not in ("picture", "value")]
    is_picture = rows["picture"].notna()
    split = rows.assign(each=rows["value"].where(is_picture), whole=rows["value"].where(~is_picture))
    grouped = split.groupby(keys, dropna=False, sort=False)
    found = grouped.agg(
        whole=("whole", "first"), mean=("each", "mean"), spread=("each", "std"), n=("each", "count")
    ).reset_index()
    half = stdtrit(found["n"].clip(lower=2) - 1, (1 + LEVEL) / 2) * found["spread"] / np.sqrt(found["n"].clip(lower=1))
    mean = found["whole"].fillna(found["mean"])
    return found[keys].assign(mean=mean, low=mean - half, high=mean + half, n=found["n"].astype("Int64"))


def subtract(second: pd.DataFrame, first: pd.DataFrame) -> pd.DataFrame:
    """Rows of the second model minus those of the first, paired: both are of the same pictures in the same order."""
    pairs = first.merge(second, on=COLUMNS[:-1], suffixes=("_first", "_second"))
    return pairs.assign(value=pairs["value_second"] - pairs["value_first"])[COLUMNS]


def by_dose(rows: pd.DataFrame) -> dict[tuple[float, str], "Summary"]:
    """Summaries of one model's rows with the columns `dose` and `control`, by these."""
    groups = rows.groupby(["dose", "control"])
    return {key: Summary.of(of.drop(columns=["model", "dose", "control"], errors="ignore")) for key, of in groups}


@dataclass(frozen=True)
class Summary:
    """What [`summarize`] returns for one model, as JSON holds it: a row for each number."""

    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "Summary":
        """The summary of a model's rows, with means over layers."""
        frame = summarize(with_means(rows))
        return cls(frame.astype(object).where(frame.notna(), None).to_dict("records"))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """As a table."""
        numbers = {"layer": "Int64", "n": "Int64", "mean": float, "low": float, "high": float}
        return pd.DataFrame(self.rows).astype(numbers)

    def look(self, measure: str, modality: str = "") -> Estimate | None:
        """One number, a mean over layers if it is measured by layer; `None` if it is not there."""
        frame = self.frame
        found = frame[(frame["measure"] == measure) & (frame["modality"] == modality) & frame["layer"].isna()]
        return None if found.empty else Estimate(*found.iloc[0][["mean", "low", "high"]].astype(float))

    def curve(self, measure: str, modality: str = "") -> pd.DataFrame:
        """The rows of a measure by layer."""
        frame = self.frame
        chosen = (frame["measure"] == measure) & (frame["modality"] == modality) & frame["layer"].notna()
        return frame[chosen].sort_values("layer")
