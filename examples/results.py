"""Shows a model's answers: draws a figure of pictures with answers, and records scores for the model's card."""

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
    """Draw eight pictures with the model's answers, and write the figure.

    Args:
        images: The eight pictures.
        titles: A text above each picture.
        mistakes: A text below each picture, in red; empty if the model was right.
        path: File of the figure.
        credit: Who drew the pictures.
    """
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
    """Write shares of exact matches into a model's evaluation.json, where they replace earlier ones.

    Args:
        folder: Folder of the model.
        command: The command that measured the shares.
        rows: The other fields of [`~evaluation.record.Evaluation`]. The standard error is computed here.
    """
    weights = weights_fingerprint(folder)
    evaluations = []
    for row in rows:
        share = row["value"]
        error = (share * (1 - share) / row["n"]) ** 0.5
        evaluations.append(
            Evaluation(
                **row,
                metric="exact_match",
                standard_error=error or None,  # 0 would be wrong if all answers are right, or all are wrong
                command=command,
                weights=weights,
            )
        )
    write_evaluations(folder, evaluations)
