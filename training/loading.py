"""The model of a run: loaded, by the main process for all, and prepared for its stage."""

from typing import Any

import torch
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_fsdp_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training.arguments import RunArguments, TrainingConfig
from training.stages import LearningRates, ModuleGroup, Stage, prepare_stage


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
    if args.world_size > 1 and not run_args.load_in_4bit:  # then each has loaded all, onto its own device
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


def prepare_model(
    model: NormLlavaForConditionalGeneration, run_args: RunArguments, args: TrainingConfig
) -> tuple[Any, list[ModuleGroup]]:
    """Prepare a loaded model, in place, for the stage of the run.

    Returns:
        What Trainer trains (the model or the `PeftModel` around it), and its parts.

    Raises:
        ValueError: if there is no norm that `norm_learning_rate` could be of, or no key adapters for the losses on
            keys, or key adapters where they can't run.
    """
    if run_args.key_losses and not model.config.key_adapter_rank:
        raise ValueError(
            f"key_mmd_weight and key_gram_weight need key adapters, and {run_args.model_name_or_path} has none. Add "
            "them: python training/compose.py --normllava_model <folder> --key_adapter_rank 16 --output_dir <folder>"
        )
    if run_args.norm_learning_rate is not None and model.config.projector_norm == "none":
        raise ValueError("norm_learning_rate does nothing: this model's projector_norm is 'none'.")
    if model.config.key_adapter_rank and getattr(args.deepspeed_plugin, "zero_stage", 0) == 3:
        raise ValueError(
            "ZeRO-3 hands modules copies of their inputs, without the mask that key adapters read: use FSDP2 or DDP."
        )
    trained: Any = model
    stage = Stage(str(run_args.stage))
    if stage is Stage.ADAPT:
        from training.adapters import add_adapters  # needs the extra "qlora"

        torch.manual_seed(args.seed)
        trained = add_adapters(
            model,
            run_args.lora_r,
            run_args.lora_alpha,
            run_args.lora_dropout,
            use_rslora=run_args.use_rslora,
            use_dora=run_args.use_dora,
        )
    rates = LearningRates(
        common=args.learning_rate,
        vision=run_args.vision_learning_rate or 0.0,
        norm=run_args.norm_learning_rate or args.learning_rate,
    )
    groups = prepare_stage(model, stage, rates, frozen_dtype=torch.bfloat16 if args.bf16 else torch.float32)
    return trained, groups
