"""NormLlava's configuration: Llava's, with fields for what NormLlava's projector adds."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import LlavaConfig


# The norms that can follow the projector; `NormLlavaMultiModalProjector` builds them.
ProjectorNorm = Literal["gwc", "layernorm", "none"]


@strict
class NormLlavaConfig(LlavaConfig):
    r"""
    Configuration of a NormLlava model. To [`LlavaConfig`] it adds three fields about the norm, one about merged
    patches, and three records.

    The model itself doesn't use the records. The model's card reads from them how the projector began. They are kept
    in the config, because only the config stays with a model from composing, through each training stage, to the
    release.

    Args:
        projector_norm (`str`, *optional*, defaults to `"gwc"`):
            `"gwc"`: LayerNorm with global weight compensation in its backward pass (arXiv 2512.08374, eq. 12).
            `"layernorm"`: the same forward pass, with LayerNorm's own gradient. `"none"`: no norm, as in Llava.
        projector_norm_target (`float`, *optional*):
            T, the L2 norm that image tokens start at (eq. 11). A new LayerNorm gets the gain `T / sqrt(hidden_size)`,
            with the decoder's hidden size. `None` leaves the gain at 1, as in the row of the paper's Table 5 with
            default initialisation.
        projector_norm_eps (`float`, *optional*, defaults to 1e-5):
            The number that LayerNorm adds to the variance under the square root (eq. 22, 23).
        spatial_merge_size (`int`, *optional*, defaults to 1):
            The side, in patches, of the squares of neighbouring patches that are joined into one image token before
            the projector, as in Qwen2-VL: 2 makes 144 tokens of 24 x 24 patches. 1 leaves every patch its own token.
        projector_scaled (`bool`, *optional*, defaults to `False`):
            Record: whether a new projector without a norm was scaled so that image tokens started at T.
        projector_aligned (`bool`, *optional*, defaults to `False`):
            Record: whether the new projector was first aligned with the embeddings of captions' text.
        llava_name_or_path (`str`, *optional*):
            Record: the Hub id or folder of the Llava checkpoint that this model was converted from, if it was.
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
        # Saving a model would add only that model's class to `auto_map`, so all classes are listed here. This list
        # replaces the list of a config that was loaded: a config from the Hub has its repository's name before each
        # class ("owner/name--modeling_..."), and a copy that is saved elsewhere would still load its code from there.
        with_lm_head = "modeling_normllava.NormLlavaForConditionalGeneration"
        self.auto_map = {
            "AutoConfig": "configuration_normllava.NormLlavaConfig",
            "AutoModel": "modeling_normllava.NormLlavaModel",
            "AutoModelForCausalLM": with_lm_head,  # text-only tools load a model with this class
            "AutoModelForImageTextToText": with_lm_head,
            "AutoModelForMultimodalLM": with_lm_head,
        }


NormLlavaConfig.register_for_auto_class()
