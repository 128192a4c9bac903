"""The NormLlava model classes.

Importing this package registers them with transformers' auto classes, so that a program that imports it needs no
`trust_remote_code`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
)

from .configuration_normllava import NormLlavaConfig
from .key_adapters import (
    NormLlavaKeyAdapterConfig,
    NormLlavaKeyAdapterForConditionalGeneration,
    NormLlavaKeyAdapterModel,
)
from .modeling_normllava import GlobalWeightCompensatedLayerNorm, NormLlavaForConditionalGeneration, NormLlavaModel
from .processing_normllava import NormLlavaProcessor


def _register(
    config: type[NormLlavaConfig],
    model: type[NormLlavaModel],
    model_with_lm_head: type[NormLlavaForConditionalGeneration],
) -> None:
    """Let transformers' auto classes find the classes of one model type."""
    AutoConfig.register(config.model_type, config)
    # A model with tiles needs this class. The folder of a model without tiles names Llava's own processor, and
    # AutoProcessor loads that one instead.
    AutoProcessor.register(config, NormLlavaProcessor)
    AutoModel.register(config, model)
    AutoModelForCausalLM.register(config, model_with_lm_head)  # text-only tools load a model with this class
    AutoModelForImageTextToText.register(config, model_with_lm_head)
    AutoModelForMultimodalLM.register(config, model_with_lm_head)


_register(NormLlavaConfig, NormLlavaModel, NormLlavaForConditionalGeneration)
_register(NormLlavaKeyAdapterConfig, NormLlavaKeyAdapterModel, NormLlavaKeyAdapterForConditionalGeneration)

__all__ = [
    "GlobalWeightCompensatedLayerNorm",
    "NormLlavaConfig",
    "NormLlavaForConditionalGeneration",
    "NormLlavaKeyAdapterConfig",
    "NormLlavaKeyAdapterForConditionalGeneration",
    "NormLlavaModel",
    "NormLlavaProcessor",
]
