"""Hooks at the modality interface, where the vision encoder's features become tokens of the decoder."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.parts import PROJECTORS, find_decoder, find_encoder, find_projector, find_projector_norm


# Names that a decoder layer may give the norm before its MLP. Where a layer has several of these norms, the last one
# stands before the MLP. A layer that gives its MLP the same input as its attention has none of them.
MLP_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "ffn_norm")


class InterfaceHooks(ExitStack):
    """Calls a function with the tensor at each place of the modality interface, until the context is left or closed.

    The places, in the order of a forward pass:

    - `"encoder_output"`: the vision encoder's last hidden states
    - `"projector_input"`: what the projector is given
    - `"norm_input"`: what the norm at the end of a NormLlava's projector is given
    - `"projector_output"`: what the projector returns
    - `"decoder"`: input of the decoder's first layer
    - `"before_mlp"`: the first layer's input plus the output of its attention; only where a norm stands before the MLP
    - `"after_mlp"`: output of the first layer

    The function gets the tensor that the forward pass uses, `(..., width)`. It is called every time that the model
    computes the tensor, and so again where gradient checkpointing recomputes it in the backward pass.

    Args:
        model: The model. Its hooks are removed when the context is left.
        on_place: Called with the name of the place and the tensor. If it returns a tensor for `"decoder"`, this tensor
            replaces the input of the first layer, also for hooks that are registered later.

    Attributes:
        notes: What could not be hooked in this model, or what a change at `"decoder"` does not reach: one line each.
    """

    def __init__(self, model: PreTrainedModel, on_place: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._on_place = on_place

        self._watch_encoder(find_encoder(model))
        self._watch_projector(find_projector(model))
        self._watch_norm(find_projector_norm(model))
        self._watch_first_layer(find_decoder(model).layers[0])

        if "deepstack" in str(model.config.to_dict()):
            self.notes.append(
                "deepstack: picture features also enter later layers, where changing the image tokens that enter the "
                "first layer does not change them"
            )

    def _watch_encoder(self, encoder: nn.Module | None) -> None:
        if encoder is None:
            self.notes.append("vision encoder: not recorded, the model names none")
            return

        def pass_output(module: nn.Module, args: Any, output: Any) -> None:
            features = output if isinstance(output, torch.Tensor) else output.last_hidden_state
            self._on_place("encoder_output", features)

        self._remove_on_exit(encoder.register_forward_hook(pass_output))

    def _watch_projector(self, projector: nn.Module | None) -> None:
        if projector is None:
            self.notes.append(f"projector: not recorded, no module is called {', '.join(PROJECTORS)}")
            return

        def pass_input_and_output(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            features = _first_float_tensor([*args, *kwargs.values()])
            projected = output if isinstance(output, torch.Tensor) else _first_float_tensor(output)

            # Ovis2's projector is an embedding table, which it also calls with ids to embed the tokens around a
            # picture. Such a call has no features, so it is passed over.
            if features is not None and projected is not None:
                self._on_place("projector_input", features)
                self._on_place("projector_output", projected)

        self._remove_on_exit(projector.register_forward_hook(pass_input_and_output, with_kwargs=True))

    def _watch_norm(self, norm: nn.Module | None) -> None:
        if norm is None:
            return

        def pass_input(module: nn.Module, args: Any) -> None:
            self._on_place("norm_input", args[0])

        self._remove_on_exit(norm.register_forward_pre_hook(pass_input))

    def _watch_first_layer(self, layer: nn.Module) -> None:
        def pass_and_replace_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            replacement = self._on_place("decoder", hidden_states)
            if replacement is None:
                return None
            if args:
                return (replacement, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": replacement}

        def pass_mlp_norm_input(module: nn.Module, args: Any) -> None:
            self._on_place("before_mlp", args[0])

        def pass_output(module: nn.Module, args: Any, output: Any) -> None:
            hidden_states = output if isinstance(output, torch.Tensor) else output[0]
            self._on_place("after_mlp", hidden_states)

        self._remove_on_exit(layer.register_forward_pre_hook(pass_and_replace_input, with_kwargs=True))
        mlp_norm = find_mlp_norm(layer)
        if mlp_norm is not None:
            self._remove_on_exit(mlp_norm.register_forward_pre_hook(pass_mlp_norm_input))
        self._remove_on_exit(layer.register_forward_hook(pass_output))

    def _remove_on_exit(self, handle: Any) -> None:
        self.callback(handle.remove)


def find_mlp_norm(layer: nn.Module) -> nn.Module | None:
    """The norm before a decoder layer's MLP; `None` if there is none.

    Its input is the layer's input plus the output of the layer's attention.
    """
    children = dict(layer.named_children())
    # A layer that norms the MLP's output but not its input (OLMo 2) norms attention's output in the same way: there,
    # `post_attention_layernorm` is given only what attention returns.
    if "post_feedforward_layernorm" in children and "pre_feedforward_layernorm" not in children:
        return None

    norms = [module for name, module in children.items() if name in MLP_NORMS]
    return norms[-1] if norms else None


def _first_float_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    return None
