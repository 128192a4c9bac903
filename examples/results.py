"""What the examples show of a model: a figure of pictures with its answers, and scores for its card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from PIL import Image

from common.files import weights_fingerprint
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


def record_scores(folder: Path, command: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write shares of exact matches into a model's evaluation.json, in place of earlier ones. Rows hold the other
    fields of [`Evaluation`]; the standard error follows from value and n."""
    common: dict[str, Any] = {"metric": "exact_match", "command": command, "weights": weights_fingerprint(folder)}
    errors = [(row["value"] * (1 - row["value"]) / row["n"]) ** 0.5 or None for row in rows]
    scores = [Evaluation(**common, **row, standard_error=error) for row, error in zip(rows, errors, strict=True)]
    write_evaluations(folder, scores)
