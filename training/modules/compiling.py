"""Compiles the decoder's layers one by one, since the whole model would break into dozens of graphs.

On a CPU, attention "varlen" isn't compiled (attention.py), so a layer's graph breaks in two. With gradient
checkpointing, torch can't break a graph inside a layer, and so compiles nothing of the layer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module], backend: str) -> None:
    """Let each decoder layer run compiled while it is in training mode.

    The same graphs serve all layers, and rows of any length. Only a layer's `forward` is replaced, so that weights
    keep their names and hooks on the layer are called as before. Hooks on modules inside a layer are called only in
    eval mode, in which the layer doesn't run compiled.

    Args:
        layers: The layers. Under FSDP2 they must be sharded already: sharding replaces a layer's class, by which
            transformers decides whether to checkpoint the layer.
        backend: The backend for `torch.compile`.
    """
    # Under DDP, torch would split a layer's graph at the borders of DDP's buckets, which fails in older versions of
    # torch if the layer is checkpointed.
    torch._dynamo.config.optimize_ddp = False

    for layer in layers:
        _compile_layer(layer, backend)


def _compile_layer(layer: nn.Module, backend: str) -> None:
    """Replace a layer's `forward` by one that runs compiled in training mode."""
    eager_forward = layer.forward
    # layer.compile() would compile the layer's hooks too. Without `dynamic`, torch would compile a graph for each
    # sequence length.
    compiled_forward = torch.compile(eager_forward, dynamic=True, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if layer.training:
            return compiled_forward(*args, **kwargs)
        return eager_forward(*args, **kwargs)

    layer.forward = forward
