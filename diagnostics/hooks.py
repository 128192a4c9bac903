"""Hooks at the modality interface, where the vision encoder's features become tokens of the decoder."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.parts import PROJECTORS, find_decoder, find_encoder, find_norm, find_projector


# The norm before a layer's MLP is the last of these. Layers whose MLP is given what attention is given have none.
MLP_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "ffn_norm")


class InterfaceHooks(ExitStack):
    """Calls a function with the tensor at each place of the modality interface, until it is left or closed.

    The places, in the order of a forward pass:

    - `"encoder_output"`: the vision encoder's last hidden states
    - `"projector_input"`
    - `"norm_input"`: input of the norm after a NormLlava's projector
    - `"projector_output"`
    - `"decoder"`: input of the decoder's first layer
    - `"before_mlp"`: what entered plus what that layer's attention added; only where a norm stands before its MLP
    - `"after_mlp"`: what that layer returns

    The function gets the tensor that the forward pass uses, `(..., width)`, every time that a place is passed,
    including recomputation in the backward pass.

    Args:
        model: The model. The hooks go when the context is left.
        see: Takes the place and the tensor. What it returns for `"decoder"`, unless `None`, enters the first layer in
            the tensor's place; hooks that are added later see that.

    Attributes:
        notes: Places that were not found in the model.
    """

    def __init__(self, model: PreTrainedModel, see: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._see = see

        self._watch_encoder(find_encoder(model))
        self._watch_projector(find_projector(model))
        self._watch_norm(find_norm(model))
        self._watch_first_layer(find_decoder(model).layers[0])

        if "deepstack" in str(model.config.to_dict()):
            self.notes.append("deepstack: pictures enter later layers too, which nothing at the entrance changes")

    def _watch_encoder(self, encoder: nn.Module | None) -> None:
        if encoder is None:
            self.notes.append("vision encoder: not recorded, the model names none")
            return

        def see_output(module: nn.Module, args: Any, output: Any) -> None:
            features = output if isinstance(output, torch.Tensor) else output.last_hidden_state
            self._see("encoder_output", features)

        self._remove_later(encoder.register_forward_hook(see_output))

    def _watch_projector(self, projector: nn.Module | None) -> None:
        if projector is None:
            self.notes.append(f"projector: not recorded, no module is called {', '.join(PROJECTORS)}")
            return

        def see_both(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            before = _first_float_tensor([*args, *kwargs.values()])
            after = output if isinstance(output, torch.Tensor) else _first_float_tensor(output)
            if before is not None and after is not None:  # Ovis2 also looks up its indicator tokens in this table.
                self._see("projector_input", before)
                self._see("projector_output", after)

        self._remove_later(projector.register_forward_hook(see_both, with_kwargs=True))

    def _watch_norm(self, norm: nn.Module | None) -> None:
        if norm is None:
            return

        def see_input(module: nn.Module, args: Any) -> None:
            self._see("norm_input", args[0])

        self._remove_later(norm.register_forward_pre_hook(see_input))

    def _watch_first_layer(self, layer: nn.Module) -> None:
        def see_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            changed = self._see("decoder", args[0] if args else kwargs["hidden_states"])
            if changed is None:
                return None
            if args:
                return (changed, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": changed}

        def see_before_mlp(module: nn.Module, args: Any) -> None:
            self._see("before_mlp", args[0])

        def see_output(module: nn.Module, args: Any, output: Any) -> None:
            self._see("after_mlp", output if isinstance(output, torch.Tensor) else output[0])

        self._remove_later(layer.register_forward_pre_hook(see_input, with_kwargs=True))
        mlp_norm = find_mlp_norm(layer)
        if mlp_norm is not None:
            self._remove_later(mlp_norm.register_forward_pre_hook(see_before_mlp))
        self._remove_later(layer.register_forward_hook(see_output))

    def _remove_later(self, handle: Any) -> None:
        self.callback(handle.remove)


def find_mlp_norm(layer: nn.Module) -> nn.Module | None:
    """The norm before a decoder layer's MLP, whose input is the layer's plus what attention added; `None` without."""
    children = dict(layer.named_children())
    # Where the MLP's output is normed and its input isn't, the norm after attention norms what attention returns.
    if "post_feedforward_layernorm" in children and "pre_feedforward_layernorm" not in children:
        return None

    norms = [module for name, module in children.items() if name in MLP_NORMS]
    return norms[-1] if norms else None


def _first_float_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    return None
