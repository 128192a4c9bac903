"""NormLlava configuration: Llava's, plus the norm that ends the projector."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import LlavaConfig


# The arms of the norm, which `NormLlavaMultiModalProjector` builds.
ProjectorNorm = Literal["gwc", "layernorm", "none"]


@strict
class NormLlavaConfig(LlavaConfig):
    r"""
    Configuration of a NormLlava model: [`LlavaConfig`], three fields of the norm, one of merged patches, and
    three records.

    Records change nothing. They say how the projector began, for the model's card: a config is all that goes from
    a composed model through each stage to a release.

    Args:
        projector_norm (`str`, *optional*, defaults to `"gwc"`):
            `"gwc"`: LayerNorm with global weight compensation in its backward pass (arXiv 2512.08374, eq. 12);
            `"layernorm"`: the same with LayerNorm's own gradient; `"none"`: no norm, which is plain Llava.
        projector_norm_target (`float`, *optional*):
            T, the L2 norm that image tokens start at (eq. 11). A new norm gets the gain `T / sqrt(hidden_size)`.
            `None` leaves the gain at 1, the default-initialised arm of the paper's Table 5.
        projector_norm_eps (`float`, *optional*, defaults to 1e-5):
            Added to the variance under the square root (eq. 22, 23).
        spatial_merge_size (`int`, *optional*, defaults to 1):
            So many neighbouring patches a side are joined into one image token before the projector, as in Qwen2-VL:
            2 makes 144 tokens of 24 x 24 patches. 1 joins none.
        projector_scaled (`bool`, *optional*, defaults to `False`):
            Record: a new projector without a norm was scaled so that image tokens started at T.
        projector_aligned (`bool`, *optional*, defaults to `False`):
            Record: the new projector was first pointed at captions' embeddings.
        llava_name_or_path (`str`, *optional*):
            Record: Hub id or folder of the Llava checkpoint that this model was converted from.
    """

    model_type = "normllava"

    projector_norm: ProjectorNorm = "gwc"
    projector_norm_target: float | int | None = None
    projector_norm_eps: float = 1e-5
    spatial_merge_size: int = 1

    projector_scaled: bool = False
    projector_aligned: bool = False
    llava_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # Always complete and with flat names: saving a model adds only its own class, and a config loaded from the
        # Hub has that repository's name in every value, which would tie a copy to its source.
        with_head = "modeling_normllava.NormLlavaForConditionalGeneration"
        self.auto_map = {
            "AutoConfig": "configuration_normllava.NormLlavaConfig",
            "AutoModel": "modeling_normllava.NormLlavaModel",
            "AutoModelForCausalLM": with_head,  # for text-only tools
            "AutoModelForImageTextToText": with_head,
            "AutoModelForMultimodalLM": with_head,
        }


NormLlavaConfig.register_for_auto_class()
