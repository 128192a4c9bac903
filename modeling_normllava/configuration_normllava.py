"""NormLlava configuration: Llava's, plus the norm that ends the projector."""

import math
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import LlavaConfig


# The arms of the norm, which `NormLlavaMultiModalProjector` builds.
ProjectorNorm = Literal["gwc", "layernorm", "none"]


@strict
class NormLlavaConfig(LlavaConfig):
    r"""
    Configuration of a NormLlava model: [`LlavaConfig`] and six fields.

    Args:
        projector_norm (`str`, *optional*, defaults to `"gwc"`):
            `"gwc"`: LayerNorm with global weight compensation in its backward pass (arXiv 2512.08374, eq. 12);
            `"layernorm"`: the same with LayerNorm's own gradient; `"none"`: no norm, which is plain Llava.
        projector_norm_target (`float`, *optional*):
            T, the L2 norm that visual tokens start at (eq. 11). A new norm gets the gain `T / sqrt(hidden_size)`.
            `None` leaves the gain at 1, the default-initialised arm of the paper's Table 5.
        projector_norm_eps (`float`, *optional*, defaults to 1e-5):
            Added to the variance under the square root (eq. 22, 23).
        projector_scaled, projector_aligned (`bool`, *optional*, defaults to `False`):
            Records for the model's card, which change nothing. Whether a new projector without a norm was scaled so
            that visual tokens started at T, and whether it was first pointed at captions' embeddings.
        llava_name_or_path (`str`, *optional*):
            Also a record: Hub id or folder of the Llava checkpoint that this model was converted from.
    """

    model_type = "normllava"

    projector_norm: ProjectorNorm = "gwc"
    projector_norm_target: float | int | None = None
    projector_norm_eps: float = 1e-5
    projector_scaled: bool = False
    projector_aligned: bool = False
    llava_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # Always complete and with flat names: saving a model adds only its own class, and a config loaded from the
        # Hub has that repository's name in every value, which would tie a copy to its source.
        whole = "modeling_normllava.NormLlavaForConditionalGeneration"
        self.auto_map = {
            "AutoConfig": "configuration_normllava.NormLlavaConfig",
            "AutoModel": "modeling_normllava.NormLlavaModel",
            "AutoModelForCausalLM": whole,  # for text-only tools
            "AutoModelForImageTextToText": whole,
            "AutoModelForMultimodalLM": whole,
        }

    def validate_projector_norm(self) -> None:
        """Part of `@strict`-powered validation."""
        target, eps = self.projector_norm_target, self.projector_norm_eps
        if target is not None and not (math.isfinite(target) and target > 0):
            raise ValueError(f"projector_norm_target must be None or a finite number above 0, got {target}.")
        if not (math.isfinite(eps) and eps > 0):
            raise ValueError(f"projector_norm_eps must be a finite number above 0, got {eps}.")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the config from a dictionary. Raises `ValueError` if it describes another type of model."""
        found = config_dict.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(
                f"This is the config of a {found!r} model, not of a {cls.model_type!r} one. To turn a Llava into a "
                "NormLlava: python training/compose.py --llava_model <folder or Hub id> --output_dir <folder>"
            )
        if config_dict.get("key_adapter_rank") and not hasattr(cls, "key_adapter_rank"):
            raise ValueError(
                "This checkpoint has key adapters and was saved by an earlier version, where they were part of "
                "this class. Load it with NormLlavaKeyAdapterForConditionalGeneration and save it again."
            )
        return super().from_dict(config_dict, **kwargs)


NormLlavaConfig.register_for_auto_class()
