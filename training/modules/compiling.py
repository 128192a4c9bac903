"""Compiles the decoder's and the encoder's layers and the projector one by one.

The whole model would break into dozens of graphs. On a CPU, attention "varlen" isn't compiled for packed rows
(attention.py), so a decoder layer's graph breaks in two. With gradient checkpointing, torch can't break a graph inside
a layer, and so compiles nothing of the layer.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch._inductor.config
from torch import nn
from transformers import LlavaForConditionalGeneration

from normllava.parts import find_decoder


# For a norm's gradients inductor would compile another graph for batches with less than twice as many tokens as the
# hidden states are wide, in the middle of training. With this option one graph serves all, and small batches get the
# fused kernel too, which inductor holds to be slower for them. Not every version has it.
ONE_GRAPH = "triton.mix_order_reduction_non_strict_mode"


def modules_to_compile(model: LlavaForConditionalGeneration) -> list[nn.Module]:
    """The modules of a model that [`compile_modules`] should compile.

    They must be listed before FSDP's activation checkpointing wraps layers, to be compiled inside the wrappers.
    """
    return [*find_decoder(model).layers, model.model.multi_modal_projector, *_read_encoder_layers(model)]


def _read_encoder_layers(model: LlavaForConditionalGeneration) -> list[nn.Module]:
    """The encoder's layers up to the one that the model reads. Others aren't trained, and would need another graph."""
    encoder: Any = model.model.vision_tower
    # An encoder has one list of layers, whose name depends on the encoder.
    layers = next(list(module) for module in encoder.modules() if isinstance(module, nn.ModuleList))

    # An index of `hidden_states`: the embeddings, and then each layer's output.
    read_layers = model.config.vision_feature_layer
    if isinstance(read_layers, int):
        read_layers = [read_layers]
    return layers[: max(layer % (len(layers) + 1) for layer in read_layers)]


def compile_modules(modules: Iterable[nn.Module], backend: str) -> None:
    """Let each module run compiled while it is in training mode.

    The same graphs serve all layers of a kind, and rows of any length. Only a module's `forward` is replaced, so that
    weights keep their names and hooks on the module are called as before. Hooks on modules inside of it are called
    only in eval mode, in which it doesn't run compiled.

    Args:
        modules: The modules. Under FSDP2 they must be sharded already: sharding replaces a layer's class, by which
            transformers decides whether to checkpoint the layer.
        backend: The backend for `torch.compile`.
    """
    # Under DDP, torch would split a layer's graph at the borders of DDP's buckets, which fails in older versions of
    # torch if the layer is checkpointed.
    torch._dynamo.config.optimize_ddp = False

    options = None
    if backend == "inductor" and ONE_GRAPH in torch._inductor.config.get_config_copy():
        options = {ONE_GRAPH: True}
    for module in modules:
        _take_off_inner_hooks(module)
        _compile_module(module, backend, options)


def _take_off_inner_hooks(layer: nn.Module) -> None:
    """Let a layer's next pass begin with removing transformers' hooks inside of it.

    In its first pass, transformers gives an encoder hooks that collect the outputs of layers, and also attention
    weights, which nothing reads in training. The latter are inside of layers, and would break a layer's graph in two.
    """

    def take_off(layer: nn.Module, args: Any) -> None:
        handle.remove()
        for module in layer.modules():
            for key, hook in list(module._forward_hooks.items()):
                if module is not layer and hook.__qualname__.endswith("output_capturing_hook"):
                    del module._forward_hooks[key]

    handle = layer.register_forward_pre_hook(take_off)


def _compile_module(module: nn.Module, backend: str, options: dict[str, Any] | None) -> None:
    """Replace a module's `forward` by one that runs compiled in training mode."""
    eager_forward = module.forward
    # module.compile() would compile the module's hooks too. Without `dynamic`, torch would compile a graph for each
    # sequence length.
    compiled_forward = torch.compile(eager_forward, dynamic=True, backend=backend, options=options)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if module.training:
            return compiled_forward(*args, **kwargs)
        return eager_forward(*args, **kwargs)

    module.forward = forward
