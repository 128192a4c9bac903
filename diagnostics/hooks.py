"""Hooks at the modality interface, where the vision encoder's features become tokens of the decoder."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.parts import PROJECTORS, find_decoder, find_encoder, find_norm, find_projector


class InterfaceHooks(ExitStack):
    """Calls a function with the tensor at each place of the modality interface, until it is left or closed.

    Places are `"encoder_output"` (the vision encoder's last hidden states), `"projector_input"`, `"norm_input"` (input
    of the norm after a NormLlava's projector), `"projector_output"` and `"decoder"` (input of the decoder's first
    layer). The function gets the tensor that the forward pass uses, `(..., width)`, every time that a place is passed,
    including recomputation in the backward pass.

    Args:
        model: The model.
        see: Takes the place and the tensor. What it returns for `"decoder"`, if anything, enters the first layer in
            the tensor's place; hooks that are added later see that.

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

        handles = [find_decoder(model).layers[0].register_forward_pre_hook(see_entrance, with_kwargs=True)]
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
        for handle in handles:
            self.callback(handle.remove)


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)
