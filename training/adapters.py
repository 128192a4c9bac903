"""4-bit weights and LoRA for the language model only; vision encoder, projector and norm have neither.

The libraries' shortcuts hit the wrong modules: short names of modules to skip are silently ignored, so the projector
is quantized too; a list of them replaces the default, which skips the head; and `target_modules="all-linear"` puts
adapters into the vision encoder.
"""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig

from modeling_normllava import NormLlavaForConditionalGeneration, NormLlavaKeyAdapterForConditionalGeneration


def quantization_config(
    compute_dtype: torch.dtype, quant_type: str = "nf4", double_quant: bool = True
) -> BitsAndBytesConfig:
    """NF4 with double quantization (QLoRA, arXiv 2305.14314, section 3) for the language model's linear layers."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    )


def add_adapters(
    model: NormLlavaForConditionalGeneration,
    rank: int,
    alpha: int,
    dropout: float = 0.0,
    revision: str | None = None,
    **options: Any,
) -> PeftModel:
    """Put LoRA adapters on all linear layers of the language model, and mark the projector to be trained in full.

    If the model has key adapters, they are trained in full, and the `k_proj` inside them gets no LoRA.

    Args:
        model: The model to adapt, in place.
        rank, alpha, dropout, options: As for PEFT's `LoraConfig`.
        revision: The model's on the Hub, which merging loads again.
    """
    decoder_layers: Any = model.model.language_model.layers
    linear_names = set()
    for name, module in decoder_layers.named_modules():
        if isinstance(module, nn.Linear):
            linear_names.add(name.rsplit(".", 1)[-1])
    trained_in_full = ["multi_modal_projector"]

    if isinstance(model, NormLlavaKeyAdapterForConditionalGeneration):
        linear_names.discard("base")  # the `k_proj` inside
        trained_in_full.append("key_adapter")

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=rf"model\.language_model\.layers\..*\.({'|'.join(sorted(linear_names))})",
        modules_to_save=trained_in_full,
        task_type="CAUSAL_LM",
        **options,
    )
    return get_peft_model(model, config, revision=revision)
