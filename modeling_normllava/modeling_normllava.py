"""NormLlava: Llava with one LayerNorm after the projector that starts visual tokens at the norm of text tokens.

"The Unseen Bias" (arXiv 2512.08374) describes the method; equation numbers below are that paper's. Saving a model
copies this file and `configuration_normllava.py` into the checkpoint folder, so they import nothing else of ours.

With `config.key_adapter_rank` the decoder's keys get adapters that depend on a token's modality, MaLoRA-style (after
arXiv 2510.26721, of which only the abstract was available: the gate is this project's choice).
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    GenerationMixin,
    LlavaForConditionalGeneration,
    LlavaModel,
    LlavaPreTrainedModel,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.utils.versions import require_version

from .configuration_normllava import NormLlavaConfig


# Older versions name the vision encoder's weights differently and would initialise it at random with only a warning.
require_version("transformers>=5.18", "NormLlava needs it: pip install -U transformers")

# Lower bound of the mean gain by which the gradient is divided (δ in eq. 25).
MIN_MEAN_GAIN = 1e-3
# Checkpoint weights that may stay unused: the head (by the base model) and the norm (where it is switched off).
# Not in the class's `_keys_to_ignore_on_load_unexpected`: vLLM drops such weights from every checkpoint.
MAY_STAY_UNUSED = re.compile(r"^lm_head\.weight$|multi_modal_projector\.norm\.(weight|bias)$")


class _CompensatedLayerNormFunction(torch.autograd.Function):
    """LayerNorm whose input gradient is computed with the gain `g / max(mean|g|, δ)` in place of `g`.

    LayerNorm's input gradient is linear in the gain, so this equals dividing the gradient at the normalised input x̂
    (eq. 26), without an extra pass over the data. The gradients of gain and bias don't depend on the gain.
    """

    @staticmethod
    def forward(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.native_layer_norm(hidden_states, weight.shape, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        hidden_states, weight, bias, _ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_states, weight, bias, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
        if grad_output is None:
            return None, None, None, None
        hidden_states, weight, bias, mean, rstd = ctx.saved_tensors
        compensated_weight = weight / weight.abs().mean().clamp(min=MIN_MEAN_GAIN)
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_output, hidden_states, weight.shape, mean, rstd, compensated_weight, bias, ctx.needs_input_grad[:3]
        )
        return grad_input, grad_weight, grad_bias, None


class Float32LayerNorm(nn.LayerNorm):
    """LayerNorm (eq. 22, 23) whose parameters stay at least float32, whatever the dtype of the model around it.

    A bfloat16 gain of 0.0134 moves in steps of 6e-5, so the updates of training would be rounded away. Statistics
    and affine are computed in float32 too; the output has the input's dtype. Arguments are `nn.LayerNorm`'s without
    `elementwise_affine`: there is always a gain, which this class keeps in float32 and its subclass divides by.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # `from_pretrained` builds models with the checkpoint's dtype as torch's default dtype.
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        super().__init__(normalized_shape, eps, bias=bias, device=device, dtype=dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "Float32LayerNorm":
        def keep_float32(tensor: torch.Tensor) -> torch.Tensor:
            applied = fn(tensor)
            return tensor.to(applied.device) if applied.dtype in (torch.float16, torch.bfloat16) else applied

        return super()._apply(keep_float32, recurse)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden_states` of shape `(..., *normalized_shape)`; same shape and dtype out."""
        # Sharded training may pass the parameters in its compute dtype, hence all three.
        dtype = torch.promote_types(torch.promote_types(hidden_states.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        output = self._normalize(hidden_states.to(dtype), self.weight.to(dtype), bias)
        return output.to(hidden_states.dtype)

    def _normalize(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.layer_norm(hidden_states, self.normalized_shape, weight, bias, self.eps)


class GlobalWeightCompensatedLayerNorm(Float32LayerNorm):
    """LayerNorm whose input gradient is divided by `max(mean|gain|, 1e-3)` (eq. 12, 24-26).

    The small gain that aligns norms would shrink every gradient that reaches the projector and the vision encoder by
    the same factor; this removes the factor. Under Adam a constant factor on a gradient cancels in the update, so
    there little is left: it changes gradient clipping and what Adam's epsilon weighs. Source: App. D.
    """

    def _normalize(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _CompensatedLayerNormFunction.apply(hidden_states, weight, bias, self.eps)[0]


class NormLlavaMultiModalProjector(LlavaMultiModalProjector):
    """Llava's two-layer MLP, followed by the norm that `config.projector_norm` names."""

    def __init__(self, config: NormLlavaConfig) -> None:
        super().__init__(config)
        norms = {"gwc": GlobalWeightCompensatedLayerNorm, "layernorm": Float32LayerNorm}
        if config.projector_norm == "none":
            self.norm: nn.Module = nn.Identity()
        else:
            self.norm = norms[config.projector_norm](config.text_config.hidden_size, eps=config.projector_norm_eps)

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        """Project `image_features` of shape `(num_images, num_patches, vision_hidden_size)` to the decoder's width."""
        return self.norm(super().forward(image_features))  # [num_images, num_patches, text_hidden_size]


class KeyAdapter(nn.Module):
    """Gated low-rank updates of a layer's keys, one of text tokens and one of visual tokens.

    `(alpha / rank) * g_m * B_m A_m h` of a token with hidden state `h` and modality `m`, where
    `g_m = sigmoid(w_m . h + c_m)`. B, w and c start at 0, so the update does too.

    These are plain parameters (first index: 0 for text, 1 for visual tokens), so that tools which quantize or adapt
    every `nn.Linear` of a decoder skip them.
    """

    def __init__(self, base: nn.Linear, config: NormLlavaConfig) -> None:
        super().__init__()
        self.scaling = config.key_adapter_alpha / config.key_adapter_rank
        self.dropout = nn.Dropout(config.key_adapter_dropout)
        size_in, size_out = base.in_features, base.out_features
        options: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Parameter(torch.empty(2, config.key_adapter_rank, size_in, **options))  # A
        self.up = nn.Parameter(torch.empty(2, config.key_adapter_rank, size_out, **options))  # B, transposed
        self.gate_weight = nn.Parameter(torch.empty(2, size_in, **options))  # w
        self.gate_bias = nn.Parameter(torch.empty(2, **options))  # c
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as LoRA does. Not in `_init_weights`: inside the decoder, transformers calls the decoder's."""
        limit = self.down.shape[-1] ** -0.5
        nn.init.uniform_(self.down, -limit, limit)
        for parameter in (self.up, self.gate_weight, self.gate_bias):
            nn.init.zeros_(parameter)

    def forward(self, hidden_states: torch.Tensor, is_visual: torch.Tensor) -> torch.Tensor:
        """Key updates `(..., size_out)` for `hidden_states` `(..., size_in)`."""
        hidden_states = hidden_states.to(self.down.dtype)
        gates = nn.functional.linear(hidden_states, self.gate_weight, self.gate_bias).sigmoid()  # [..., 2]
        of_token = torch.stack([~is_visual, is_visual], dim=-1)  # [..., 2]
        low = nn.functional.linear(self.dropout(hidden_states), self.down.flatten(0, 1)).unflatten(-1, (2, -1))
        low = low * (self.scaling * gates * of_token)[..., None]  # [..., 2, rank]
        return low.flatten(-2) @ self.up.flatten(0, 1)


class AdaptedKeyProjection(nn.Module):
    """A decoder layer's `k_proj` with a [`KeyAdapter`] beside it."""

    def __init__(self, base: nn.Linear, config: NormLlavaConfig) -> None:
        super().__init__()
        self.base = base  # not `base_layer`, by which PEFT recognises its own
        self.key_adapter = KeyAdapter(base, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Keys, before rotary embedding, of normed `hidden_states` `(batch_size, sequence_length, hidden_size)`.

        Raises:
            ValueError: if `hidden_states` has no `visual_token_mask` for these tokens.
        """
        is_visual = getattr(hidden_states, "visual_token_mask", None)
        if is_visual is None or is_visual.shape != hidden_states.shape[:-1]:
            raise ValueError(
                "The key adapters can't tell visual tokens from text: call the NormLlava model, or give its language "
                f"model visual_token_mask, a boolean tensor of shape {tuple(hidden_states.shape[:-1])}. A language "
                "model that doesn't pass such arguments to its layers can't have key adapters."
            )
        keys = self.base(hidden_states)
        return keys + self.key_adapter(hidden_states, is_visual.bool()).to(keys.dtype)


def hand_over_visual_mask(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of an attention module: attaches `visual_token_mask` to the tensor that `k_proj` gets.

    The mask is passed as an argument through the decoder and its layers, so that each pass has its own, including
    recomputation under gradient checkpointing and passes in other threads.
    """
    hidden_states = args[0] if args else kwargs["hidden_states"]
    hidden_states.visual_token_mask = kwargs.pop("visual_token_mask", None)
    return args, kwargs


def add_visual_token_mask(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of [`NormLlavaModel`]: tells the decoder which tokens are image features.

    Without a picture, as for every token after the prompt in generation, all tokens are text. In embeddings that
    already contain image features they can't be told from text: pass `visual_token_mask`, `(batch_size,
    sequence_length)`, too. `generate` doesn't accept it and needs token ids and pictures.
    """
    named = dict(zip(("input_ids", "pixel_values"), args, strict=False)) | kwargs
    tokens, image_token = named.get("input_ids"), model.config.image_token_id
    if tokens is None and named.get("inputs_embeds") is not None:
        tokens = named["inputs_embeds"]
        image_token = model.get_input_embeddings()(torch.tensor(image_token, device=tokens.device))
    if tokens is not None and "visual_token_mask" not in kwargs:
        encoded = (named.get("mm_encoder_outputs") or {}).get("image")
        mask = tokens == image_token  # [batch_size, sequence_length], of embeddings [..., hidden_size]
        mask = mask.all(-1) if mask.dim() == 3 else mask
        kwargs["visual_token_mask"] = mask & (encoded is not None or named.get("pixel_values") is not None)
    return args, kwargs


def wrap_key_projections(decoder: PreTrainedModel, config: NormLlavaConfig) -> None:
    """Put adapters around `k_proj` of every layer.

    Raises:
        ValueError: if a layer has no linear `self_attn.k_proj`, or the decoder is to run in vLLM.
    """
    if decoder.config._attn_implementation == "vllm":
        raise ValueError(
            "vLLM can't run key adapters: it never says which tokens are visual. Serve with transformers."
        )
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", [None])]
    if not all(isinstance(getattr(attention, "k_proj", None), nn.Linear) for attention in attentions):
        raise ValueError(
            f"key_adapter_rank {config.key_adapter_rank} needs a decoder whose layers have a linear self_attn.k_proj; "
            f"those of {type(decoder).__name__} have none."
        )
    for attention in attentions:
        attention.k_proj = AdaptedKeyProjection(attention.k_proj, config)
        attention.register_forward_pre_hook(hand_over_visual_mask, with_kwargs=True)


class NormLlavaPreTrainedModel(LlavaPreTrainedModel):
    """What both models share: the config, the norm's initialisation, and the check that a checkpoint fits."""

    config: NormLlavaConfig
    # One unit in device maps and in sharding, where all weights of a unit have the same dtype.
    _no_split_modules = ["NormLlavaMultiModalProjector"]  # noqa: RUF012 - as transformers has it
    # The full name: a bare "norm" would keep every norm of the language model in float32.
    _keep_in_fp32_modules_strict = {"multi_modal_projector.norm"}  # noqa: RUF012 - as transformers has it

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # From the config alone: on the meta device and during loading there are no embeddings to measure.
        if isinstance(module, Float32LayerNorm) and self.config.projector_norm_target is not None:
            init.constant_(module.weight, self.config.projector_norm_target / module.normalized_shape[0] ** 0.5)

    @classmethod
    def is_custom_code(cls) -> bool:
        """`False`, though the class is outside of transformers: for custom code transformers leaves modules without
        weights of their own as they are on loading, and the buffers that they fill (Falcon-H1's) hold anything."""
        return False

    @staticmethod
    def _finalize_model_loading(model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        """What [`PreTrainedModel.from_pretrained`] does when the weights are read, but raises where some would be
        initialised at random or dropped.

        Raises:
            ValueError: if the checkpoint's weights don't match this model, for example a plain Llava checkpoint's.
        """
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        unexpected = [key for key in loading_info.unexpected_keys if not MAY_STAY_UNUSED.search(key)]
        for problem, found in (("missing", loading_info.missing_keys), ("unexpected", unexpected)):
            if found:
                keys = sorted(found)
                parts = sorted({next(name for name in key.split(".") if name != "model") for key in keys})
                raise ValueError(
                    f"The checkpoint {model.name_or_path!r} does not fit {type(model).__name__}. Weights {problem}: "
                    f"{len(keys)} of {', '.join(parts)}, first {keys[0]!r}. Load the folder that composing or "
                    "training wrote; a Llava checkpoint is converted first: python training/compose.py --llava_model "
                    "<folder or Hub id> --output_dir <folder>"
                )
        return loading_info

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """[`PreTrainedModel.load_adapter`], but raises where a weight of the adapter is missing.

        Raises:
            ValueError: if one is.
        """
        loading_info = super().load_adapter(*args, **kwargs)
        # Of what is trained in full, quantized weights have a state that an adapter does not hold.
        missing = sorted(
            key
            for key in loading_info.missing_keys
            if ".lora_" in key or (".modules_to_save." in key and key.endswith((".weight", ".bias")))
        )
        if missing:
            raise ValueError(f"The adapter does not fit. Weights missing: {len(missing)}, first {missing[0]!r}.")
        return loading_info


class NormLlavaModel(NormLlavaPreTrainedModel, LlavaModel):
    """Vision tower, projector with norm, and language model without its head.

    Args:
        config ([`NormLlavaConfig`]): The configuration.
        vision_tower, language_model (`PreTrainedModel`, *optional*):
            Ready-built parts to use as they are; missing ones are built from `config`.
    """

    def __init__(
        self,
        config: NormLlavaConfig,
        vision_tower: PreTrainedModel | None = None,
        language_model: PreTrainedModel | None = None,
    ) -> None:
        super(LlavaModel, self).__init__(config)  # skips LlavaModel's, which builds the parts itself
        self.vision_tower = vision_tower or AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = NormLlavaMultiModalProjector(config)
        self.language_model = language_model or AutoModel.from_config(config.text_config)
        if config.key_adapter_rank:
            wrap_key_projections(self.language_model, config)
            self.register_forward_pre_hook(add_visual_token_mask, with_kwargs=True)
        self.post_init()


class NormLlavaForConditionalGeneration(NormLlavaPreTrainedModel, LlavaForConditionalGeneration, GenerationMixin):
    """NormLlava with the language-modelling head; forward and generation are Llava's.

    Args:
        config ([`NormLlavaConfig`]): The configuration.
        vision_tower, language_model (`PreTrainedModel`, *optional*), lm_head (`nn.Linear`, *optional*):
            Ready-built parts to use as they are; missing ones are built from `config`.
    """

    def __init__(
        self,
        config: NormLlavaConfig,
        vision_tower: PreTrainedModel | None = None,
        language_model: PreTrainedModel | None = None,
        lm_head: nn.Linear | None = None,
    ) -> None:
        super(LlavaForConditionalGeneration, self).__init__(config)  # skips Llava's, which builds the parts itself
        self.model = NormLlavaModel(config, vision_tower, language_model)
        self.lm_head = lm_head or nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


# Saving copies the class files of registered classes only.
NormLlavaModel.register_for_auto_class("AutoModel")
NormLlavaForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")

__all__ = ["NormLlavaForConditionalGeneration", "NormLlavaModel", "NormLlavaPreTrainedModel"]
