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

    Places are `"encoder_output"` (the vision encoder's last hidden states), `"projector_input"`, `"norm_input"` (input
    of the norm after a NormLlava's projector), `"projector_output"`, `"decoder"` (input of the decoder's first
    layer), `"before_mlp"` (of the norm before that layer's MLP, if it has one: a token and what attention added) and
    `"after_mlp"` (what that layer returns). The function gets the tensor that the forward pass uses, `(..., width)`,
    every time that a place is passed, including recomputation in the backward pass.

    Args:
        see: Takes the place and the tensor. What it returns for the last three places, if anything, is used in the
            tensor's place; hooks that are added later see that.

    Attributes:
        notes: Places that were not found in the model.
    """

    def __init__(self, model: PreTrainedModel, see: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        encoder, projector, norm = find_encoder(model), find_projector(model), find_norm(model)
        self.notes: list[str] = []

        def see_encoder(module: nn.Module, args: Any, output: Any) -> None:
            see("encoder_output", output if isinstance(output, torch.Tensor) else output.last_hidden_state)

        def see_projector(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            before = _first_tensor((*args, *kwargs.values()))
            after = output if isinstance(output, torch.Tensor) else _first_tensor(output)
            if before is not None and after is not None:  # Ovis2 also looks up its indicator tokens in this table
                see("projector_input", before)
                see("projector_output", after)

        def see_entrance(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            changed = see("decoder", args[0] if args else kwargs["hidden_states"])
            if changed is None:
                return None
            return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

        layer = find_decoder(model).layers[0]
        handles = [layer.register_forward_pre_hook(see_entrance, with_kwargs=True)]
        handles.append(layer.register_forward_hook(lambda _, args, output: see("after_mlp", output)))
        children = dict(layer.named_children())
        # Where the MLP's output is normed and its input isn't, these norm what attention returns.
        norms_after = "post_feedforward_layernorm" in children and "pre_feedforward_layernorm" not in children
        for name in [] if norms_after else [name for name in children if name in MLP_NORMS][-1:]:
            handles.append(children[name].register_forward_pre_hook(lambda _, args: see("before_mlp", args[0])))
        if encoder is None:
            self.notes.append("vision encoder: not recorded, the model names none")
        else:
            handles.append(encoder.register_forward_hook(see_encoder))
        if projector is None:
            self.notes.append(f"projector: not recorded, no module is called {', '.join(PROJECTORS)}")
        else:
            handles.append(projector.register_forward_hook(see_projector, with_kwargs=True))
        if norm is not None:

            def see_norm(module: nn.Module, args: Any) -> None:
                see("norm_input", args[0])

            handles.append(norm.register_forward_pre_hook(see_norm))
        if "deepstack" in str(model.config.to_dict()):
            self.notes.append("deepstack: pictures enter later layers too, which nothing at the entrance changes")
        for handle in handles:
            self.callback(handle.remove)


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)
