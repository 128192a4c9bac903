"""Makes models of real shapes with random weights on the device, and writes their config and processor to a folder.

Speed doesn't depend on the values of weights, so nothing is downloaded and no weights are written to disk.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    BitImageProcessorPil,
    BitsAndBytesConfig,
    Dinov2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)
from transformers.quantizers import AutoHfQuantizer

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from normllava.conversations.chat_template import chat_template


SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
# Shapes for rehearsals on a CPU. The vocabulary has room for the 260 tokens of `byte_tokenizer`.
TINY_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
TINY_VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def small_config(tiny: bool) -> NormLlavaConfig:
    """The config of the emoji example: SmolLM2-135M with DINOv2-small, pictures of 84 x 84 pixels, 36 image tokens.

    Args:
        tiny: Whether to take the shapes of rehearsals instead.
    """
    if tiny:
        text = LlamaConfig(**TINY_TEXT, max_position_embeddings=8192, tie_word_embeddings=True)
        vision = Dinov2Config(**TINY_VISION)
    else:
        text = LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        vision = Dinov2Config(
            hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14, image_size=84
        )
    return llava_config(vision, text, vision_feature_layer=-1, select_strategy="default")


def large_config(tiny: bool, num_layers: int = 28) -> NormLlavaConfig:
    """The config of Qwen2.5-7B with SigLIP-SO400M-patch14-384 and 729 image tokens.

    Args:
        tiny: Whether to take the shapes of rehearsals instead.
        num_layers: Number of the decoder's layers. The shapes of rehearsals have their own.
    """
    if tiny:
        text = Qwen2Config(**TINY_TEXT, max_position_embeddings=32768, tie_word_embeddings=False)
        vision = SiglipVisionConfig(**TINY_VISION, vision_use_head=False)
    else:
        text = Qwen2Config(
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=num_layers,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
            max_position_embeddings=32768,
            tie_word_embeddings=False,
        )
        vision = SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
            vision_use_head=False,
        )
    return llava_config(vision, text, vision_feature_layer=-2, select_strategy="full")


def llava_config(
    vision: PreTrainedConfig, text: PreTrainedConfig, vision_feature_layer: int, select_strategy: str
) -> NormLlavaConfig:
    """The config of a NormLlava with this vision encoder and this language model."""
    return NormLlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=byte_tokenizer().convert_tokens_to_ids("<image>"),
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_layer=vision_feature_layer,
        vision_feature_select_strategy=select_strategy,
        projector_norm_target=1.0,  # any value would do, as speed doesn't depend on it
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes and `SPECIAL_TOKENS`. So each character of an ASCII text is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS,
        padding_side="left",  # as in composed models
    )


def write_folder(config: NormLlavaConfig, folder: Path) -> None:
    """Write the config and the processor: a checkpoint without weights."""
    vision = config.vision_config
    # Nothing is cropped, but `LlavaProcessor` computes the number of image tokens from the crop size.
    size = {"height": vision.image_size, "width": vision.image_size}
    if isinstance(vision, Dinov2Config):
        image_processor: Any = BitImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
    else:
        image_processor = SiglipImageProcessorPil(size=size, crop_size=size)

    tokenizer = byte_tokenizer()
    has_cls_token = config.vision_feature_select_strategy == "default"
    processor = LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1 if has_cls_token else 0,
        image_token="<image>",
        chat_template=chat_template(tokenizer, "<image>"),
    )
    config.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_model(
    config: NormLlavaConfig, dtype: torch.dtype, attention: str, device: torch.device
) -> NormLlavaForConditionalGeneration:
    """A NormLlava with random weights, made on the device.

    `attention` names the decoder's implementation of attention, such as "varlen". The encoder's is always sdpa.
    """
    torch.manual_seed(0)
    implementation = {"text_config": attention, "vision_config": "sdpa"}
    with device:
        return NormLlavaForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation=implementation)


def make_plain_llava(config: NormLlavaConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """A plain Llava of the same shapes with random weights, for TRL's trainer."""
    torch.manual_seed(0)
    plain_config = LlavaConfig(
        vision_config=config.vision_config,
        text_config=config.text_config,
        image_token_index=config.image_token_index,
        image_seq_length=config.image_seq_length,
        vision_feature_layer=config.vision_feature_layer,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )
    with device:
        return LlavaForConditionalGeneration._from_config(plain_config, dtype=dtype, attn_implementation="sdpa")


def quantize(model: NormLlavaForConditionalGeneration, quantization: BitsAndBytesConfig, device: torch.device) -> None:
    """Replace the language model's linear layers by 4-bit layers with random weights.

    The same layers are replaced as when a checkpoint is loaded with this `quantization`.
    """
    import bitsandbytes  # only these arms need it

    quantizer = AutoHfQuantizer.from_config(quantization)
    # This replaces the layers. The new layers' weights have options, such as the 4-bit type, but no data.
    quantizer.preprocess_model(model, device_map={"": device})
    for layer in model.modules():
        if not isinstance(layer, bitsandbytes.nn.Linear4bit):
            continue
        weight = 0.02 * torch.randn(layer.out_features, layer.in_features, device=device, dtype=model.dtype)
        weight_options = layer.weight.__dict__
        unquantized: Any = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **weight_options)
        layer.weight = unquantized.to(device)  # bitsandbytes quantizes weights when they move to the device
        if layer.bias is not None:
            layer.bias = nn.Parameter(torch.zeros(layer.out_features, device=device, dtype=model.dtype))
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
