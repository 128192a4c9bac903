"""Finds the parts of a vision-language model that are measured, in the same way for all models of transformers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import BaseImageProcessor, PreTrainedModel

from normllava.errors import UserError


# Names of the module that projects the vision encoder's features to the decoder's width.
PROJECTORS = (
    "multi_modal_projector", "mm_projector", "connector", "merger", "patch_merger", "visual_embeddings_table",
    "language_projection", "aligner", "vision_projection", "projector", "resampler_model", "embed_vision",
    "vision_embed_tokens",
)  # fmt: skip
# A report shows means over groups of layers. These are the names of the groups.
THIRDS = ("first third", "middle third", "last third")
# Names of the groups in a decoder with too few layers for thirds, by the number of its layers.
FEW_LAYERS = {1: ("only layer",), 2: ("first layer", "last layer")}
# Number of evenly spread layers whose attention and keys are measured, unless the user names layers.
NUM_SPREAD = 6


class DiagnosticsError(UserError):
    """Says that a model can't be measured as requested on this data, and why. Commands show only the message."""


def find_encoder(model: PreTrainedModel) -> nn.Module | None:
    """The vision encoder; `None` if transformers knows no vision encoder of this model."""
    encoder = model.get_encoder(modality="image")
    # `get_encoder` returns the model itself, or its base model, if it knows no vision encoder of the model.
    if encoder is model or encoder is model.base_model:
        return None
    return encoder


def complete_processor(processor: Any, model: Any) -> None:
    """Give a Llava's processor what it needs to count image tokens, if its folder doesn't say so.

    Older checkpoints have no `patch_size`, and their processor then fails on the first picture.
    """
    lacks_patch_size = getattr(processor, "patch_size", 0) is None  # 0 for a processor that doesn't count by patches
    if not lacks_patch_size:
        return
    encoder: Any = find_encoder(model)
    if encoder is None:
        return
    _, num_additional = vision_tokens(encoder, processor.image_processor)
    processor.patch_size = encoder.config.patch_size
    processor.num_additional_image_tokens = num_additional
    # ViP-LLaVA always leaves out the CLS token, and its config doesn't say so.
    processor.vision_feature_select_strategy = getattr(model.config, "vision_feature_select_strategy", "default")


def vision_tokens(vision_model: PreTrainedModel, image_processor: BaseImageProcessor) -> tuple[int, int]:
    """The number of patches of a picture or tile, and of the tokens that the encoder adds, such as a CLS token."""
    picture = Image.new("RGB", (64, 48))  # any size would do
    pixel_values = image_processor(picture, return_tensors="pt")["pixel_values"]
    pixel_values = pixel_values.flatten(0, -4)  # LLaVA-NeXT's tiles have an axis of their own
    with torch.no_grad():
        outputs = vision_model(pixel_values.to(vision_model.device, vision_model.dtype))
    num_tokens = outputs.last_hidden_state.shape[1]  # [num_tiles, num_tokens, hidden_size]

    config = vision_model.config
    num_patches = (config.image_size // config.patch_size) ** 2
    return num_patches, num_tokens - num_patches


def find_projector(model: PreTrainedModel) -> nn.Module | None:
    """The module that projects vision features to the decoder's width; `None` if no module has a known name."""
    projectors = []
    for path, module in model.named_modules():
        name = path.split(".")[-1]
        if name in PROJECTORS:
            projectors.append((path, module))
    return outermost_module(projectors)


def find_projector_norm(model: PreTrainedModel) -> Any:
    """The norm module at the end of a NormLlava's projector; `None` if there is none, and for other models."""
    # Only a NormLlava's config has the field `projector_norm`. In other models, a projector's module `norm` may stand
    # elsewhere: in Qwen3-VL it is at the beginning.
    if not hasattr(model.config, "projector_norm"):
        return None

    norm = getattr(find_projector(model), "norm", None)
    # With the option `projector_norm="none"`, an `nn.Identity` is in the norm's place.
    return norm if hasattr(norm, "weight") else None


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that holds the decoder's layers.

    Raises:
        DiagnosticsError: if the decoder has no layers, or if pictures reach it by cross-attention and not as tokens.
    """
    name = type(model).__name__
    modules_with_layers = []
    for path, module in model.get_decoder().named_modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            modules_with_layers.append((path, module))

    decoder: Any = outermost_module(modules_with_layers)
    if decoder is None:
        raise DiagnosticsError(f"{name} can't be measured: its decoder has no `layers`.")
    if model.config.is_encoder_decoder or decoder.config.is_encoder_decoder:
        raise DiagnosticsError(f"{name} has no image tokens: pictures reach its decoder by cross-attention.")
    return decoder


def layer_input(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states that one of the decoder's layers gets, `(batch_size, sequence_length, hidden_size)`.

    Args:
        args: The positional arguments of the layer's `forward`. Decoders pass hidden states by position or by name.
        kwargs: Its other arguments.

    Raises:
        DiagnosticsError: if the layer takes several hidden states for each token, as Gemma 3n's take four.
    """
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if hidden_states.ndim != 3:
        raise DiagnosticsError(
            f"The decoder's layers take a tensor of shape {tuple(hidden_states.shape)}, not one hidden state for each "
            "token: such a decoder isn't measured."
        )
    return hidden_states


def outermost_module(modules: Sequence[tuple[str, nn.Module]]) -> nn.Module | None:
    """The module that is nested in the fewest other modules; `None` if there are no modules.

    Args:
        modules: Pairs of a dotted path and a module, as `named_modules` gives them.
    """
    if not modules:
        return None
    depths = [path.count(".") for path, _ in modules]  # each dot is one level of nesting
    index = depths.index(min(depths))  # the first of several modules at the same level
    _, module = modules[index]
    return module


def image_token_id(model: PreTrainedModel) -> int:
    """The token id of the image token: `input_ids` has this id at each position that holds a picture's feature.

    Raises:
        DiagnosticsError: if the config has no such id.
    """
    for field in ("image_token_id", "image_token_index"):
        token_id = getattr(model.config, field, None)
        if token_id is not None:
            return token_id
    raise DiagnosticsError(f"{type(model).__name__} has no image tokens: its config names no image_token_id.")


def layer_groups(num_layers: int) -> dict[str, np.ndarray]:
    """The numbers of the layers in each third of a decoder, by the third's name.

    In a decoder with one or two layers, each layer is a group of its own.
    """
    names = FEW_LAYERS.get(num_layers, THIRDS)
    groups = np.array_split(np.arange(num_layers), len(names))
    return dict(zip(names, groups, strict=True))


def choose_layers(num_layers: int, layers: Sequence[int] | None, count: int = NUM_SPREAD) -> list[int]:
    """Numbers of the layers to measure, in ascending order.

    Args:
        num_layers: Number of layers of the decoder.
        layers: The layers that the user chose; `None` for evenly spread layers.
        count: Number of evenly spread layers.

    Raises:
        DiagnosticsError: if the decoder lacks a chosen layer.
    """
    if layers is None:
        return spread_layers(num_layers, count)

    chosen = sorted(set(layers))
    missing = set(chosen) - set(range(num_layers))
    if missing:
        given = " ".join(str(layer) for layer in chosen)
        raise DiagnosticsError(f"The decoder has layers 0 to {num_layers - 1}, got --layers {given}.")
    return chosen


def spread_layers(num_layers: int, count: int = NUM_SPREAD) -> list[int]:
    """Numbers of `count` layers, evenly spread from the first to the last; all numbers if there are fewer layers."""
    evenly_spread = np.linspace(0, num_layers - 1, count).round().astype(int)
    return sorted(set(evenly_spread.tolist()))
