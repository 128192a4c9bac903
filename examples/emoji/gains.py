"""Draws README's figure, the result of the first study in docs/findings.md, from the records in trial.jsonl.

    python -m examples.emoji.gains

An arm is one way to make and train the model. The models were asked to name drawings. gains.png shows how many more
names are right in each arm than in its controls, which are plain Llavas.

In the arms' names, T is the mean norm of text embeddings, and GWC (global weight compensation) is the kind of
LayerNorm that the paper (The Unseen Bias) puts behind the projector. "No norm" says that there is no such LayerNorm.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from normllava.diagnostics.plots import FAINT, INK, MODEL_STYLES, save_figure, styled


RECORDS = Path(__file__).with_name("trial.jsonl")
GAINS = Path(__file__).with_name("gains.png")
CONTROL = "no norm"  # the arm of the controls, as the records name it
# The other arms: their names in the records, and their titles on the figures. "Started at T" means that the projector
# was scaled once.
ARMS = {
    "started at T, no norm": "scaled once, no norm",
    "GWC at T": "LayerNorm at T",
    "GWC at 30 T": "LayerNorm, held at 30 T",
}


def differences(runs: pd.DataFrame, arm: str, control: str, pair_by: Sequence[str]) -> pd.Series:
    """For each pair of a run and its control, the run's score less the control's score.

    Args:
        runs: One row for each run, with the columns `arm`, `score` and the columns in `pair_by`.
        arm: The arm of the runs.
        control: The arm of their controls.
        pair_by: The columns in which a run and its control agree. A run without a control is left out.
    """
    scores = runs.set_index(list(pair_by))
    arm_scores = scores.loc[scores["arm"] == arm, "score"]
    control_scores = scores.loc[scores["arm"] == control, "score"]
    # pandas subtracts the scores that agree in the index, which is `pair_by`. A run without a control becomes NaN.
    return (arm_scores - control_scores).dropna()


def t_interval(values: pd.Series) -> tuple[float, float, float]:
    """The mean of `values`, and the low and the high end of Student's 95% interval around it."""
    mean = values.mean()
    half_width = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return mean, mean - half_width, mean + half_width


def read_runs(path: Path = RECORDS) -> pd.DataFrame:
    """Read the records of the runs whose models were asked to name Twemoji's drawings.

    Returns:
        One row for each run. `score` (in the records: `names`) is the percentage of right names.
    """
    records = pd.read_json(path, lines=True)
    runs = records.rename(columns={"names": "score"})
    return runs.dropna(subset="score")  # other runs only searched for a learning rate


@styled
def draw_gains(runs: pd.DataFrame) -> Figure:
    """Draw the mean gain of each arm over its controls, with a 95% interval.

    A run and its control have the same seed, and ran on the same kind of CPU or GPU. The figure is as wide as a
    telephone's screen, so that its text can be read there.
    """
    figure, axis = plt.subplots(figsize=(3.9, 2.4), layout="constrained")
    axis.axvline(0, color=FAINT, linewidth=0.8)
    # The arms' heights count downwards from 0, so in `ylim` (bottom, top) the bottom is the larger number. There is
    # some room above the first arm's label and below the last interval.
    axis.set(yticks=[], ylim=(len(ARMS) - 0.6, -0.75))

    for height, (arm, title) in enumerate(ARMS.items()):
        colour = MODEL_STYLES[height + 1]["color"]
        gains = differences(runs, arm, CONTROL, ["seed", "processor"])
        mean, low, high = t_interval(gains)

        axis.plot([low, high], [height, height], color=colour, linewidth=3, solid_capstyle="butt")
        axis.plot(mean, height, color=colour, marker="o", markersize=7, markeredgecolor=INK, markeredgewidth=0.6)

        label = f"{title}: {mean:+.1f} ({low:.1f} to {high:.1f}), {len(gains)} pairs"
        label = label.replace("-", "−")  # true minus signs before numbers; the titles have no hyphens
        # The label begins at the left edge (0), a little above the interval (-0.3).
        text = axis.annotate(label, (0, height - 0.3), xycoords=("axes fraction", "data"), fontsize=9)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # hides the line at 0 behind the text
        text.set_in_layout(False)  # otherwise a long text would make the axis narrower

    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="x", labelsize=9)
    axis.set_xlabel("right names: points more than plain Llava", fontsize=9)
    return figure


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figure."""
    build_parser().parse_args(argv)
    save_figure(draw_gains(read_runs()), GAINS)


if __name__ == "__main__":
    main()
