"""Draws how many more drawings each arm names right than its controls, which are plain Llavas.

    python -m examples.emoji.gains

An arm is one way to make and train the model. The figure, gains.png, shows two studies: that of docs/study.md with the
whole recipe's steps, from study/records.jsonl, and the first one in docs/findings.md with half of them, from
trial.jsonl.

In the arms' names, T is the mean norm of text embeddings, and GWC (global weight compensation) is the kind of
LayerNorm that the paper (The Unseen Bias) puts behind the projector. "No norm" says that there is no such LayerNorm.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from examples.emoji.study.analysis import compare_arms, tabulate_scores
from examples.emoji.study.records import Arm, read_study
from normllava.diagnostics.plots import FAINT, INK, MODEL_STYLES, save_figure, styled


RECORDS = Path(__file__).with_name("trial.jsonl")
GAINS = Path(__file__).with_name("gains.png")
CONTROL = "no norm"  # the arm of the controls, as the records name it
# The other arms: their names in the records, and their titles on the figure. "Started at T" means that the projector
# was scaled once.
ARMS = {
    "started at T, no norm": "scaled once, half the steps",
    "GWC at T": "LayerNorm, half the steps",
    "GWC at 30 T": "held at 30 T, half the steps",
}


@dataclass(frozen=True)
class Gain:
    """A line of the figure: an arm's mean gain over plain Llava in percentage points, with its 95% interval."""

    title: str
    colour: str
    mean: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        label = f"{self.title}: {self.mean:+.1f} ({self.low:.1f} to {self.high:.1f}), {self.num_pairs} pairs"
        return label.replace("-", "−")  # true minus signs before numbers; the titles have no hyphens


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


def measure_gains(runs: pd.DataFrame) -> list[Gain]:
    """The gain of each arm of the first study over controls with the same seeds on the same kind of machine."""
    gains = []
    for (arm, title), style in zip(ARMS.items(), MODEL_STYLES[1:], strict=True):
        by_pair = differences(runs, arm, CONTROL, ["seed", "processor"])
        gains.append(Gain(title, style["color"], *t_interval(by_pair), len(by_pair)))
    return gains


def measure_study_gains(scores: pd.DataFrame) -> list[Gain]:
    """The gain of each arm in the study of docs/study.md, over both learning rates.

    Args:
        scores: The study's runs, as `tabulate_scores` returns them.
    """
    comparison = compare_arms(scores)
    num_pairs = scores["seed"].nunique()
    titles = {Arm.SCALED: "scaled once, all steps", Arm.LAYER_NORM: "LayerNorm, all steps"}

    gains = []
    for (arm, title), style in zip(titles.items(), MODEL_STYLES[1:], strict=False):  # the last style is that of 30 T
        gain = comparison.pair(arm, Arm.NOTHING)
        gains.append(Gain(title, style["color"], gain.estimate, gain.low, gain.high, num_pairs))
    return gains


@styled
def draw_gains(gains: Sequence[Gain]) -> Figure:
    """Draw gains with their 95% intervals, one below the other.

    The figure is as wide as a telephone's screen, so that its text can be read there.
    """
    figure, axis = plt.subplots(figsize=(3.9, 0.6 + 0.6 * len(gains)), layout="constrained")
    axis.axvline(0, color=FAINT, linewidth=0.8)
    # The gains' heights count downwards from 0, so in `ylim` (bottom, top) the bottom is the larger number. There is
    # some room above the first label and below the last interval.
    axis.set(yticks=[], ylim=(len(gains) - 0.6, -0.75))

    for height, gain in enumerate(gains):
        axis.plot([gain.low, gain.high], [height, height], color=gain.colour, linewidth=3, solid_capstyle="butt")
        axis.plot(gain.mean, height, "o", color=gain.colour, markersize=7, markeredgecolor=INK, markeredgewidth=0.6)

        # The label begins at the left edge (0), a little above the interval (-0.3).
        text = axis.annotate(str(gain), (0, height - 0.3), xycoords=("axes fraction", "data"), fontsize=9)
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
    study_gains = measure_study_gains(tabulate_scores(read_study().runs))
    save_figure(draw_gains([*study_gains, *measure_gains(read_runs())]), GAINS)


if __name__ == "__main__":
    main()
