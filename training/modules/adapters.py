"""Quantizes the decoder's linear layers to 4 bits, and puts LoRA adapters on these layers alone.

Modules are named in full here. If a module that must not be quantized were given by a short name, such as
"vision_tower", transformers would quantize it without a warning. With `target_modules="all-linear"`, PEFT would put
adapters into the vision encoder too.
"""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import BitsAndBytesConfig, LlavaForConditionalGeneration

from modeling_normllava import NormLlavaKeyAdapterForConditionalGeneration


def quantization_config(
    compute_dtype: torch.dtype, quant_type: str = "nf4", double_quant: bool = True
) -> BitsAndBytesConfig:
    """The config that quantizes the decoder's linear layers to 4 bits.

    By default the weights are NF4 with double quantization (QLoRA, arXiv 2305.14314, section 3).
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        # The modules that stay unquantized. This list replaces transformers' default list, so it must name the head
        # (`lm_head`) too.
        llm_int8_skip_modules=["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    )


def add_adapters(
    model: LlavaForConditionalGeneration,
    rank: int,
    alpha: int,
    dropout: float = 0.0,
    revision: str | None = None,
    **options: Any,
) -> PeftModel:
    """Put LoRA adapters on all linear layers of the decoder, and let PEFT train the projector in full.

    If the model has key adapters, PEFT trains them in full too, and the `k_proj` layers to which they are added get no
    LoRA.

    Args:
        model: The model, which is changed in place.
        rank, alpha, dropout, options: Arguments of PEFT's `LoraConfig`.
        revision: The revision of the model on the Hub. It is recorded in the adapters' config, so that
            training/merge.py loads the same weights.

    Returns:
        The `PeftModel` around the model.
    """
    decoder_layers: Any = model.model.language_model.layers
    linear_names = set()
    for name, module in decoder_layers.named_modules():
        if isinstance(module, nn.Linear):
            last_part = name.split(".")[-1]  # "0.self_attn.q_proj" -> "q_proj"
            linear_names.add(last_part)

    trained_in_full = ["multi_modal_projector"]
    if isinstance(model, NormLlavaKeyAdapterForConditionalGeneration):
        # In a `k_proj` with a key adapter, the original linear layer has the name "base".
        linear_names.discard("base")
        trained_in_full.append("key_adapter")

    any_linear_name = "|".join(sorted(linear_names))
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        # This matches names such as "model.language_model.layers.0.self_attn.q_proj".
        target_modules=rf"model\.language_model\.layers\..*\.({any_linear_name})",
        modules_to_save=trained_in_full,
        task_type="CAUSAL_LM",
        **options,
    )
    adapted_model: Any = get_peft_model(model, config, revision=revision)
    # PEFT would write a card beside the adapter, full of "[More Information Needed]".
    adapted_model.create_or_update_model_card = lambda output_dir: None
    for module in adapted_model.modules():
        if isinstance(module, LoraLayer):
            # The layer would cast its input to the float32 of its weights, and autocast would cast the input back.
            module.cast_input_dtype_enabled = False
    return adapted_model
