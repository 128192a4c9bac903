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
    Configuration of a NormLlava model: [`LlavaConfig`], six fields for the projector's norm and start and where the
    model comes from, and three for adapters of the decoder's keys.

    Args:
        projector_norm (`str`, *optional*, defaults to `"gwc"`):
            `"gwc"`: LayerNorm with global weight compensation in its backward pass (arXiv 2512.08374, eq. 12);
            `"layernorm"`: the same forward with LayerNorm's own gradient; `"none"`: no norm, which is plain Llava.
        projector_norm_target (`float`, *optional*):
            T, the L2 norm that visual tokens start at (eq. 11). A new norm gets the gain `T / sqrt(hidden_size)`.
            `None` leaves the gain at 1, the default-initialised arm of the paper's Table 5.
        projector_norm_eps (`float`, *optional*, defaults to 1e-5):
            Added to the variance under the square root (eq. 22, 23).
        projector_scaled (`bool`, *optional*, defaults to `False`):
            Whether a projector without a norm was scaled when it was new, so that visual tokens started at T. A record
            for the model's card; it changes nothing.
        projector_aligned (`bool`, *optional*, defaults to `False`):
            Whether the projector was first pointed at captions' embeddings (training/align.py). Also a record.
        llava_name_or_path (`str`, *optional*):
            Hub id or folder of the Llava checkpoint that this model was converted from, if it was. Also a record.
        key_adapter_rank (`int`, *optional*, defaults to 0):
            Rank of the gated low-rank updates that every layer of the decoder adds to its keys, one of visual and one
            of text tokens (MaLoRA-style, after arXiv 2510.26721). 0: the decoder stays as it is.
        key_adapter_alpha (`float`, *optional*, defaults to 32):
            The updates are scaled by `key_adapter_alpha / key_adapter_rank`.
        key_adapter_dropout (`float`, *optional*, defaults to 0.05):
            Dropout in front of the updates, in training.

    Raises:
        huggingface_hub.errors.StrictDataclassError: if a field has a value that is not allowed.
    """

    model_type = "normllava"

    projector_norm: ProjectorNorm = "gwc"
    projector_norm_target: float | int | None = None
    projector_norm_eps: float = 1e-5
    projector_scaled: bool = False
    projector_aligned: bool = False
    llava_name_or_path: str | None = None
    key_adapter_rank: int = 0
    key_adapter_alpha: float | int = 32
    key_adapter_dropout: float | int = 0.05

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # Always complete and with flat names: saving a model adds only its own class, and a config loaded from the
        # Hub has that repository's name in every value, which would tie a copy to its source.
        self.auto_map = {
            "AutoConfig": "configuration_normllava.NormLlavaConfig",
            "AutoModel": "modeling_normllava.NormLlavaModel",
            "AutoModelForCausalLM": "modeling_normllava.NormLlavaForConditionalGeneration",  # for text-only tools
            "AutoModelForImageTextToText": "modeling_normllava.NormLlavaForConditionalGeneration",
            "AutoModelForMultimodalLM": "modeling_normllava.NormLlavaForConditionalGeneration",
        }

    def validate_projector_norm(self) -> None:
        """Part of `@strict`-powered validation."""
        target, eps = self.projector_norm_target, self.projector_norm_eps
        if target is not None and not (math.isfinite(target) and target > 0):
            raise ValueError(f"projector_norm_target must be None or a finite number above 0, got {target}.")
        if not (math.isfinite(eps) and eps > 0):
            raise ValueError(f"projector_norm_eps must be a finite number above 0, got {eps}.")

    def validate_key_adapters(self) -> None:
        """Part of `@strict`-powered validation."""
        rank, alpha, dropout = self.key_adapter_rank, self.key_adapter_alpha, self.key_adapter_dropout
        if rank < 0:
            raise ValueError(f"key_adapter_rank must be 0 or more, got {rank}.")
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"key_adapter_alpha must be a finite number above 0, got {alpha}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"key_adapter_dropout must be at least 0 and below 1, got {dropout}.")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the config from a dictionary. Raises `ValueError` if it describes another type of model."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"This is the config of a {model_type!r} model, not of a {cls.model_type!r} one. To turn a Llava "
                "checkpoint into a NormLlava, run: python training/compose.py --llava_model <folder or Hub id> "
                "--output_dir <folder>"
            )
        return super().from_dict(config_dict, **kwargs)


NormLlavaConfig.register_for_auto_class()

__all__ = ["NormLlavaConfig"]
