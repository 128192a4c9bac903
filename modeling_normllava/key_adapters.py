"""NormLlava with key adapters: low-rank updates of the decoder's keys, one for text tokens and one for image tokens.

The method is MaLoRA's (arXiv 2510.26721). Only the paper's abstract was available, so the gate of `KeyAdapter` is this
project's own choice. A checkpoint folder has a copy of this file if its model has key adapters.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from .configuration_normllava import NormLlavaConfig
from .modeling_normllava import NormLlavaForConditionalGeneration, NormLlavaModel


@strict
class NormLlavaKeyAdapterConfig(NormLlavaConfig):
    """[`NormLlavaConfig`] with the settings of the key adapters.

    Args:
        key_adapter_rank (`int`, *optional*, defaults to 16): The rank of the updates of the keys.
        key_adapter_alpha (`float`, *optional*, defaults to 32): The updates are scaled by alpha / rank.
        key_adapter_dropout (`float`, *optional*, defaults to 0.05): Dropout on the hidden states that are multiplied
            by [`KeyAdapter`]'s matrix A.
    """

    model_type = "normllava_key_adapters"

    key_adapter_rank: int = 16
    key_adapter_alpha: float | int = 32
    key_adapter_dropout: float | int = 0.05

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # `NormLlavaConfig` says why all classes are listed.
        with_lm_head = "key_adapters.NormLlavaKeyAdapterForConditionalGeneration"
        self.auto_map = {
            "AutoConfig": "key_adapters.NormLlavaKeyAdapterConfig",
            "AutoModel": "key_adapters.NormLlavaKeyAdapterModel",
            "AutoModelForCausalLM": with_lm_head,
            "AutoModelForImageTextToText": with_lm_head,
            "AutoModelForMultimodalLM": with_lm_head,
        }


class KeyAdapter(nn.Module):
    """Gated low-rank updates of a layer's keys, one for text tokens and one for image tokens.

    The key of a token with hidden state `h` and modality `m` gets the update `(alpha / rank) * g_m * B_m A_m h`, with
    the gate `g_m = sigmoid(w_m . h + c_m)`. B, w and c start at 0, so the update starts at 0 too.

    The first dimension of each parameter is the modality: 0 for text tokens, 1 for image tokens. The parameters aren't
    `nn.Linear` modules, because tools that quantize or adapt a model change all of its `nn.Linear` modules.
    """

    def __init__(self, key_projection: nn.Linear, config: NormLlavaKeyAdapterConfig) -> None:
        super().__init__()
        rank = config.key_adapter_rank
        in_features = key_projection.in_features
        out_features = key_projection.out_features
        self.scaling = config.key_adapter_alpha / rank
        self.dropout = nn.Dropout(config.key_adapter_dropout)

        weight = key_projection.weight
        like_weight: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.down = nn.Parameter(torch.empty(2, rank, in_features, **like_weight))  # A, which is filled below
        self.up = nn.Parameter(torch.zeros(2, rank, out_features, **like_weight))  # B, transposed
        self.gate_weight = nn.Parameter(torch.zeros(2, in_features, **like_weight))  # w
        self.gate_bias = nn.Parameter(torch.zeros(2, **like_weight))  # c

        # A starts at random, as in LoRA. An `_init_weights` in this file couldn't fill A: for modules inside the
        # decoder, transformers calls the `_init_weights` of the decoder's class.
        bound = in_features**-0.5
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, hidden_states: torch.Tensor, is_image_token: torch.Tensor) -> torch.Tensor:
        """Compute the updates of the keys.

        Args:
            hidden_states: `(..., in_features)`.
            is_image_token: Boolean, `(...)`; all other tokens are text.

        Returns:
            `(..., out_features)`.
        """
        hidden_states = hidden_states.to(self.down.dtype)
        gates = nn.functional.linear(hidden_states, self.gate_weight, self.gate_bias).sigmoid()  # [..., 2]
        modality_mask = torch.stack([~is_image_token, is_image_token], dim=-1)  # [..., 2]
        factors = self.scaling * gates * modality_mask  # [..., 2], 0 for the modality that a token doesn't have

        # A h for both modalities, times their factors.
        both_downs = self.down.flatten(0, 1)  # [2 * rank, in_features]
        low_rank = nn.functional.linear(self.dropout(hidden_states), both_downs)  # [..., 2 * rank]
        low_rank = low_rank.unflatten(-1, (2, -1))  # [..., 2, rank]
        low_rank = low_rank * factors[..., None]  # [..., 2, rank]

        # The product sums B A h over both modalities. The modality that a token doesn't have adds 0.
        both_ups = self.up.flatten(0, 1)  # [2 * rank, out_features]
        return low_rank.flatten(-2) @ both_ups  # [..., out_features]


class AdaptedKeyProjection(nn.Module):
    """A decoder layer's `k_proj`, with a [`KeyAdapter`] that adds an update to each key."""

    def __init__(self, base: nn.Linear, config: NormLlavaKeyAdapterConfig) -> None:
        super().__init__()
        self.base = base  # not named `base_layer`, or PEFT would take this module for one of its own
        self.key_adapter = KeyAdapter(base, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the keys before rotary embedding.

        Args:
            hidden_states: `(batch_size, sequence_length, hidden_size)`, after the layer's norm. The tensor has an
                attribute `visual_token_mask`, `(batch_size, sequence_length)`, which `hand_over_mask` sets.

        Raises:
            ValueError: if the tensor has no such mask, or a mask of another shape.
        """
        is_image_token = getattr(hidden_states, "visual_token_mask", None)
        if is_image_token is None or is_image_token.shape != hidden_states.shape[:-1]:
            raise ValueError(
                "The key adapters can't tell image tokens from text: call the NormLlava model with token ids, or "
                f"give visual_token_mask, a boolean tensor of shape {tuple(hidden_states.shape[:-1])}. A language "
                "model that doesn't pass such arguments to its layers can't have key adapters."
            )
        keys = self.base(hidden_states)
        updates = self.key_adapter(hidden_states, is_image_token.bool())
        return keys + updates.to(keys.dtype)


def wrap_key_projections(model: NormLlavaModel, config: NormLlavaKeyAdapterConfig) -> None:
    """Give every layer of a model's decoder a key adapter.

    Raises:
        ValueError: if the decoder can't have key adapters.
    """
    decoder: Any = model.language_model
    if decoder.config._attn_implementation == "vllm":
        raise ValueError("vLLM can't run key adapters: it hides which tokens are the image's. Serve with transformers")

    for attention in list_attentions(decoder):
        attention.k_proj = AdaptedKeyProjection(attention.k_proj, config)
        attention.register_forward_pre_hook(hand_over_mask, with_kwargs=True)
    model.register_forward_pre_hook(add_mask, with_kwargs=True)


def list_attentions(decoder: nn.Module) -> list[Any]:
    """The attention module of each layer of a decoder.

    Raises:
        ValueError: if the decoder has no layers, or a layer has no linear `k_proj`.
    """
    layers: Any = getattr(decoder, "layers", [])
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    key_projections = [getattr(attention, "k_proj", None) for attention in attentions]
    all_are_linear = all(isinstance(projection, nn.Linear) for projection in key_projections)
    if not attentions or not all_are_linear:
        raise ValueError(
            "Key adapters need a decoder whose layers have a linear self_attn.k_proj; those of "
            f"{type(decoder).__name__} have none."
        )
    return attentions


def add_mask(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of the model without its LM head: adds the argument `visual_token_mask`.

    This boolean tensor of shape `(batch_size, sequence_length)` says which tokens are image tokens. In a call without
    a picture all tokens are text, as are all tokens that generation adds after the prompt.

    The mask can't be made from embeddings, so callers who give embeddings without token ids must give the mask too.
    `generate` accepts no mask, so it needs token ids.
    """
    arguments = dict(kwargs)
    first_parameters = ("input_ids", "pixel_values")  # callers may give these without a keyword
    for name, value in zip(first_parameters, args, strict=False):
        arguments[name] = value
    input_ids = arguments.get("input_ids")
    if input_ids is None or "visual_token_mask" in kwargs:
        return args, kwargs

    # A picture comes as pixels, or, if the caller has encoded it already, as the vision encoder's output.
    has_pixels = arguments.get("pixel_values") is not None
    encoder_outputs = arguments.get("mm_encoder_outputs") or {}
    has_encoded_picture = encoder_outputs.get("image") is not None
    if has_pixels or has_encoded_picture:
        mask = input_ids == model.config.image_token_id
    else:
        mask = torch.zeros_like(input_ids, dtype=torch.bool)
    kwargs["visual_token_mask"] = mask
    return args, kwargs


def hand_over_mask(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of an attention module: moves `visual_token_mask` from the arguments to the hidden states.

    The decoder and its layers pass the mask on as an argument, but `k_proj` takes the hidden states alone. The mask
    becomes an attribute of the tensor and not of a module. So every forward pass has its own mask, even when gradient
    checkpointing computes a layer again or another thread runs the model at the same time.
    """
    hidden_states = args[0] if args else kwargs["hidden_states"]
    hidden_states.visual_token_mask = kwargs.pop("visual_token_mask", None)
    return args, kwargs


class NormLlavaKeyAdapterModel(NormLlavaModel):
    """[`NormLlavaModel`] with key adapters."""

    config: NormLlavaKeyAdapterConfig

    def __init__(self, config: NormLlavaKeyAdapterConfig, *parts: nn.Module | None) -> None:
        super().__init__(config, *parts)  # `parts` are a vision tower and a language model, if they are given
        wrap_key_projections(self, config)


class NormLlavaKeyAdapterForConditionalGeneration(NormLlavaForConditionalGeneration):
    """[`NormLlavaForConditionalGeneration`] with key adapters."""

    config: NormLlavaKeyAdapterConfig
    _model_class = NormLlavaKeyAdapterModel  # the class of `self.model`


# `save_pretrained` copies a class's file into the checkpoint only if the class is registered.
NormLlavaKeyAdapterConfig.register_for_auto_class()
NormLlavaKeyAdapterModel.register_for_auto_class("AutoModel")
NormLlavaKeyAdapterForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")
