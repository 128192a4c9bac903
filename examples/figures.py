"""A figure of the examples: pictures with what a model says of them."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image


def draw_answers(
    images: Sequence[Image.Image], titles: Sequence[str], mistakes: Sequence[str], path: Path, credit: str = ""
) -> None:
    """Write a figure of eight pictures with titles. A picture's mistake, if it has one, stands below it, in red."""
    figure, axes = plt.subplots(2, 4, figsize=(10, 6))
    for axis, image, title, mistake in zip(axes.flat, images, titles, mistakes, strict=True):
        axis.imshow(image)
        axis.set_title(title, color="firebrick" if mistake else "black", fontsize=11)
        axis.set_xlabel(mistake, color="firebrick")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    figure.text(0.5, 0.01, credit, ha="center", fontsize=7, color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1), h_pad=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)
