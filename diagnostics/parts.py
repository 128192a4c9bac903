"""Finds the measured parts of a vision-language model, the same way for every model of transformers."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from common.errors import UserError


# Names of the module that projects the vision encoder's features to the decoder's width.
PROJECTORS = (
    "multi_modal_projector", "mm_projector", "connector", "merger", "patch_merger", "visual_embeddings_table",
    "language_projection", "aligner", "vision_projection", "projector", "resampler_model", "embed_vision",
    "vision_embed_tokens",
)  # fmt: skip
THIRDS = ("first third", "middle third", "last third")
# Names of the groups if a decoder has fewer than three layers.
FEW_LAYERS = {1: ("only layer",), 2: ("first layer", "last layer")}
# Layers whose attention and keys are measured, unless the user names some.
NUM_SPREAD = 6


class DiagnosticsError(UserError):
    """This model can't be measured as requested on this data; the message says why and what to do."""


def find_encoder(model: PreTrainedModel) -> nn.Module | None:
    """The vision encoder, or `None` if the model names none."""
    encoder = model.get_encoder(modality="image")
    if encoder is model or encoder is model.base_model:
        return None
    return encoder


def find_projector(model: PreTrainedModel) -> nn.Module | None:
    """The module that projects vision features to the decoder, found by name; `None` if no name is known."""
    named = [(name, module) for name, module in model.named_modules() if name.split(".")[-1] in PROJECTORS]
    return outermost(named)


def find_norm(model: PreTrainedModel) -> Any:
    """The norm at the end of a NormLlava's projector; `None` for other models and without that norm."""
    if not hasattr(model.config, "projector_norm"):  # Qwen3-VL's merger has a `norm` too, but before it.
        return None

    norm = getattr(find_projector(model), "norm", None)
    return norm if hasattr(norm, "weight") else None


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that holds the decoder's layers.

    Raises:
        DiagnosticsError: if it has no layers, or if pictures reach it by cross-attention and not as tokens.
    """
    name = type(model).__name__
    with_layers = [
        (path, module)
        for path, module in model.get_decoder().named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
    ]
    decoder: Any = outermost(with_layers)
    if decoder is None:
        raise DiagnosticsError(f"{name} can't be measured: its decoder has no `layers`.")
    if model.config.is_encoder_decoder or decoder.config.is_encoder_decoder:
        raise DiagnosticsError(f"{name} has no image tokens: pictures reach its decoder by cross-attention.")
    return decoder


def outermost(named: Iterable[tuple[str, nn.Module]]) -> nn.Module | None:
    """The module that is nested in the fewest others, by its dotted name; `None` of none."""
    by_depth = sorted(named, key=lambda entry: entry[0].count("."))
    return by_depth[0][1] if by_depth else None


def image_token_id(model: PreTrainedModel) -> int:
    """The id that stands for a picture's features in `input_ids`.

    Raises:
        DiagnosticsError: if the config names none.
    """
    for field in ("image_token_id", "image_token_index"):
        token_id = getattr(model.config, field, None)
        if token_id is not None:
            return token_id
    raise DiagnosticsError(f"{type(model).__name__} has no image tokens: its config names no image_token_id.")


def layer_groups(num_layers: int) -> dict[str, np.ndarray]:
    """Numbers of a decoder's layers in three groups of similar size, by name; fewer groups for fewer layers."""
    thirds = np.array_split(np.arange(num_layers), min(3, num_layers))
    names = FEW_LAYERS.get(num_layers, THIRDS)
    return dict(zip(names, thirds, strict=True))


def choose_layers(num_layers: int, layers: Sequence[int] | None, count: int = NUM_SPREAD) -> list[int]:
    """The given numbers of layers in ascending order, or `count` that are evenly spread.

    Raises:
        DiagnosticsError: if the model lacks one.
    """
    if layers is None:
        return spread_layers(num_layers, count)

    chosen = sorted(set(layers))
    if not set(chosen) <= set(range(num_layers)):
        given = " ".join(str(layer) for layer in chosen)
        raise DiagnosticsError(f"It has layers 0 to {num_layers - 1}, got --layers {given}.")
    return chosen


def spread_layers(num_layers: int, count: int = NUM_SPREAD) -> list[int]:
    """Numbers of `count` layers, evenly spread from the first to the last; of all, if there are no more."""
    evenly_spread = np.linspace(0, num_layers - 1, count).round().astype(int)
    return sorted(set(evenly_spread.tolist()))
