"""Trains a run's model by training/sft.py, with another learning rate for the projector's second layer.

python -m examples.emoji.study.train RATE --config training/recipes/SmolLM2-135M-Instruct/stage2.yaml ...
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from common.console import command
from training import sft
from training.trainer import NormLlavaTrainer


class SecondLayerTrainer(NormLlavaTrainer):
    """A [`NormLlavaTrainer`] with another learning rate for the projector's second layer.

    Gradients are clipped as in `NormLlavaTrainer`: both layers of the projector together, as one module.
    """

    def __init__(self, second_layer_rate: float, *args: Any, **kwargs: Any) -> None:
        self._second_layer_rate = second_layer_rate
        super().__init__(*args, **kwargs)

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of `NormLlavaTrainer`, with the second layer's parameters in groups of their own."""
        if self.optimizer is not None:
            return self.optimizer

        optimizer = super().create_optimizer(model)
        second_layer = set(self._unwrapped().model.multi_modal_projector.linear_2.parameters())

        groups = []
        for group in optimizer.param_groups:
            others = [parameter for parameter in group["params"] if parameter not in second_layer]
            moved_out = [parameter for parameter in group["params"] if parameter in second_layer]
            if others:
                groups.append(group | {"params": others})
            if moved_out:
                groups.append(group | {"params": moved_out, "lr": self._second_layer_rate})
        optimizer.param_groups = groups
        return optimizer


def main(rate: float, argv: list[str]) -> None:
    """Train with the options of training/sft.py, and this learning rate for the projector's second layer."""
    # Convolutions would otherwise round to 10 bits on a GPU.
    torch.backends.cudnn.allow_tf32 = False

    # sft has no option for this rate, as only the study needs it. So its trainer is replaced while it runs.
    study_trainer: Any = partial(SecondLayerTrainer, rate)
    usual_trainer = sft.NormLlavaTrainer
    sft.NormLlavaTrainer = study_trainer  # type: ignore[misc]
    try:
        sft.main(argv)
    finally:
        sft.NormLlavaTrainer = usual_trainer  # type: ignore[misc]


if __name__ == "__main__":
    with command():
        main(float(sys.argv[1]), sys.argv[2:])
