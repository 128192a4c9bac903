"""The NormLlava model classes.

Importing this package registers the classes with transformers' auto classes, so that loading a model needs no
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
    config_class: type[NormLlavaConfig],
    model_class: type[NormLlavaModel],
    class_with_lm_head: type[NormLlavaForConditionalGeneration],
) -> None:
    """Register the classes of one model type with transformers' auto classes."""
    AutoConfig.register(config_class.model_type, config_class)
    # Only a model with tiles needs NormLlavaProcessor. The folder of a model without tiles names Llava's processor, so
    # AutoProcessor loads Llava's.
    AutoProcessor.register(config_class, NormLlavaProcessor)
    AutoModel.register(config_class, model_class)
    AutoModelForCausalLM.register(config_class, class_with_lm_head)  # for text-only tools
    AutoModelForImageTextToText.register(config_class, class_with_lm_head)
    AutoModelForMultimodalLM.register(config_class, class_with_lm_head)


_register(NormLlavaConfig, NormLlavaModel, NormLlavaForConditionalGeneration)
_register(NormLlavaKeyAdapterConfig, NormLlavaKeyAdapterModel, NormLlavaKeyAdapterForConditionalGeneration)

__all__ = [
    "GlobalWeightCompensatedLayerNorm",
    "NormLlavaConfig",
    "NormLlavaForConditionalGeneration",
    "NormLlavaKeyAdapterConfig",
    "NormLlavaKeyAdapterForConditionalGeneration",
    "NormLlavaKeyAdapterModel",
    "NormLlavaModel",
    "NormLlavaProcessor",
]
