"""Draws what each arm of docs/trial.md gains over its own controls, from the records in trial.jsonl.

    python -m examples.emoji.gains

It writes gains.png beside this file; README shows it first.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from diagnostics.plots import FAINT, GREEN, INK, save, styled


RECORDS = Path(__file__).with_name("trial.jsonl")
CHART = Path(__file__).with_name("gains.png")
CONTROL = "no norm"
# Arms from top to bottom: name in the records, title on the chart, colour as in trial.png.
ARMS = [
    ("started at T, no norm", "scaled once, no norm", "#e69f00"),
    ("GWC at T", "LayerNorm at T", GREEN),
    ("GWC at 30 T", "LayerNorm, held at 30 T", "#56b4e9"),
]


def differences(runs: pd.DataFrame, arm: str, control: str, pair_by: Sequence[str]) -> pd.Series:
    """An arm's scores less those of its controls, one value a pair.

    Args:
        runs: A row a run, with `arm`, `score` and the columns of `pair_by`.
        arm: The arm, as in `runs`.
        control: The arm that it is compared with.
        pair_by: Columns in which the two runs of a pair agree. A run without a partner is left out.
    """
    scores = runs.set_index(list(pair_by))
    own = scores.loc[scores["arm"] == arm, "score"]
    controls = scores.loc[scores["arm"] == control, "score"]
    return (own - controls).dropna()


def t_interval(values: pd.Series) -> tuple[float, float, float]:
    """The mean of `values` and the ends of Student's 95% interval around it."""
    reach = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return values.mean(), values.mean() - reach, values.mean() + reach


def read_runs(path: Path = RECORDS) -> pd.DataFrame:
    """The study's runs that named Twemoji's drawings. `score` is the share of right names, in percent."""
    records = pd.read_json(path, lines=True)
    return records.rename(columns={"names": "score"}).dropna(subset="score")


@styled
def draw_gains(runs: pd.DataFrame) -> Figure:
    """The gain of each arm over its controls with a 95% interval. A pair shares its seed and its processor.

    It is as wide as a telephone's screen, where its text is read as it is.
    """
    figure, axis = plt.subplots(figsize=(3.9, 2.4), layout="constrained")
    axis.axvline(0, color=FAINT, linewidth=0.8)

    for row, (arm, title, colour) in enumerate(ARMS):
        pairs = differences(runs, arm, CONTROL, ["seed", "processor"])
        mean, low, high = t_interval(pairs)

        axis.plot([low, high], [row, row], color=colour, linewidth=3, solid_capstyle="butt")
        axis.plot(mean, row, color=colour, marker="o", markersize=7, markeredgecolor=INK, markeredgewidth=0.6)

        label = f"{title}: {mean:+.1f} ({low:.1f} to {high:.1f}), {len(pairs)} pairs".replace("-", "−")
        text = axis.annotate(label, (0, row - 0.3), xycoords=("axes fraction", "data"), fontsize=9)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the line at 0
        text.set_in_layout(False)  # the axis keeps the whole width

    axis.set(yticks=[], ylim=(len(ARMS) - 0.6, -0.75))
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="x", labelsize=9)
    axis.set_xlabel("right names: points more than plain Llava", fontsize=9)
    return figure


def main() -> None:
    """Draw the chart again."""
    save(draw_gains(read_runs()), CHART)


if __name__ == "__main__":
    main()
