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
from .key_adapters import (
    NormLlavaKeyAdapterConfig,
    NormLlavaKeyAdapterForConditionalGeneration,
    NormLlavaKeyAdapterModel,
)
from .modeling_normllava import (
    GlobalWeightCompensatedLayerNorm,
    NormLlavaForConditionalGeneration,
    NormLlavaModel,
    NormLlavaPreTrainedModel,
)


for config, base, whole in (
    (NormLlavaConfig, NormLlavaModel, NormLlavaForConditionalGeneration),
    (NormLlavaKeyAdapterConfig, NormLlavaKeyAdapterModel, NormLlavaKeyAdapterForConditionalGeneration),
):
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, base)
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        auto_class.register(config, whole)  # the first for text-only tools
    AutoProcessor.register(config, LlavaProcessor)

__all__ = [
    "GlobalWeightCompensatedLayerNorm",
    "NormLlavaConfig",
    "NormLlavaForConditionalGeneration",
    "NormLlavaKeyAdapterConfig",
    "NormLlavaKeyAdapterForConditionalGeneration",
    "NormLlavaModel",
    "NormLlavaPreTrainedModel",
]
