"""Finds the measured parts of a vision-language model, the same way for every model of transformers."""

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
FEW = {1: ("only layer",), 2: ("first layer", "last layer")}


class DiagnosticsError(UserError):
    """This model can't be measured as requested on this data; the message says why and what to do."""


def find_encoder(model: PreTrainedModel) -> nn.Module | None:
    """The vision encoder, or `None` if the model names none."""
    encoder = model.get_encoder(modality="image")
    return None if encoder is model or encoder is model.base_model else encoder


def find_projector(model: PreTrainedModel) -> nn.Module | None:
    """The module that projects vision features to the decoder, found by name; `None` if no name is known."""
    found = [(name.count("."), module) for name, module in model.named_modules() if name.split(".")[-1] in PROJECTORS]
    return min(found, key=lambda entry: entry[0])[1] if found else None


def find_norm(model: PreTrainedModel) -> Any:
    """The norm at the end of a NormLlava's projector; `None` for other models and without that norm."""
    if not hasattr(model.config, "projector_norm"):  # Qwen3-VL's merger has a `norm` too, before it
        return None
    norm = getattr(find_projector(model), "norm", None)
    return norm if hasattr(norm, "weight") else None


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The module that holds the decoder's layers. Raises `DiagnosticsError` if pictures reach none as tokens."""
    named = [
        (name.count("."), module)
        for name, module in model.get_decoder().named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
    ]
    if not named:
        raise DiagnosticsError(f"{type(model).__name__} can't be measured: its decoder has no `layers`.")
    decoder = min(named, key=lambda entry: entry[0])[1]
    if model.config.is_encoder_decoder or decoder.config.is_encoder_decoder:
        name = type(model).__name__
        raise DiagnosticsError(f"{name} has no visual tokens: pictures reach its decoder by cross-attention.")
    return decoder


def layer_groups(count: int) -> dict[str, np.ndarray]:
    """Layer numbers of a decoder with `count` layers in three groups of similar size, by name; fewer if `count` is."""
    thirds = [third for third in np.array_split(np.arange(count), 3) if len(third)]
    return dict(zip(FEW.get(len(thirds), THIRDS), thirds, strict=True))


def image_token_id(model: PreTrainedModel) -> int:
    """The id that stands for a picture's features in `input_ids`."""
    for name in ("image_token_id", "image_token_index"):
        token = getattr(model.config, name, None)
        if token is not None:
            return token
    raise DiagnosticsError(f"{type(model).__name__} has no visual tokens: its config names no image_token_id.")
