"""Turns a Llava into a NormLlava with the paper's norm, and a NormLlava that has none into a Llava, in memory."""

import dataclasses
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration
from transformers.initialization import no_init_weights

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from normllava.errors import UserError
from normllava.norms import text_norm_target, vocabulary_norms


def add_norm(
    model: LlavaForConditionalGeneration, projector_norm: str = "gwc", target_ratio: float | None = 1.0
) -> NormLlavaForConditionalGeneration:
    """A NormLlava with a Llava's parts and a new norm after the projector. It shares the Llava's weights.

    Args:
        model: The Llava.
        projector_norm: The kind of norm; [`NormLlavaConfig`] lists them.
        target_ratio: The norm that image tokens start at, as a multiple of T, the mean norm of the text embeddings
            (arXiv 2512.08374, eq. 11); `None` starts the gains at 1.

    Raises:
        UserError: if the model isn't a Llava, or the ratio isn't above 0.
    """
    if type(model) is not LlavaForConditionalGeneration:
        raise UserError(
            f"{type(model).__name__} can't have the norm: its own class would drop the norm's weights when the model "
            "is loaded. Only a LlavaForConditionalGeneration becomes a NormLlava; scale_projector scales any model."
        )
    if getattr(model, "is_quantized", False):
        raise UserError("The Llava is quantized: load it without quantization, add the norm, and save it.")
    if target_ratio is not None and not target_ratio > 0:
        raise UserError(f"target_ratio {target_ratio}: it is a number above 0.")

    target = None
    if target_ratio is not None and projector_norm != "none":
        target = text_norm_target(vocabulary_norms(model)) * target_ratio
    fields: dict[str, Any] = model.config.to_dict() | {
        "model_type": NormLlavaConfig.model_type,
        "projector_norm": projector_norm,
        "projector_norm_target": target,
        "_name_or_path": "",  # or adapters and reference models would be made from the Llava
    }
    config = NormLlavaConfig.from_dict(fields, attn_implementation=model.config._attn_implementation)

    parts = model.model
    # transformers would initialize the Llava's parts anew, unless `from_pretrained` has marked them.
    for module in model.modules():
        module._is_hf_initialized = True
    with_norm = NormLlavaForConditionalGeneration(config, parts.vision_tower, parts.language_model, model.lm_head)
    with_norm.model.multi_modal_projector.linear_1 = parts.multi_modal_projector.linear_1
    with_norm.model.multi_modal_projector.linear_2 = parts.multi_modal_projector.linear_2
    with_norm.model.multi_modal_projector.to(model.device)
    with_norm.generation_config = model.generation_config
    for module in (with_norm, with_norm.model, with_norm.model.multi_modal_projector):
        module.training = model.training  # the Llava's own modules keep their modes
    return with_norm


def as_llava(model: NormLlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """transformers' own Llava with the parts of a NormLlava that adds nothing to it. They share all weights.

    Args:
        model: A NormLlava without a norm, merged patches and key adapters.
    """
    fields = model.config.to_dict() | {"model_type": LlavaConfig.model_type}
    for name in added_fields(model.config):
        del fields[name]
    del fields["auto_map"]
    config = LlavaConfig.from_dict(fields, attn_implementation=model.config._attn_implementation)

    with torch.device("meta"), no_init_weights():
        llava = LlavaForConditionalGeneration(config)
    llava.model.vision_tower = model.model.vision_tower
    llava.model.multi_modal_projector.linear_1 = model.model.multi_modal_projector.linear_1
    llava.model.multi_modal_projector.linear_2 = model.model.multi_modal_projector.linear_2
    llava.model.language_model = model.model.language_model
    llava.lm_head = model.lm_head
    llava.generation_config = model.generation_config
    return llava.train(model.training)


def added_fields(config: LlavaConfig) -> set[str]:
    """The names of the fields that a config's class adds to Llava's."""
    llava_fields = {field.name for field in dataclasses.fields(LlavaConfig)}
    return {field.name for field in dataclasses.fields(config)} - llava_fields
