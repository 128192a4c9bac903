"""The NormLlava model class. Importing it registers the classes, so `trust_remote_code` is not needed here."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
    LlavaProcessor,
)

from .configuration_normllava import NormLlavaConfig
from .modeling_normllava import (
    GlobalWeightCompensatedLayerNorm,
    NormLlavaForConditionalGeneration,
    NormLlavaModel,
    NormLlavaPreTrainedModel,
)


AutoConfig.register(NormLlavaConfig.model_type, NormLlavaConfig)
AutoModel.register(NormLlavaConfig, NormLlavaModel)
AutoModelForCausalLM.register(NormLlavaConfig, NormLlavaForConditionalGeneration)  # for text-only tools
AutoModelForImageTextToText.register(NormLlavaConfig, NormLlavaForConditionalGeneration)
AutoModelForMultimodalLM.register(NormLlavaConfig, NormLlavaForConditionalGeneration)
AutoProcessor.register(NormLlavaConfig, LlavaProcessor)

__all__ = [
    "GlobalWeightCompensatedLayerNorm",
    "NormLlavaConfig",
    "NormLlavaForConditionalGeneration",
    "NormLlavaModel",
    "NormLlavaPreTrainedModel",
]
