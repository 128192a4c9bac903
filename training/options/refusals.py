"""Checks of a run's arguments.

A check refuses arguments that would be ignored in silence, or would change the result in silence. The docstring of
each check states its rule. The check raises a `UserError` if the rule is broken.
"""

import math
import os
from dataclasses import MISSING, fields
from enum import Enum

from transformers import BaseImageProcessor
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_pt_utils import AcceleratorConfig

from normllava.conversations.tiles import cuts_tiles
from normllava.errors import UserError
from training.modules.stages import Stage
from training.options.arguments import RunArguments, TrainingConfig


# Fields of TRL and transformers that this project ignores, so they must keep their default. The value is the reason
# that the error gives. Every other inherited field is used, or a check of its own looks at it.
FIXED_FIELDS = {
    # The model and its adapters
    "use_peft": "give stage 'adapt' to train adapters",
    "lora_target_modules": "adapters go on all linear layers of the decoder's blocks",
    "lora_target_parameters": "adapters go on all linear layers of the decoder's blocks",
    "lora_task_type": "the model is always a causal language model",
    "lora_modules_to_save": "besides the adapters, projector and norm are trained",
    "load_in_8bit": "only load_in_4bit is supported",
    "bnb_4bit_quant_storage": "4-bit weights are stored in bytes",
    "dtype": "trained weights are float32, and frozen ones bfloat16 where bf16 is true",
    "model_init_kwargs": "the model is loaded by this project's class",
    "trust_remote_code": "the model is loaded by this project's class",
    "ignore_bias_buffers": "no decoder that was tried has such buffers",
    "use_liger_kernel": "Liger has no kernels for this model class",
    "liger_kernel_config": "Liger has no kernels for this model class",
    "torch_compile_mode": "layers are compiled in torch's default mode; no other has been tried",
    "use_cache": "training has no use for a cache",
    # Rows and batches
    "chat_template_path": "the chat template comes with the checkpoint; compose writes it",
    "eos_token": "rows end their turns as the checkpoint's chat template does",
    "pad_token": "the checkpoint's tokenizer names it",
    "dataset_text_field": "rows are read from the columns that docs/data.md lists",
    "dataset_kwargs": "rows are tokenized here, not by TRL",
    "label_names": "labels are made here from what the assistant says",
    "completion_only_loss": "what the assistant says is supervised, and nothing else",
    "assistant_only_loss": "only what the assistant says is supervised anyway",
    "truncation_mode": "no row is ever cut; max_length refuses longer ones",
    "pad_to_multiple_of": "a batch is padded to its longest row",
    "packing": "TRL packs only text; give packed_length to pack rows with pictures",
    "packing_strategy": "packed_length deals the samples of a step into rows of nearly the same length",
    "padding_free": "give packed_length, which packs rows without padding",
    "shuffle_dataset": "each epoch shuffles the rows",
    "train_sampling_strategy": "each epoch shuffles the rows",
    "length_column_name": "lengths are measured here",
    "remove_unused_columns": "rows are read when they are needed, from all of their columns",
    "auto_find_batch_size": "the rows of a step would change; set per_device_train_batch_size",
    "dataloader_drop_last": "an epoch trains all rows, the last ones in a smaller step",
    "dataloader_multiprocessing_context": "workers are started as torch does by default",
    "dataloader_in_order": "batches keep their order, so that a resumed run goes on where it stopped",
    # The loss and what is logged
    "label_smoothing_factor": "the loss is the cross entropy of the supervised tokens",
    "router_aux_loss_coef": "the loss is the cross entropy of the supervised tokens",
    "average_tokens_across_devices": "every token of a step has the same weight on any device",
    "logging_strategy": "norms are measured in every step that is a multiple of logging_steps",
    "logging_nan_inf_filter": "it hides a loss that isn't finite, which ends the run",
    "include_num_input_tokens_seen": "num_tokens is always logged, without padding",
    # Evaluation, which is the mean loss of the held-out rows, computed as in training
    "bf16_full_eval": "held-out rows are evaluated in the arithmetic of training",
    "fp16_full_eval": "held-out rows are evaluated in the arithmetic of training",
    "eval_packing": "held-out rows are evaluated as training rows are packed or padded",
    "prediction_loss_only": "an evaluation gives the loss alone",
    "eval_do_concat_batches": "an evaluation gives the loss alone",
    "eval_use_gather_object": "an evaluation gives the loss alone",
    "eval_accumulation_steps": "an evaluation gives the loss alone",
    "include_for_metrics": "an evaluation gives the loss alone",
    "batch_eval_metrics": "an evaluation gives the loss alone",
    # Checkpoints and the Hub
    "enable_jit_checkpoint": "it saves in the middle of a step; resume from the last checkpoint",
    "load_best_model_at_end": "save_strategy 'best' keeps the best checkpoint; take it from its folder",
    "save_on_each_node": "all nodes need the run's folder on a disk that they share",
    "push_to_hub": "it would upload training_args.bin, which holds your token; release with hub_cards",
    "hub_token": "nothing is pushed in training; release with hub_cards",
    "hub_private_repo": "nothing is pushed in training; release with hub_cards",
    "hub_model_id": "nothing is pushed in training; release with hub_cards",
    "hub_strategy": "nothing is pushed in training; release with hub_cards",
    "hub_always_push": "nothing is pushed in training; release with hub_cards",
    "hub_revision": "nothing is pushed in training; release with hub_cards",
    # What the command does
    "do_train": "training/sft.py always trains",
    "do_predict": "training/sft.py only trains, and evaluates on eval_dataset_name",
    "parallelism_config": "only FSDP2 shards the model, by training/accelerate/fsdp2.yaml",
}
# Fields that must be `None`, or 1 or more.
COUNT_FIELDS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "packed_length",
    "max_length",
    "max_tiles",
    "lora_r",
)
# Fields that must be `None`, or 0 or more and finite: rates, weights of losses, and a count.
RATE_FIELDS = (
    "learning_rate",
    "vision_learning_rate",
    "projector_learning_rate",
    "norm_learning_rate",
    "key_mmd_weight",
    "key_gram_weight",
    "eval_answers",
)
# What the names of bitsandbytes' optimizers contain.
BITSANDBYTES_NAMES = ("bnb", "8bit", "paged", "lion", "ademamix")
# Fields that only stage 'adapt' reads.
ADAPTER_FIELDS = ("lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
# Fields that name a single source of rows. With `datasets`, each entry names its own.
SOURCE_FIELDS = ("dataset_name", "dataset_config", "dataset_train_split", "image_folder")


def check_arguments(run_args: RunArguments, args: TrainingConfig) -> None:
    """Apply all checks that need neither data nor model.

    Raises:
        UserError: at the first rule that is broken. The message names the fields.
    """
    check_required(run_args)
    check_fixed_fields(run_args, args)
    check_ranges(run_args, args)
    check_steps(args)
    check_stage(run_args)
    check_sources(run_args)
    check_stream(run_args, args)
    check_batch(run_args, args)
    check_evaluation(run_args, args)
    check_optimizer(run_args, args)
    check_key_losses(run_args, args)
    check_compiling(args)
    check_precision(args)
    check_sharding(args)
    check_trackers(args)


def check_required(run_args: RunArguments) -> None:
    """A run needs a model, rows and a stage."""
    hint = "training/recipes/ has recipes to start from."
    if run_args.model_name_or_path is None:
        raise UserError(f"model_name_or_path is missing; {hint}")
    if run_args.dataset_name is None and not run_args.datasets:
        raise UserError(f"dataset_name is missing; {hint}")
    if run_args.stage is None:
        raise UserError(f"stage is missing; {hint}")


def check_fixed_fields(run_args: RunArguments, args: TrainingConfig) -> None:
    """The fields in `FIXED_FIELDS` keep their default."""
    for arguments in (run_args, args):
        for field in fields(arguments):
            if field.name not in FIXED_FIELDS:
                continue
            default = field.default if field.default_factory is MISSING else field.default_factory()
            value = getattr(arguments, field.name)
            if value != default:
                if isinstance(value, Enum):  # transformers turns the strings of some fields into enums
                    value = value.value
                if field.name == "hub_token":  # must not reach a log
                    value = "a token"
                raise UserError(f"{field.name} must stay {default!r}, got {value!r}: {FIXED_FIELDS[field.name]}.")


def check_ranges(run_args: RunArguments, args: TrainingConfig) -> None:
    """Counts are 1 or more. Learning rates, the weights of losses and `eval_answers` are 0 or more, and finite."""
    all_fields = {**vars(args), **vars(run_args)}
    for name in COUNT_FIELDS:
        count = all_fields[name]
        if count is not None and count < 1:
            raise UserError(f"{name} must be 1 or more, got {count}.")

    for name in RATE_FIELDS:
        rate = all_fields[name]
        is_valid = rate is None or 0 <= rate < math.inf
        if not is_valid:
            raise UserError(f"{name} must be 0 or more, got {rate}.")


def check_steps(args: TrainingConfig) -> None:
    """A run takes at least one step."""
    if args.max_steps <= 0 and args.num_train_epochs <= 0:
        raise UserError(
            f"num_train_epochs {args.num_train_epochs:g} trains nothing: give a number above 0, or max_steps."
        )


def check_stage(run_args: RunArguments) -> None:
    """A run gives the fields that its stage needs, and no fields of another stage."""
    if run_args.stage == Stage.INSTRUCT:
        if run_args.vision_learning_rate is None:
            raise UserError("Stage 'instruct' trains the vision encoder too: give vision_learning_rate.")
    elif run_args.vision_learning_rate is not None:
        raise UserError(
            f"vision_learning_rate is read in stage 'instruct' alone, got stage {run_args.stage!r}, which freezes the "
            "vision encoder: leave it out."
        )
    if run_args.stage == Stage.ADAPT:
        return

    if run_args.load_in_4bit:
        raise UserError("load_in_4bit works only with stage 'adapt': 4-bit weights can't be trained.")
    if run_args.has_key_losses:
        raise UserError(
            "key_mmd_weight and key_gram_weight work only with stage 'adapt', which freezes the keys that they "
            "compare with."
        )
    for name in ADAPTER_FIELDS:
        default = getattr(RunArguments, name)
        if getattr(run_args, name) != default:
            raise UserError(f"{name} is read in stage 'adapt' alone, got stage {run_args.stage!r}: leave it out.")


def check_sources(run_args: RunArguments) -> None:
    """The rows are named either by `datasets` or by the fields of a single source."""
    if not run_args.datasets:
        return

    given_names = []
    for name in SOURCE_FIELDS:
        default = getattr(RunArguments, name)
        if getattr(run_args, name) != default:
            given_names.append(name)
    if given_names:
        raise UserError(f"Give either {', '.join(given_names)} or datasets, not both.")


def check_stream(run_args: RunArguments, args: TrainingConfig) -> None:
    """A run on a stream gives `max_steps`, since a stream has no length. Its rows are not weighted or packed."""
    if not run_args.dataset_streaming:
        return

    is_packed = run_args.packed_length is not None
    has_end = args.max_steps > 0
    if run_args.datasets or is_packed or not has_end:
        raise UserError("A stream takes dataset_name and max_steps, and neither datasets nor packed_length.")


def check_batch(run_args: RunArguments, args: TrainingConfig) -> None:
    """One field sets the number of samples in a step, and all passes of a step are full. Samples of a packed row don't
    change each other's loss.

    accelerator_config keeps its default: batches don't come from accelerate, and FSDP2 shards gradients in every pass.
    """
    if args.accelerator_config != AcceleratorConfig():
        raise UserError("accelerator_config: this project makes batches and sums gradients by itself, take it out.")
    if run_args.global_batch_size is not None and args.gradient_accumulation_steps != 1:
        raise UserError("Give either global_batch_size or gradient_accumulation_steps, not both.")
    if run_args.packed_length is None:
        rows_per_pass = args.per_device_train_batch_size * args.world_size
        if run_args.global_batch_size is not None and run_args.global_batch_size % rows_per_pass != 0:
            raise UserError(
                f"global_batch_size {run_args.global_batch_size} is not a multiple of per_device_train_batch_size "
                f"{args.per_device_train_batch_size} times {args.world_size} processes; change one of them."
            )
        return

    if run_args.global_batch_size is None:
        raise UserError("Packed rows hold varying numbers of samples: give global_batch_size.")
    if args.neftune_noise_alpha:
        raise UserError("neftune_noise_alpha depends on rows' lengths: remove packed_length.")


def check_evaluation(run_args: RunArguments, args: TrainingConfig) -> None:
    """A run evaluates if it names held-out rows, and only then. The loss of an evaluation is the cross entropy.

    The best checkpoint is the one with the lowest loss in the evaluations during training. Of the loss with blank
    pictures Trainer would take the highest.
    """
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if args.do_eval and not evaluates:
        raise UserError("do_eval alone evaluates nothing: give eval_dataset_name and an eval_strategy.")
    if run_args.eval_dataset_name and not evaluates:
        raise UserError("eval_dataset_name needs an eval_strategy, or eval_on_start.")
    if evaluates and not run_args.eval_dataset_name:
        raise UserError("eval_strategy and eval_on_start need held-out rows: give eval_dataset_name.")
    if args.save_strategy == "best" and (args.eval_strategy == "no" or args.metric_for_best_model is None):
        raise UserError("save_strategy 'best' needs an eval_strategy, and metric_for_best_model: loss.")
    if args.metric_for_best_model not in (None, "loss", "eval_loss"):
        raise UserError(f"metric_for_best_model must be loss, got {args.metric_for_best_model}.")
    if evaluates and args.loss_type == "dft":
        raise UserError(
            "loss_type 'dft' weighs each token by its probability, so eval/loss would be no cross entropy: leave out "
            "loss_type, or evaluation."
        )


def check_optimizer(run_args: RunArguments, args: TrainingConfig) -> None:
    """The optimizer trains the weights that are saved, once a step. `clip_by_module` comes with a norm to clip to."""
    if args.optim.startswith("schedule_free"):
        raise UserError("A schedule_free optimizer trains other weights than it saves.")
    if args.optim.endswith(("layerwise", "lomo")):
        raise UserError(
            f"optim {args.optim.value} changes weights in every backward pass, at one learning rate: take one that "
            "waits for the step."
        )
    if run_args.clip_by_module and not args.max_grad_norm:
        raise UserError("clip_by_module clips to max_grad_norm, and 0 clips nothing: give a number above 0.")


def check_key_losses(run_args: RunArguments, args: TrainingConfig) -> None:
    """With losses on keys, the keys inside the decoder's layers can be read and have gradients."""
    if not run_args.has_key_losses:
        return

    checkpointing_options = args.gradient_checkpointing_kwargs or {}
    is_reentrant = checkpointing_options.get("use_reentrant", False)
    if args.gradient_checkpointing and is_reentrant:
        raise UserError(
            "key_mmd_weight and key_gram_weight need the keys' gradients, which reentrant checkpointing doesn't give: "
            "set use_reentrant to false in gradient_checkpointing_kwargs."
        )
    if args.torch_compile:
        raise UserError(
            "key_mmd_weight and key_gram_weight read keys inside the layers, which compiled layers hide: set "
            "torch_compile to false."
        )


def check_compiling(args: TrainingConfig) -> None:
    """Layers are compiled one by one, not the whole model, and only by a backend that has been tried."""
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise UserError(
            "The launcher would compile the whole model: launch with --dynamo_backend no, and give "
            "torch_compile: true, which compiles layer by layer."
        )
    if args.torch_compile_backend not in (None, "inductor", "aot_eager"):
        raise UserError(
            "torch_compile_backend must be inductor, which is the default, or aot_eager: no other has been tried but "
            "eager, which draws dropout anew where a checkpointed layer is computed again."
        )


def check_precision(args: TrainingConfig) -> None:
    """The recipe, not the launcher, names the arithmetic (bf16, fp16 or float32). The device can compute in it."""
    if args.fp16 and args.use_cpu:
        raise UserError("fp16 needs a GPU: a CPU would compute in float32 all the same. Leave it out.")

    launched_with = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    recipe_is_float32 = not (args.bf16 or args.fp16)
    if launched_with != "no" and recipe_is_float32:
        raise UserError(f"The launcher has mixed_precision {launched_with!r}: give bf16: true, or launch with 'no'.")


def check_sharding(args: TrainingConfig) -> None:
    """Only FSDP2 shards the model, and only the launcher's config file turns it on."""
    if args.deepspeed_plugin:
        raise UserError("DeepSpeed is not supported: shard with FSDP2, see training/accelerate/fsdp2.yaml.")
    if args.fsdp:
        raise UserError("Take fsdp out of the recipe: launch with --config_file training/accelerate/fsdp2.yaml.")

    is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if is_sharded:
        check_sharded_optimizer(args)
        if args.save_strategy == "best":
            raise UserError(
                "save_strategy 'best' keeps a checkpoint, which under FSDP2 holds shards that no model loads: take "
                "'steps' or 'epoch', and the model at the run's end."
            )

    version = os.environ.get("FSDP_VERSION", "2")
    state_dict_type = os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    if version != "2" or state_dict_type == "FULL_STATE_DICT":
        raise UserError("Set fsdp_version: 2 and SHARDED_STATE_DICT, as training/accelerate/fsdp2.yaml does.")


def check_sharded_optimizer(args: TrainingConfig) -> None:
    """The optimizer can step on weights that FSDP2 shards. Those of bitsandbytes can't: they know no `DTensor`."""
    is_of_torch = args.optim.startswith("adamw_torch")  # adamw_torch_8bit, too
    if not is_of_torch and any(part in args.optim for part in BITSANDBYTES_NAMES):
        raise UserError(
            f"optim {args.optim.value} is bitsandbytes', which can't train weights that FSDP2 shards: take "
            "adamw_torch_fused, or train without FSDP2."
        )


def check_trackers(args: TrainingConfig) -> None:
    """The trackers in `report_to` are installed."""
    installed = get_available_reporting_integrations()
    missing = [name for name in args.report_to if name not in installed]
    if missing:
        raise UserError(f"report_to: {', '.join(missing)} is not installed: install it, or give report_to: none.")


def check_devices(args: TrainingConfig) -> None:
    """Check that this process trains on a single GPU. Only a run needs this check, not the plan of a run.

    A process that sees several GPUs, as in a notebook, would split its batches over them by `nn.DataParallel`.

    Raises:
        UserError: if this process would use several GPUs.
    """
    if args.n_gpu > 1:
        raise UserError(
            f"This process would split its batches over {args.n_gpu} GPUs by DataParallel, which is not supported: "
            "start the run with accelerate launch, one process a GPU, or set CUDA_VISIBLE_DEVICES=0."
        )


def check_tiles(run_args: RunArguments, image_processor: BaseImageProcessor) -> None:
    """`max_tiles` is for models that cut pictures into tiles, and not above the image processor's own number.

    The size of a picture that is cut decides how many tokens it has, so such pictures must be opened.
    """
    if not cuts_tiles(image_processor):
        if run_args.max_tiles is not None:
            raise UserError("max_tiles: this model doesn't cut pictures into tiles; compose it with --max_tiles.")
        return

    most_tiles = image_processor.max_patches
    if run_args.max_tiles is not None and run_args.max_tiles > most_tiles:
        raise UserError(f"max_tiles {run_args.max_tiles}: the model was composed with --max_tiles {most_tiles}.")
    if not run_args.open_pictures:
        raise UserError("open_pictures must be true: pictures are cut into tiles, and their sizes must be known.")
