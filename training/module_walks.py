"""Spares each training step two walks through all modules of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import nn


@contextmanager
def no_module_walks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which `model.train()` and `model.zero_grad()` don't visit every module.

    Trainer calls `train` in each pass and `zero_grad` in each step. At 42 layers they would take most of Python's own
    time in a step, although the model nearly always is in training mode already, and only the optimizer's parameters
    have gradients.

    In the block, `model.train()` does nothing if `model` is in training mode, whatever the modes of its submodules. So
    a callback that puts a submodule into eval mode has to put it back.
    """
    model.train()

    # Set on the instance, these hide the methods of its class. With `MethodType`, the `train` of a copy of the model
    # sets the mode of the copy.
    model.train = MethodType(set_other_mode, model)  # type: ignore[method-assign]
    model.zero_grad = optimizer.zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.train
        del model.zero_grad


def set_other_mode(model: nn.Module, mode: bool = True) -> nn.Module:
    """Do what `model.train(mode)` does, unless `model` is in this mode already."""
    if model.training == mode:
        return model
    return type(model).train(model, mode)
