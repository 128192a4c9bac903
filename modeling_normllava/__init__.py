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
from .modeling_normllava import GlobalWeightCompensatedLayerNorm, NormLlavaForConditionalGeneration, NormLlavaModel


def _register(
    config: type[NormLlavaConfig],
    model: type[NormLlavaModel],
    model_with_head: type[NormLlavaForConditionalGeneration],
) -> None:
    """Let transformers' auto classes find a model type."""
    AutoConfig.register(config.model_type, config)
    AutoProcessor.register(config, LlavaProcessor)
    AutoModel.register(config, model)
    AutoModelForCausalLM.register(config, model_with_head)  # for text-only tools
    AutoModelForImageTextToText.register(config, model_with_head)
    AutoModelForMultimodalLM.register(config, model_with_head)


_register(NormLlavaConfig, NormLlavaModel, NormLlavaForConditionalGeneration)
_register(NormLlavaKeyAdapterConfig, NormLlavaKeyAdapterModel, NormLlavaKeyAdapterForConditionalGeneration)

__all__ = [
    "GlobalWeightCompensatedLayerNorm",
    "NormLlavaConfig",
    "NormLlavaForConditionalGeneration",
    "NormLlavaKeyAdapterConfig",
    "NormLlavaKeyAdapterForConditionalGeneration",
    "NormLlavaModel",
]
