"""Trains the model of a run as training/sft.py does, but the projector's second layer has its own learning rate.

    python -m examples.emoji.study.train RATE --config training/recipes/SmolLM2-135M-Instruct/stage2.yaml ...

RATE is the second layer's learning rate. The options after it are those of training/sft.py.
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
    """A [`NormLlavaTrainer`] that has another learning rate for the projector's second layer.

    Gradients are clipped as in `NormLlavaTrainer`, in which the projector's two layers count as one module.
    """

    def __init__(self, second_layer_rate: float, *args: Any, **kwargs: Any) -> None:
        self._second_layer_rate = second_layer_rate
        super().__init__(*args, **kwargs)

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of `NormLlavaTrainer`, but the second layer's parameters are in groups of their own."""
        if self.optimizer is not None:  # an earlier call has divided its groups
            return self.optimizer

        optimizer = super().create_optimizer(model)
        second_layer = set(self._unwrapped().model.multi_modal_projector.linear_2.parameters())

        groups = []
        for group in optimizer.param_groups:
            in_second_layer = [parameter for parameter in group["params"] if parameter in second_layer]
            elsewhere = [parameter for parameter in group["params"] if parameter not in second_layer]
            if elsewhere:
                groups.append(group | {"params": elsewhere})
            if in_second_layer:
                groups.append(group | {"params": in_second_layer, "lr": self._second_layer_rate})
        optimizer.param_groups = groups
        return optimizer


def main(second_layer_rate: float, argv: list[str]) -> None:
    """Train with the options of training/sft.py, and this learning rate for the projector's second layer."""
    # The study trains in float32, but convolutions on a GPU would round to TF32.
    torch.backends.cudnn.allow_tf32 = False

    # training/sft.py has no option for the second layer's rate, so its class of trainer is replaced while it runs.
    study_trainer: Any = partial(SecondLayerTrainer, second_layer_rate)
    usual_trainer = sft.NormLlavaTrainer
    sft.NormLlavaTrainer = study_trainer  # type: ignore[misc]
    try:
        sft.main(argv)
    finally:
        sft.NormLlavaTrainer = usual_trainer  # type: ignore[misc]


if __name__ == "__main__":
    with command():
        main(second_layer_rate=float(sys.argv[1]), argv=sys.argv[2:])
