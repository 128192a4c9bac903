"""Trains the model of a run as training/sft.py does. A run whose loss isn't finite ends with a status of its own.

    python -m examples.emoji.study.train --config training/recipes/SmolLM2-135M-Instruct/stage2.yaml ...

By the status the study tells a bad result, which counts, from a crash, which is run again.
"""

import logging
import sys

from normllava.command_line import command

import torch

from training import sft
from training.loop.finite import NotFiniteError


logger = logging.getLogger(__name__)

# The exit status of a run that ended because a loss or a gradient wasn't finite.
NOT_FINITE = 3


def main(argv: list[str]) -> None:
    """Train with the options of training/sft.py."""
    # Where training is in float32, convolutions on a GPU would round to TF32.
    torch.backends.cudnn.allow_tf32 = False
    try:
        sft.main(argv)
    except NotFiniteError as error:
        logger.info("%s", error)
        sys.exit(NOT_FINITE)


if __name__ == "__main__":
    with command():
        main(sys.argv[1:])
