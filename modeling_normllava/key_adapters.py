"""NormLlava with key adapters: low-rank updates of the decoder's keys, one for text tokens and one for image tokens.

The method is MaLoRA's (arXiv 2510.26721). Only the abstract was available, so the gate is this project's own choice.
Saving a model with key adapters copies this file into the checkpoint folder too. Other models don't need it.
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
        key_adapter_rank (`int`, *optional*, defaults to 16): The rank of the keys' updates.
        key_adapter_alpha (`float`, *optional*, defaults to 32): The updates are scaled by alpha / rank.
        key_adapter_dropout (`float`, *optional*, defaults to 0.05): Dropout on the hidden states that A reads.
    """

    model_type = "normllava_key_adapters"

    key_adapter_rank: int = 16
    key_adapter_alpha: float | int = 32
    key_adapter_dropout: float | int = 0.05

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        with_head = "key_adapters.NormLlavaKeyAdapterForConditionalGeneration"
        self.auto_map = {
            "AutoConfig": "key_adapters.NormLlavaKeyAdapterConfig",
            "AutoModel": "key_adapters.NormLlavaKeyAdapterModel",
            "AutoModelForCausalLM": with_head,
            "AutoModelForImageTextToText": with_head,
            "AutoModelForMultimodalLM": with_head,
        }


class KeyAdapter(nn.Module):
    """Gated low-rank updates of a layer's keys, one for text tokens and one for image tokens.

    A token with hidden state `h` and modality `m` gets the update `(alpha / rank) * g_m * B_m A_m h`, where
    `g_m = sigmoid(w_m . h + c_m)`. B, w and c start at 0, so the update starts at 0 too.

    Each parameter has two rows, one for text and one for image tokens. The parameters aren't `nn.Linear` modules,
    because tools that quantize or adapt a model change all of its `nn.Linear` modules.
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
        # A starts at random, as in LoRA. `_init_weights` can't do this, since transformers calls the decoder's own
        # `_init_weights` for modules inside the decoder. That is no gap in `from_pretrained`: it never initialises
        # key adapters, because it refuses a checkpoint without their weights (see `describe_misfit`).
        bound = base.in_features**-0.5
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, hidden_states: torch.Tensor, is_image_token: torch.Tensor) -> torch.Tensor:
        """Compute the updates of the keys.

        Args:
            hidden_states: `(..., in_features)`.
            is_image_token: Boolean, `(...)`.

        Returns:
            `(..., out_features)`.
        """
        hidden_states = hidden_states.to(self.down.dtype)
        gates = nn.functional.linear(hidden_states, self.gate_weight, self.gate_bias).sigmoid()  # [..., 2]
        modality_mask = torch.stack([~is_image_token, is_image_token], dim=-1)  # [..., 2]
        factors = self.scaling * gates * modality_mask  # [..., 2], 0 for the modality that a token doesn't have

        # A h for both modalities, times the factors. Then one product with both Bs adds up the two modalities.
        low_rank = nn.functional.linear(self.dropout(hidden_states), self.down.flatten(0, 1))  # [..., 2 * rank]
        low_rank = low_rank.unflatten(-1, (2, -1)) * factors[..., None]  # [..., 2, rank]
        return low_rank.flatten(-2) @ self.up.flatten(0, 1)


class AdaptedKeyProjection(nn.Module):
    """A decoder layer's `k_proj`, to whose keys a [`KeyAdapter`] adds its update."""

    def __init__(self, base: nn.Linear, config: NormLlavaKeyAdapterConfig) -> None:
        super().__init__()
        self.base = base  # PEFT would take a module with an attribute `base_layer` for one of its own
        self.key_adapter = KeyAdapter(base, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the keys before rotary embedding.

        Args:
            hidden_states: `(batch_size, sequence_length, hidden_size)`, after the layer's norm. `hand_over_mask` has
                attached `visual_token_mask` to it.

        Raises:
            ValueError: if no mask is attached, or its shape doesn't fit.
        """
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
    """Give every layer of the decoder a key adapter.

    Raises:
        ValueError: if the decoder can't have key adapters.
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
        ValueError: if the decoder has no layers, or a layer has no linear `k_proj`.
    """
    layers = getattr(decoder, "layers", [])
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    have_key_projection = [isinstance(getattr(attention, "k_proj", None), nn.Linear) for attention in attentions]
    if not attentions or not all(have_key_projection):
        raise ValueError(
            "Key adapters need a decoder whose layers have a linear self_attn.k_proj; those of "
            f"{type(decoder).__name__} have none."
        )
    return attentions


def add_mask(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of the model without its head: adds an argument that says which tokens are image tokens.

    In a call without a picture all tokens are text, as are all tokens that generation adds after the prompt. Whoever
    calls the model with embeddings in place of token ids passes `visual_token_mask`, a boolean tensor of shape
    `(batch_size, sequence_length)`; `generate` doesn't accept it.
    """
    positional = dict(zip(("input_ids", "pixel_values"), args, strict=False))
    arguments = positional | kwargs
    input_ids = arguments.get("input_ids")
    if input_ids is None or "visual_token_mask" in kwargs:
        return args, kwargs

    # A picture comes as pixels, or as the vision encoder's output where a caller has encoded it before.
    encoder_outputs = arguments.get("mm_encoder_outputs") or {}
    has_picture = arguments.get("pixel_values") is not None or encoder_outputs.get("image") is not None
    kwargs["visual_token_mask"] = (input_ids == model.config.image_token_id) & has_picture
    return args, kwargs


def hand_over_mask(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of an attention module: attaches `visual_token_mask` to the tensor that `k_proj` gets.

    Up to here the decoder and its layers have passed the mask on as an argument. So every forward pass has its own
    mask, even when gradient checkpointing computes a layer again or another thread runs the model at the same time.
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
