"""Adds the paper's norm to a Llava in memory."""

from typing import Any

from transformers import LlavaForConditionalGeneration

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
        "llava_name_or_path": model.name_or_path or None,
        "_name_or_path": "",  # or adapters and reference models would be made from the Llava
    }
    config = NormLlavaConfig.from_dict(fields, attn_implementation=model.config._attn_implementation)

    parts = model.model
    with_norm = NormLlavaForConditionalGeneration(config, parts.vision_tower, parts.language_model, model.lm_head)
    with_norm.model.multi_modal_projector.linear_1 = parts.multi_modal_projector.linear_1
    with_norm.model.multi_modal_projector.linear_2 = parts.multi_modal_projector.linear_2
    with_norm.model.multi_modal_projector.to(model.device)
    with_norm.generation_config = model.generation_config
    for module in (with_norm, with_norm.model, with_norm.model.multi_modal_projector):
        module.training = model.training  # the Llava's own modules keep their modes
    return with_norm
