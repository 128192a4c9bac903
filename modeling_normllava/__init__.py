"""The NormLlava model class. Importing it registers the classes, so `trust_remote_code` is not needed here."""

import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, LlavaProcessor

from .configuration_normllava import NormLlavaConfig
from .key_adapters import (
    NormLlavaKeyAdapterConfig,
    NormLlavaKeyAdapterForConditionalGeneration,
    NormLlavaKeyAdapterModel,
)
from .modeling_normllava import GlobalWeightCompensatedLayerNorm, NormLlavaForConditionalGeneration, NormLlavaModel


for config, base, whole in (
    (NormLlavaConfig, NormLlavaModel, NormLlavaForConditionalGeneration),
    (NormLlavaKeyAdapterConfig, NormLlavaKeyAdapterModel, NormLlavaKeyAdapterForConditionalGeneration),
):
    transformers.AutoConfig.register(config.model_type, config)
    transformers.AutoModel.register(config, base)
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        auto_class.register(config, whole)  # the first for text-only tools
    transformers.AutoProcessor.register(config, LlavaProcessor)

__all__ = [
    "GlobalWeightCompensatedLayerNorm",
    "NormLlavaConfig",
    "NormLlavaForConditionalGeneration",
    "NormLlavaKeyAdapterConfig",
    "NormLlavaKeyAdapterForConditionalGeneration",
    "NormLlavaModel",
]
