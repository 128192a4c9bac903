"""NormLlava's configuration: Llava's, with fields for what NormLlava's projector adds."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import LlavaConfig


# The norms that can follow the projector; `NormLlavaMultiModalProjector` builds them.
ProjectorNorm = Literal["gwc", "layernorm", "none"]


@strict
class NormLlavaConfig(LlavaConfig):
    r"""
    Configuration of a NormLlava model: [`LlavaConfig`] with the settings of the norm and of merged patches.

    Args:
        projector_norm (`str`, *optional*, defaults to `"gwc"`):
            `"gwc"`: LayerNorm with global weight compensation in its backward pass (arXiv 2512.08374, eq. 12).
            `"layernorm"`: the same forward pass, with LayerNorm's own gradient. `"none"`: no norm, as in Llava.
        projector_norm_target (`float`, *optional*):
            T, the L2 norm that image tokens start at (eq. 11). A new LayerNorm gets the gain `T / sqrt(hidden_size)`,
            with the decoder's hidden size. `None` leaves the gain at 1 (Table 5: default initialisation).
        projector_norm_eps (`float`, *optional*, defaults to 1e-5):
            LayerNorm's epsilon (eq. 22, 23).
        spatial_merge_size (`int`, *optional*, defaults to 1):
            Each square of neighbouring patches becomes one image token, as in Qwen2-VL. `spatial_merge_size` is the
            square's side in patches: 2 makes 144 tokens of 24 x 24 patches, and 1 makes a token of each patch.
    """

    model_type = "normllava"

    projector_norm: ProjectorNorm = "gwc"
    projector_norm_target: float | int | None = None
    projector_norm_eps: float = 1e-5
    spatial_merge_size: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # Saving a model would add only that model's class to `auto_map`, so all classes are listed here. The
        # `auto_map` of a config from the Hub has the repository's name before each class ("owner/name--modeling_...").
        # It is replaced too, or a copy of the model would still load its code from that repository.
        with_lm_head = "modeling_normllava.NormLlavaForConditionalGeneration"
        self.auto_map = {
            "AutoConfig": "configuration_normllava.NormLlavaConfig",
            "AutoModel": "modeling_normllava.NormLlavaModel",
            "AutoModelForCausalLM": with_lm_head,  # for text-only tools
            "AutoModelForImageTextToText": with_lm_head,
            "AutoModelForMultimodalLM": with_lm_head,
        }


# `save_pretrained` copies a class's file into the checkpoint only if the class is registered.
NormLlavaConfig.register_for_auto_class()
