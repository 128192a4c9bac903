"""The NormLlava model class. Importing it registers the classes, so `trust_remote_code` is not needed here."""

import transformers

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
    for auto_class in (
        transformers.AutoModelForCausalLM,  # for text-only tools
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForMultimodalLM,
    ):
        auto_class.register(config, whole)
    transformers.AutoProcessor.register(config, transformers.LlavaProcessor)

__all__ = [
    "GlobalWeightCompensatedLayerNorm",
    "NormLlavaConfig",
    "NormLlavaForConditionalGeneration",
    "NormLlavaKeyAdapterConfig",
    "NormLlavaKeyAdapterForConditionalGeneration",
    "NormLlavaModel",
]
