"""Hooks at the modality interface: the vision encoder's output, the projector, and the decoder's first layer."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from normllava.parts import (
    PROJECTORS,
    find_decoder,
    find_encoder,
    find_projector,
    find_projector_norm,
    layer_input,
)


class InterfaceHooks(ExitStack):
    """Calls a function with the tensor at each place of the modality interface, as long as the context is open.

    The places, in the order in which the tensors are computed:

    - `"encoder_output"`: the vision encoder's last hidden states
    - `"projector_input"`: input of the projector
    - `"norm_input"`: input of the norm module at the end of a NormLlava's projector
    - `"projector_output"`: output of the projector
    - `"decoder"`: input of the decoder's first layer

    The function gets the tensor that the forward pass uses, `(..., width)`. If gradient checkpointing recomputes the
    tensor in the backward pass, the function is called again.

    Args:
        model: The model. The hooks are removed from it when the context is left.
        on_place: The function, called with the name of the place and the tensor. If it returns a tensor for
            `"decoder"`, the first layer and hooks that are registered later get this tensor as the layer's input.

    Attributes:
        notes: Sentences for the report: which places this model doesn't have, and whether picture features reach the
            decoder in other ways than by its first layer's input.
    """

    def __init__(self, model: PreTrainedModel, on_place: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._on_place = on_place

        # All modules are found before the first hook is registered. So if `find_decoder` raises an error, because the
        # model can't be measured, no hook is left on the model.
        encoder = find_encoder(model)
        projector = find_projector(model)
        norm = find_projector_norm(model)
        first_layer = find_decoder(model).layers[0]

        self._watch_encoder(encoder)
        self._watch_projector(projector)
        self._watch_norm(norm)
        self._watch_first_layer(first_layer)

        # Qwen3-VL's vision config has a field `deepstack_visual_indexes`. The text of the whole config is searched, so
        # that such a field is found in any of the nested configs.
        has_deepstack = "deepstack" in str(model.config.to_dict())
        # Gemma 4 gives each layer a projection of the embeddings, too.
        has_inputs_by_layer = getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0)
        if has_deepstack or has_inputs_by_layer:
            self.notes.append(
                "later layers: picture features enter these too. They stay as they are when the image tokens that "
                "enter the first layer are changed"
            )

    def _watch_encoder(self, encoder: nn.Module | None) -> None:
        """Call the function at `"encoder_output"`."""
        if encoder is None:
            self.notes.append("vision encoder: not recorded, the model names none")
            return

        def pass_output(module: nn.Module, args: Any, output: Any) -> None:
            features = output if isinstance(output, torch.Tensor) else output.last_hidden_state
            self._on_place("encoder_output", features)

        self._remove_on_exit(encoder.register_forward_hook(pass_output))

    def _watch_projector(self, projector: nn.Module | None) -> None:
        """Call the function at `"projector_input"` and `"projector_output"`."""
        if projector is None:
            self.notes.append(f"projector: not recorded, no module is called {', '.join(PROJECTORS)}")
            return

        def pass_input_and_output(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            features = _first_float_tensor([*args, *kwargs.values()])
            projected = output if isinstance(output, torch.Tensor) else _first_float_tensor(output)

            # Ovis2's projector is an embedding table, which Ovis2 also calls with the ids of the tokens around a
            # picture. Ids are integers, so `features` is `None` in such a call, which is ignored.
            if features is not None and projected is not None:
                self._on_place("projector_input", features)
                self._on_place("projector_output", projected)

        self._remove_on_exit(projector.register_forward_hook(pass_input_and_output, with_kwargs=True))

    def _watch_norm(self, norm: nn.Module | None) -> None:
        """Call the function at `"norm_input"`."""
        if norm is None:  # no note, because only a NormLlava has this module
            return

        def pass_input(module: nn.Module, args: Any) -> None:
            self._on_place("norm_input", args[0])

        self._remove_on_exit(norm.register_forward_pre_hook(pass_input))

    def _watch_first_layer(self, layer: nn.Module) -> None:
        """Call the function at `"decoder"`."""

        def pass_and_replace_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            replacement = self._on_place("decoder", layer_input(args, kwargs))
            if replacement is None:
                return None  # the layer gets its input unchanged
            if args:
                return (replacement, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": replacement}

        self._remove_on_exit(layer.register_forward_pre_hook(pass_and_replace_input, with_kwargs=True))

    def _remove_on_exit(self, handle: Any) -> None:
        """Remove a hook when the context is left. `handle` is what registering the hook returned."""
        self.callback(handle.remove)


def _first_float_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """The first of the values that is a tensor of floats; `None` if there is none."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    return None
