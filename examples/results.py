"""What the examples show of a model: a figure of pictures with its answers, and scores for its card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

from conversations.files import weights_fingerprint
from diagnostics.plots import MODELS, WIDTH, draw_curve, styled
from evaluation.record import Evaluation, write_evaluations


def draw_answers(
    images: Sequence[Image.Image], titles: Sequence[str], mistakes: Sequence[str], path: Path, credit: str = ""
) -> None:
    """Write a figure of eight pictures with titles. A picture's mistake, if it has one, stands below it, in red."""
    figure, axes = plt.subplots(2, 4, figsize=(10, 6))
    for axis, image, title, mistake in zip(axes.flat, images, titles, mistakes, strict=True):
        axis.imshow(image)
        axis.set_title(title, color="firebrick" if mistake else "black", fontsize=11)
        axis.set_xlabel(mistake, color="firebrick")
        axis.set(xticks=[], yticks=[], frame_on=False)
    figure.text(0.5, 0.01, credit, ha="center", fontsize=7, color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1), h_pad=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


@styled
def draw_lengths(runs: pd.DataFrame, scales: Sequence[float]) -> Figure:
    """Right names by the norm that image tokens are tested at: each arm's mean over seeds, its 95% t interval, and a
    line at the norm trained at. `runs` holds `arm`, `seed`, `length` and `names, x {scale}`."""
    figure, axis = plt.subplots(figsize=(WIDTH, 3), layout="constrained")
    for style, (arm, rows) in zip(MODELS, runs.groupby("arm", sort=False), strict=False):
        shares, length = rows.groupby("seed")[[f"names, x {scale}" for scale in scales]].mean(), rows["length"].mean()
        mean, reach = shares.mean(), stats.t.ppf(0.975, len(shares) - 1) * shares.sem()
        found = {"norm": np.multiply(scales, length), "mean": mean, "low": mean - reach, "high": mean + reach}
        draw_curve(axis, pd.DataFrame(found), "norm", label=arm, **style)
        axis.axvline(length, color=style["color"], linewidth=0.6, linestyle=":", zorder=0)
    axis.set(xlabel="norm of image tokens when tested, over text's", ylabel="right names, %", xscale="log")
    figure.legend(loc="outside upper center", ncols=4, handlelength=3)
    return figure


def record_scores(folder: Path, command: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write shares of exact matches into a model's evaluation.json, in place of earlier ones. Rows hold the other
    fields of [`Evaluation`]; the standard error follows from value and n."""
    common: dict[str, Any] = {"metric": "exact_match", "command": command, "weights": weights_fingerprint(folder)}
    errors = [(row["value"] * (1 - row["value"]) / row["n"]) ** 0.5 or None for row in rows]
    scores = [Evaluation(**common, **row, standard_error=error) for row, error in zip(rows, errors, strict=True)]
    write_evaluations(folder, scores)
