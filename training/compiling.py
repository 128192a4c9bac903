"""Compiles the decoder's layers one by one: as a whole, the model would break into dozens of graphs.

On a CPU, attention "varlen" isn't compiled (training/attention.py). It parts a layer's graph, and of a checkpointed
layer torch then compiles nothing, since the break lies within the checkpoint.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module], backend: str) -> None:
    """Let each decoder layer run compiled while it is in training mode.

    All layers share their graphs, and so do rows of any length. Only `forward` is replaced: names of weights stay, and
    hooks on a layer are called as before. Hooks on modules inside a layer are called in eval mode alone, where the
    layer runs as it is.

    Args:
        layers: The layers, already sharded if they are to be: FSDP2 replaces their class, by which transformers
            decides whether to checkpoint.
        backend: As for `torch.compile`.
    """
    # Under DDP torch would cut a layer's graph at the borders of DDP's buckets. Older versions fail at that where the
    # layer is checkpointed.
    torch._dynamo.config.optimize_ddp = False

    for layer in layers:
        _compile_layer(layer, backend)


def _compile_layer(layer: nn.Module, backend: str) -> None:
    """Replace a layer's `forward`."""
    as_it_is = layer.forward
    # Not layer.compile(), which compiles the layer's hooks too. `dynamic`, or each length would get a graph.
    compiled = torch.compile(as_it_is, dynamic=True, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if layer.training:
            return compiled(*args, **kwargs)
        return as_it_is(*args, **kwargs)

    layer.forward = forward
