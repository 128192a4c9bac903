"""NormLlava whose decoder adds to its keys what depends on a token's modality, MaLoRA-style.

After arXiv 2510.26721, of which only the abstract was available: the gate is this project's choice. Saving a model
with key adapters copies this file, too; one without has no need of it.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from .configuration_normllava import NormLlavaConfig
from .modeling_normllava import NormLlavaForConditionalGeneration, NormLlavaModel


@strict
class NormLlavaKeyAdapterConfig(NormLlavaConfig):
    """[`NormLlavaConfig`] with the rank of the keys' updates, which are scaled by alpha / rank, and their dropout."""

    model_type = "normllava_key_adapters"

    key_adapter_rank: int = 16
    key_adapter_alpha: float | int = 32
    key_adapter_dropout: float | int = 0.05

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        with_head = "key_adapters.NormLlavaKeyAdapterForConditionalGeneration"
        self.auto_map = dict.fromkeys(self.auto_map, with_head)
        self.auto_map["AutoConfig"] = "key_adapters.NormLlavaKeyAdapterConfig"
        self.auto_map["AutoModel"] = "key_adapters.NormLlavaKeyAdapterModel"


class KeyAdapter(nn.Module):
    """Gated low-rank updates of a layer's keys, one of text tokens and one of image tokens.

    `(alpha / rank) * g_m * B_m A_m h` of a token with hidden state `h` and modality `m`, where
    `g_m = sigmoid(w_m . h + c_m)`. B, w and c start at 0, so the update does too. Parameters have two rows, for text
    and for image tokens; no `nn.Linear` holds them, so that tools which quantize or adapt those skip them.
    """

    def __init__(self, base: nn.Linear, config: NormLlavaKeyAdapterConfig) -> None:
        super().__init__()
        rank = config.key_adapter_rank
        self.scaling = config.key_adapter_alpha / rank
        self.dropout = nn.Dropout(config.key_adapter_dropout)
        options: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Parameter(torch.empty(2, rank, base.in_features, **options))  # A
        self.up = nn.Parameter(torch.zeros(2, rank, base.out_features, **options))  # B, transposed
        self.gate_weight = nn.Parameter(torch.zeros(2, base.in_features, **options))  # w
        self.gate_bias = nn.Parameter(torch.zeros(2, **options))  # c
        # As LoRA does. Not in `_init_weights`: inside the decoder, transformers calls the decoder's.
        bound = base.in_features**-0.5
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, hidden_states: torch.Tensor, is_image_token: torch.Tensor) -> torch.Tensor:
        """Key updates `(..., size_out)` for `hidden_states` `(..., size_in)` and boolean `is_image_token` `(...)`."""
        hidden_states = hidden_states.to(self.down.dtype)
        gates = nn.functional.linear(hidden_states, self.gate_weight, self.gate_bias).sigmoid()  # [..., 2]
        modalities = torch.stack([~is_image_token, is_image_token], dim=-1)  # [..., 2]

        # Both modalities' updates, of which a token keeps its own.
        low_rank = nn.functional.linear(self.dropout(hidden_states), self.down.flatten(0, 1))  # [..., 2 * rank]
        low_rank = low_rank.unflatten(-1, (2, -1))  # [..., 2, rank]
        low_rank = low_rank * (self.scaling * gates * modalities)[..., None]  # [..., 2, rank]
        return low_rank.flatten(-2) @ self.up.flatten(0, 1)  # [..., size_out]


