"""Loading the model to start from: weights are read once, by the main process, and sent to the others."""

from typing import Any

import torch
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_fsdp_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training.arguments import RunArguments, TrainingConfig


def load_base(run_args: RunArguments, args: TrainingConfig) -> NormLlavaForConditionalGeneration:
    """The model to start from: float32, but for a language model in 4 bits.

    Processes other than the main one get its parameters on the meta device, until [`make_room`] gives them memory, and
    DDP, FSDP2 or DeepSpeed the main process's values.
    """
    # ZeRO-3 would share the weights out while loading, before the stage has looked at them.
    unset_hf_deepspeed_config()
    # Packing concerns the language model alone.
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": {"text_config": run_args.attn_implementation, "vision_config": "sdpa"},
    }
    if run_args.load_in_4bit:
        from training.adapters import quantization_config  # needs the extra "qlora"

        dtype = torch.bfloat16 if args.bf16 else torch.float32
        quantization = quantization_config(dtype, run_args.bnb_4bit_quant_type, run_args.use_bnb_nested_quant)
        options |= {"dtype": dtype, "quantization_config": quantization, "device_map": {"": args.device}}
    source = {
        "pretrained_model_name_or_path": run_args.model_name_or_path,
        "revision": run_args.model_revision,
    }
    if args.process_index == 0 or run_args.load_in_4bit or not _weights_are_sent():
        model = NormLlavaForConditionalGeneration.from_pretrained(**source, **options)
    else:
        with torch.device("meta"):
            model = NormLlavaForConditionalGeneration._from_config(
                NormLlavaConfig.from_pretrained(**source), **options
            )
    if args.world_size > 1:
        _send_what_is_no_parameter(model)
    for module in model.modules():
        # bitsandbytes would rewrite 4-bit weights on a CPU, and round their scales, wherever they run out of training.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    name_sharding_units(model)
    return model


def _weights_are_sent() -> bool:
    """Whether the main process's weights reach the others: always, but with FSDP2 only if it is told to send them."""
    return is_fsdp_enabled() or not parse_flag_from_env("ACCELERATE_USE_FSDP")


def _send_what_is_no_parameter(model: NormLlavaForConditionalGeneration) -> None:
    """Give all processes the main one's buffers, and what it knows of generating."""
    sent: list[Any] = [(dict(model.named_buffers()), model.generation_config)]
    broadcast_object_list(sent)
    buffers, model.generation_config = sent[0]
    for name, buffer in buffers.items():
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], buffer)


def make_room(model: nn.Module) -> None:
    """Give parameters on the meta device memory, for the main process's values to be put there.

    It is the CPU's, where memory that nothing is written to takes none. FSDP2 would do without, but accelerate tells
    an optimizer's parameters apart by their addresses, and would train others in their place.
    """
    for parameter in model.parameters():
        if parameter.is_meta:
            room = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, room)  # the same object, which may be tied


def name_sharding_units(model: PreTrainedModel) -> None:
    """Leave the names of modules that the model has in `_no_split_modules`, which FSDP2 shards one by one.

    A vision encoder names its whole family's, text encoder included, and accelerate refuses names that it can't find.
    """
    present = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = sorted(present & set(model._no_split_modules or ()))
