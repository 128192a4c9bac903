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
    """Write a figure of eight pictures with titles.

    Args:
        images: The pictures.
        titles: What stands above each.
        mistakes: What stands below each, in red; empty where the model was right.
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
    """Write shares of exact matches into a model's evaluation.json, in place of earlier ones.

    Args:
        folder: The model's.
        command: Command that measured them.
        rows: The other fields of [`~evaluation.record.Evaluation`]; the standard error follows from value and n.
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
                standard_error=error or None,  # unknown where all answers are right, or all wrong
                command=command,
                weights=weights,
            )
        )
    write_evaluations(folder, evaluations)
