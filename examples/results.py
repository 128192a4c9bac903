"""Draws a figure of pictures with a model's answers, and records the model's scores for the model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from PIL import Image

from normllava.evaluation.record import Evaluation, write_evaluations
from normllava.files import weights_fingerprint


def draw_answers(
    images: Sequence[Image.Image], titles: Sequence[str], mistakes: Sequence[str], path: Path, credit: str = ""
) -> None:
    """Draw eight pictures with the model's answers, and write the figure.

    Args:
        images: The eight pictures.
        titles: For each picture, the text above it, with the model's answer.
        mistakes: For each picture, the text below it: what the right answer is, or "" if the model's answer is right.
            The texts of a picture with a mistake are red.
        path: File of the figure.
        credit: A line at the bottom that says who drew the pictures.
    """
    figure, axes = plt.subplots(2, 4, figsize=(10, 6))
    for axis, image, title, mistake in zip(axes.flat, images, titles, mistakes, strict=True):
        title_colour = "firebrick" if mistake else "black"
        axis.imshow(image)
        axis.set_title(title, color=title_colour, fontsize=11)
        axis.set_xlabel(mistake, color="firebrick")
        axis.set(xticks=[], yticks=[], frame_on=False)

    figure.text(0.5, 0.01, credit, ha="center", fontsize=7, color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1), h_pad=2)  # leaves the lowest 3% to the credit
    figure.savefig(path, dpi=110)
    plt.close(figure)


def record_scores(folder: Path, command: str, rows: Sequence[dict[str, Any]]) -> None:
    """Add shares of exact matches to a model's evaluation.json. They replace earlier shares of the same measurements.

    Args:
        folder: Folder of the model.
        command: The command that measured the shares.
        rows: For each share, the fields of [`~normllava.evaluation.record.Evaluation`] that this function doesn't
            fill in. `value` is the share, and `n` is the number of answers.
    """
    weights = weights_fingerprint(folder)
    evaluations = []
    for row in rows:
        share = row["value"]
        standard_error: float | None = (share * (1 - share) / row["n"]) ** 0.5
        if standard_error == 0:
            # All answers are right, or all are wrong. An error of 0 would claim that the share is certain.
            standard_error = None
        evaluation = Evaluation(
            **row,
            metric="exact_match",
            standard_error=standard_error,
            command=command,
            weights=weights,
        )
        evaluations.append(evaluation)
    write_evaluations(folder, evaluations)
