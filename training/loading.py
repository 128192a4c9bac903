"""Loads the model of a run, in the main process for all, and prepares it for its stage."""

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedModel
from transformers.integrations import is_fsdp_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from modeling_normllava import (
    NormLlavaConfig,
    NormLlavaForConditionalGeneration,
    NormLlavaKeyAdapterForConditionalGeneration,
)
from training.arguments import RunArguments, TrainingConfig
from training.stages import LearningRates, ModuleGroup, Stage, prepare_stage


logger = logging.getLogger(__name__)


def load_config(name: str, revision: str | None = None) -> NormLlavaConfig:
    """The config of the NormLlava at `name`, a folder or Hub id.

    Raises:
        ValueError: if there is an adapter, another type of model, or none.
    """
    if Path(name, "adapter_config.json").exists():
        raise ValueError(
            f"{name} is an adapter, not a whole model. Merge it into its base first: python training/merge.py "
            f"--adapter {name} --output_dir <folder>"
        )
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except OSError as error:
        raise ValueError(f"{name} is no folder or Hub repository whose config.json can be read: {error}") from error
    if not isinstance(config, NormLlavaConfig):
        raise ValueError(
            f"{name} has model_type {config.model_type!r}, a NormLlava is needed. Make one of it: python "
            "training/compose.py --help"
        )
    return config


def load_base(run_args: RunArguments, args: TrainingConfig) -> NormLlavaForConditionalGeneration:
    """The model to start from, in float32 except for a 4-bit language model.

    Processes other than the main one get its parameters on the meta device. [`make_room`] allocates them, and DDP,
    FSDP2 or DeepSpeed copy the main process's values.
    """
    # ZeRO-3 would shard the weights while loading, before they are prepared for the stage.
    unset_hf_deepspeed_config()
    # Packing concerns only the language model.
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": {"text_config": run_args.attn_implementation, "vision_config": "sdpa"},
    }
    if run_args.load_in_4bit:
        from training.adapters import quantization_config  # needs the extra "train"

        compute_dtype = torch.bfloat16 if args.bf16 else torch.float32
        quantization = quantization_config(compute_dtype, run_args.bnb_4bit_quant_type, run_args.use_bnb_nested_quant)
        options |= {"dtype": args.frozen_dtype, "quantization_config": quantization, "device_map": {"": args.device}}
    source = {
        "pretrained_model_name_or_path": run_args.model_name_or_path,
        "revision": run_args.model_revision,
    }
    config = load_config(str(run_args.model_name_or_path), run_args.model_revision)
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    # Only "align" saves frozen weights, so only there the cast ends up on disk.
    if run_args.stage == Stage.ALIGN and torch.bfloat16 == args.frozen_dtype != config.dtype:
        logger.warning(
            "The frozen weights of %s are %s. With bf16 they are held in bfloat16, and saved like that.",
            run_args.model_name_or_path,
            str(config.dtype).removeprefix("torch."),
        )
    if args.process_index == 0 or run_args.load_in_4bit or not _weights_are_sent():
        model = model_class.from_pretrained(**source, **options)
    else:
        with torch.device("meta"):
            model = model_class._from_config(config, **options)
    if args.world_size > 1 and not run_args.load_in_4bit:  # in 4 bits every process has loaded all
        _send_what_is_no_parameter(model)
    for module in model.modules():
        # On a CPU bitsandbytes would rewrite 4-bit weights, and round their scales, when they run in eval mode.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    name_sharding_units(model)
    return model


def _weights_are_sent() -> bool:
    """Whether the main process's weights are sent to the others: always, but under FSDP2 only if set so."""
    return is_fsdp_enabled() or not parse_flag_from_env("ACCELERATE_USE_FSDP")


def _send_what_is_no_parameter(model: NormLlavaForConditionalGeneration) -> None:
    """Send the main process's buffers and generation config to all."""
    sent: list[Any] = [(dict(model.named_buffers()), model.generation_config)]
    broadcast_object_list(sent)
    buffers, model.generation_config = sent[0]
    for name, buffer in buffers.items():
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], buffer)


def make_room(model: nn.Module) -> None:
    """Allocate parameters that are on the meta device, to receive the main process's values.

    They are put on the CPU, where untouched memory takes no space. FSDP2 would not need this, but accelerate
    identifies an optimizer's parameters by address, and would train the wrong ones.
    """
    for parameter in model.parameters():
        if parameter.is_meta:
            room = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, room)  # the same object, which may be tied


def name_sharding_units(model: PreTrainedModel) -> None:
    """Limit `_no_split_modules`, which FSDP2 shards one by one, to the modules that the model has.

    A vision encoder lists its whole family's, text encoder included, and accelerate refuses names that it can't find.
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
        ValueError: if `norm_learning_rate` is given but there is no norm, losses on keys but no key adapters, or if
            key adapters can't run under this sharding.
    """
    has_key_adapters = isinstance(model, NormLlavaKeyAdapterForConditionalGeneration)
    if run_args.key_losses and not has_key_adapters:
        raise ValueError(
            f"key_mmd_weight and key_gram_weight need key adapters, and {run_args.model_name_or_path} has none. Add "
            "them: python training/add_key_adapters.py --model <folder> --output_dir <folder>"
        )
    if run_args.norm_learning_rate is not None and model.config.projector_norm == "none":
        raise ValueError("norm_learning_rate does nothing: this model's projector_norm is 'none'.")
    if has_key_adapters and getattr(args.deepspeed_plugin, "zero_stage", 0) == 3:
        raise ValueError(
            "ZeRO-3 passes modules copies of their inputs, without the mask that key adapters read: use FSDP2 or DDP."
        )
    trained: Any = model
    stage = Stage(str(run_args.stage))
    if stage is Stage.ADAPT:
        from training.adapters import add_adapters  # needs the extra "train"

        torch.manual_seed(args.seed)
        trained = add_adapters(
            model,
            run_args.lora_r,
            run_args.lora_alpha,
            run_args.lora_dropout,
            use_rslora=run_args.use_rslora,
            use_dora=run_args.use_dora,
            revision=run_args.model_revision,
        )
    rates = LearningRates(
        common=args.learning_rate,
        vision=run_args.vision_learning_rate or 0.0,
        norm=run_args.norm_learning_rate or args.learning_rate,
        projector=run_args.projector_learning_rate,
    )
    groups = prepare_stage(model, stage, rates, frozen_dtype=args.frozen_dtype)
    return trained, groups
