"""Draws the two figures of docs/trial.md from the records in trial.jsonl.

    python -m examples.emoji.gains

gains.png, which README shows first, has what each arm gains over its own controls; trial.png has its right names over
the norm that image embeddings are tested at.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from diagnostics.plots import FAINT, INK, MODELS, WIDTH, draw_curve, save_figure, styled


RECORDS = Path(__file__).with_name("trial.jsonl")
GAINS = Path(__file__).with_name("gains.png")
NORMS = Path(__file__).with_name("trial.png")
# Multiples of the norm trained at that runs were tested at.
SCALES = (0.03, 0.1, 0.3, 1, 3, 10, 30)
CONTROL = "no norm"
# Titles of the arms on the figures, by their names in the records.
ARMS = {
    "started at T, no norm": "scaled once, no norm",
    "GWC at T": "LayerNorm at T",
    "GWC at 30 T": "LayerNorm, held at 30 T",
}
# Both figures draw an arm in the same colour.
STYLES = dict(zip([CONTROL, *ARMS], MODELS, strict=False))


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

    for row, (arm, title) in enumerate(ARMS.items()):
        colour = STYLES[arm]["color"]
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


@styled
def draw_norms(runs: pd.DataFrame) -> Figure:
    """Right names over the norm that image embeddings are tested at, over the text's.

    Each arm's mean over seeds has a 95% t interval, and a line stands at the norm that it was trained at.
    """
    figure, axis = plt.subplots(figsize=(WIDTH, 3), layout="constrained")
    titles = {CONTROL: "no norm", **ARMS}
    columns = [f"names, x {scale}" for scale in SCALES]

    for arm, title in titles.items():
        style = STYLES[arm]
        arm_runs = runs[runs["arm"] == arm]
        trained_at = arm_runs["length"].mean()
        by_seed = arm_runs.groupby("seed")[columns].mean()  # seeds that ran on two processors count once
        intervals = [t_interval(by_seed[column]) for column in columns]

        curve = pd.DataFrame(intervals, columns=["mean", "low", "high"])
        curve["norm"] = np.multiply(SCALES, trained_at)
        draw_curve(axis, curve, "norm", label=title, **style)
        axis.axvline(trained_at, color=style["color"], linewidth=0.6, linestyle=":", zorder=0)

    axis.set(xlabel="norm of image embeddings when tested, over text's", ylabel="right names, %", xscale="log")
    figure.legend(loc="outside upper center", ncols=4, handlelength=3)
    return figure


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw both figures again."""
    build_parser().parse_args(argv)
    runs = read_runs()
    save_figure(draw_gains(runs), GAINS)
    save_figure(draw_norms(runs), NORMS)


if __name__ == "__main__":
    main()