class AdaptedKeyProjection(nn.Module):
    """A decoder layer's `k_proj` with a [`KeyAdapter`] beside it."""

    def __init__(self, base: nn.Linear, config: NormLlavaKeyAdapterConfig) -> None:
        super().__init__()
        self.base = base  # not `base_layer`, by which PEFT recognises its own
        self.key_adapter = KeyAdapter(base, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Keys, before rotary embedding, of normed `hidden_states` `(batch_size, sequence_length, hidden_size)`."""
        is_image_token = getattr(hidden_states, "visual_token_mask", None)
        if is_image_token is None or is_image_token.shape != hidden_states.shape[:-1]:
            raise ValueError(
                "The key adapters can't tell image tokens from text: call the NormLlava model with token ids, or "
                f"give visual_token_mask, a boolean tensor of shape {tuple(hidden_states.shape[:-1])}. A language "
                "model that doesn't pass such arguments to its layers can't have key adapters."
            )
        keys = self.base(hidden_states)
        return keys + self.key_adapter(hidden_states, is_image_token.bool()).to(keys.dtype)


def wrap_key_projections(model: NormLlavaModel, config: NormLlavaKeyAdapterConfig) -> None:
    """Put adapters around `k_proj` of every layer of the decoder.

    Raises:
        ValueError: if the decoder can't have them.
    """
    decoder: Any = model.language_model
    if decoder.config._attn_implementation == "vllm":
        raise ValueError("vLLM can't run key adapters: it hides which tokens are the image's. Serve with transformers")
    attentions = list_attentions(decoder)

    for attention in attentions:
        attention.k_proj = AdaptedKeyProjection(attention.k_proj, config)
        attention.register_forward_pre_hook(hand_over_mask, with_kwargs=True)
    model.register_forward_pre_hook(add_mask, with_kwargs=True)


def list_attentions(decoder: nn.Module) -> list[Any]:
    """The attention module of each layer of a decoder.

    Raises:
        ValueError: if one has no linear `k_proj`.
    """
    attentions = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", [])]
    have_keys = [isinstance(getattr(attention, "k_proj", None), nn.Linear) for attention in attentions]
    if not attentions or not all(have_keys):
        raise ValueError(
            "Key adapters need a decoder whose layers have a linear self_attn.k_proj; those of "
            f"{type(decoder).__name__} have none."
        )
    return attentions


def add_mask(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of the model without its head: tells the decoder which tokens are image features.

    Without a picture, as for every token after the prompt in generation, all tokens are text. With embeddings in place
    of token ids, pass `visual_token_mask`, `(batch_size, sequence_length)`; `generate` doesn't accept it.
    """
    named = dict(zip(("input_ids", "pixel_values"), args, strict=False)) | kwargs
    input_ids = named.get("input_ids")
    if input_ids is None or "visual_token_mask" in kwargs:
        return args, kwargs

    encoded = (named.get("mm_encoder_outputs") or {}).get("image")
    has_picture = encoded is not None or named.get("pixel_values") is not None
    kwargs["visual_token_mask"] = (input_ids == model.config.image_token_id) & has_picture
    return args, kwargs


def hand_over_mask(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of an attention module: attaches `visual_token_mask` to the tensor that `k_proj` gets.

    The mask is passed as an argument through the decoder and its layers, so that each pass has its own, including
    recomputation under gradient checkpointing and passes in other threads.
    """
    hidden_states = args[0] if args else kwargs["hidden_states"]
    hidden_states.visual_token_mask = kwargs.pop("visual_token_mask", None)
    return args, kwargs


class NormLlavaKeyAdapterModel(NormLlavaModel):
    """[`NormLlavaModel`] with key adapters."""

    config: NormLlavaKeyAdapterConfig

    def __init__(self, config: NormLlavaKeyAdapterConfig, *parts: nn.Module | None) -> None:
        super().__init__(config, *parts)
        wrap_key_projections(self, config)


class NormLlavaKeyAdapterForConditionalGeneration(NormLlavaForConditionalGeneration):
    """[`NormLlavaForConditionalGeneration`] with key adapters."""

    config: NormLlavaKeyAdapterConfig
    _model_class = NormLlavaKeyAdapterModel


NormLlavaKeyAdapterConfig.register_for_auto_class()
NormLlavaKeyAdapterModel.register_for_auto_class("AutoModel")
NormLlavaKeyAdapterForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")
