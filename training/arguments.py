"""The arguments of a run: TRL's and ours. Every field is checked before anything is loaded."""

import argparse
import dataclasses
import math
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from accelerate.utils import parse_flag_from_env
from trl import ModelConfig, SFTConfig, TrlParser
from trl import ScriptArguments as DatasetArguments

from training.attention import VARLEN_OPTIONS
from training.compiling import compile_plugin
from training.mixture import SourceArguments
from training.run import CHOOSING
from training.stages import Stage


# Fields that must be at least this large.
AT_LEAST = {
    "global_batch_size": 1, "packed_length": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
    "max_length": 1, "lora_r": 1, "lora_alpha": 1, "lora_dropout": 0, "probe_steps": 1, "probe_samples": 1,
    "dataset_num_proc": 1, "dataloader_num_workers": 0, "max_grad_norm": 0, "weight_decay": 0, "warmup_steps": 0,
    "eval_samples": 0, "per_device_eval_batch_size": 1, "eval_delay": 0, "key_mmd_weight": 0, "key_gram_weight": 0,
    "save_total_limit": 1, "seed": 0, "data_seed": 0, "adam_beta1": 0, "adam_beta2": 0,
}  # fmt: skip
BELOW_ONE = ("adam_beta1", "adam_beta2", "lora_dropout")
# Fields that must be above 0.
POSITIVE = (
    "learning_rate", "vision_learning_rate", "projector_learning_rate", "norm_learning_rate", "num_train_epochs",
    "logging_steps", "save_steps", "eval_steps", "adam_epsilon",
)  # fmt: skip
# Fields of TRL and transformers that have one sensible value here, with the reason.
FIXED: dict[str, tuple[Any, str]] = {
    "dtype": ("float32", "trained weights stay in float32; bf16 sets the precision of arithmetic"),
    "use_peft": (False, "stage 'adapt' is the one that trains adapters"),
    "lora_target_modules": (None, "adapters go on all linear layers of the decoder's blocks"),
    "lora_target_parameters": (None, "adapters go on all linear layers of the decoder's blocks"),
    "lora_modules_to_save": (None, "projector, norm and key adapters are trained in full, and nothing else"),
    "lora_task_type": ("CAUSAL_LM", "a NormLlava is a causal language model"),
    "load_in_8bit": (False, "use load_in_4bit"),
    "bnb_4bit_quant_storage": (None, "4-bit weights are stored as bytes"),
    "ignore_bias_buffers": (False, "no model here has such buffers"),
    "do_train": (False, "this command trains"),
    "do_eval": (False, "eval_strategy says when to evaluate"),
    "do_predict": (False, "eval_samples says how many held-out questions are answered"),
    "eval_packing": (None, "packed_length packs held-out rows too"),
    "greater_is_better": (None, "it follows from metric_for_best_model"),
    "label_names": (None, "the collator makes the labels"),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"), (False, "evaluation runs in the precision of training")
    ),
    **dict.fromkeys(
        ("prediction_loss_only", "batch_eval_metrics", "eval_use_gather_object"), (False, "no logits are gathered")
    ),
    "eval_do_concat_batches": (True, "no logits are gathered"),
    "eval_accumulation_steps": (None, "no logits are gathered"),
    "include_for_metrics": ([], "no logits are gathered"),
    "average_tokens_across_devices": (True, "every token of a step has the same weight on any device"),
    "accelerator_config": (None, "our own samplers distribute the rows of a step"),
    **dict.fromkeys(
        ("fsdp", "fsdp_config"),
        (None, "without accelerate's launcher no process would send the weights; use training/accelerate/fsdp2.yaml"),
    ),
    "save_on_each_node": (False, "one checkpoint is written for all nodes, atomically"),
    "dataloader_in_order": (True, "a run could not be resumed with batches in another order"),
    "pad_to_multiple_of": ("auto", "rows are padded to the longest of their batch"),
    "packing": (False, "TRL packs only text; give packed_length to pack rows with pictures"),
    "padding_free": (False, "TRL packs only text; give packed_length to pack rows with pictures"),
    "push_to_hub": (
        False, "it would upload training_args.bin, which holds your token; release the folder with hub_cards",
    ),
    **dict.fromkeys(
        ("hub_model_id", "hub_private_repo", "hub_revision", "hub_token"), (None, "release the folder with hub_cards")
    ),
    "hub_strategy": ("every_save", "release the folder with hub_cards"),
    "hub_always_push": (False, "release the folder with hub_cards"),
    "save_only_model": (False, "such a checkpoint can't be resumed from"),
    "enable_jit_checkpoint": (False, "it saves in the middle of a step; resume from the last checkpoint"),
    "use_cache": (False, "training generates nothing; evaluation has its own cache"),
    "optim_target_modules": (None, "GaLore and APOLLO choose parameters by it; here the stage chooses them"),
    "remove_unused_columns": (False, "rows are read when they are needed"),
    "ignore_data_skip": (False, "a resumed run would train on rows twice"),
    "dataloader_drop_last": (False, "no row is left out"),
    "auto_find_batch_size": (False, "the rows of a step would change; set per_device_train_batch_size"),
    "activation_offloading": (False, "it has not been made to work with pictures; use gradient_checkpointing"),
    "label_smoothing_factor": (0.0, "the head sees only supervised positions, and smoothing needs all"),
    "assistant_only_loss": (False, "the loss always covers assistant turns only"),
    "completion_only_loss": (None, "the loss always covers assistant turns only"),
    "use_liger_kernel": (False, "Liger does not support this model type and would do nothing"),
    "liger_kernel_config": (None, "Liger does not support this model type and would do nothing"),
    "shuffle_dataset": (False, "train_sampling_strategy sets the order of rows"),
    "length_column_name": ("length", "lengths are measured when rows are checked"),
    "chat_template_path": (None, "the chat template comes with the checkpoint; compose writes it"),
    "dataset_text_field": ("text", "rows hold conversations"),
    "dataset_kwargs": (None, "rows are tokenized when they are needed"),
    "eos_token": (None, "the tokens come with the checkpoint; compose chooses them"),
    "pad_token": (None, "the tokens come with the checkpoint; compose chooses them"),
    "truncation_mode": ("keep_start", "no row is truncated"),
    "packing_strategy": ("bfd", "use packed_length to pack"),
    "model_init_kwargs": (None, "the model is loaded from model_name_or_path"),
    "trust_remote_code": (False, "the classes of this repository are used"),
}  # fmt: skip
# Fields that concern only held-out rows.
HELD_OUT = (*CHOOSING, "eval_image_folder", "dataset_test_split", "eval_on_start", "per_device_eval_batch_size")
# Fields that each entry of `datasets` has instead.
ONE_SOURCE = ("dataset_name", "dataset_config", "dataset_train_split", "image_folder")
# Kernel bandwidths of the losses on keys, as in the diagnostics' MMD².
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
# What a list holds, in messages.
LISTED = {int: "whole numbers", float: "numbers", str: "texts"}
# Fields of which only some of the choices work here.
CHOICES = {"train_sampling_strategy": ("random", "group_by_length", "sequential")}


@dataclass
class RunArguments(DatasetArguments, ModelConfig):
    """What a run needs besides [`TrainingConfig`]: TRL's fields for model and data, and ours."""

    attn_implementation: str = field(
        default="sdpa",
        metadata={
            "help": "Attention of the language model: 'sdpa', ..., or 'varlen' for packed rows (on a GPU torch 2.11)."
        },
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters; TRL's is 0.05."})
    use_bnb_nested_quant: bool = field(default=True, metadata={"help": "Quantize the 4-bit weights' scales too."})
    stage: Literal["align", "instruct", "adapt"] | None = field(
        default=None, metadata={"help": "What to train; see training/stages.py."}
    )
    datasets: list[SourceArguments] | None = field(
        default=None,
        metadata={"help": "Several sources instead of dataset_name, each with the fields of SourceArguments."},
    )
    image_folder: str | None = field(
        default=None, metadata={"help": "Prefix of the image paths in a JSON file; by default the file's folder."}
    )
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Held-out rows to evaluate the model on during training."}
    )
    eval_image_folder: str | None = field(default=None, metadata={"help": "image_folder of the held-out rows."})
    eval_samples: int = field(
        default=64, metadata={"help": "Held-out rows to answer at each evaluation, the first ones; 0 for none."}
    )
    vision_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the vision encoder; required in stage 'instruct'."}
    )
    projector_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the projector; learning_rate by default."}
    )
    norm_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the projector's norm; learning_rate by default."}
    )
    clip_by_module: bool = field(
        default=False, metadata={"help": "Clip each module's gradient to max_grad_norm, not the whole gradient."}
    )
    key_mmd_weight: float = field(
        default=0.0, metadata={"help": "Weight of the MMD² between visual and text keys; see key_alignment.py."}
    )
    key_gram_weight: float = field(
        default=0.0, metadata={"help": "Weight of the distance between the Gram matrices of keys and frozen keys."}
    )
    key_layers: list[int] | None = field(
        default=None, metadata={"help": "Decoder layers whose keys have these losses; all by default."}
    )
    key_bandwidths: list[float] = field(
        default_factory=lambda: list(BANDWIDTHS),
        metadata={"help": "Kernel bandwidths of the MMD², as multiples of the mean squared distance."},
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Samples per step over all devices; sets gradient_accumulation_steps."},
    )
    packed_length: int | None = field(
        default=None,
        metadata={"help": "Join samples into rows of at most this many tokens, instead of padding them."},
    )
    bad_rows: Literal["error", "skip"] = field(
        default="error", metadata={"help": "Stop at a bad row, or skip bad rows and list them in a file."}
    )
    open_pictures: bool = field(
        default=True, metadata={"help": "Open every picture once before training, to find broken ones."}
    )
    probe_steps: int | None = field(
        default=None,
        metadata={"help": "Measure norms and turning by layer every N steps, into dynamics.jsonl."},
    )
    probe_samples: int = field(default=16, metadata={"help": "Number of pictures to measure on, the data's first."})
    resume_changed: bool = field(
        default=False, metadata={"help": "Resume even if data, batch or learning rate have changed."}
    )
    recipe: str | None = field(default=None, init=False)
    """Path of the YAML file that `--config` named."""

    @property
    def key_losses(self) -> list[str]:
        """Names of the key-loss weights that are not 0."""
        return [name for name in ("key_mmd_weight", "key_gram_weight") if getattr(self, name)]

    @property
    def sources(self) -> list[SourceArguments]:
        """Where the rows are from: the entries of `datasets`, or the one that `dataset_name` and its fields give."""
        if self.datasets is not None:
            return self.datasets
        split = str(self.dataset_train_split)
        return [SourceArguments(str(self.dataset_name), self.dataset_config, split, self.image_folder)]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.datasets is not None:
            self.datasets = [read_source(f"datasets, entry {n}", entry) for n, entry in enumerate(self.datasets, 1)]
        super().__post_init__()


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's arguments, with defaults that don't silently lose data."""

    max_length: int | None = field(
        default=None, metadata={"help": "Longest sample allowed, in tokens; longer ones are bad rows, never cut."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off: rows are read when needed."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Off: every trained parameter has a gradient in every batch."}
    )
    ddp_timeout: int = field(
        default=3 * 3600,
        metadata={"help": "Seconds that processes wait for each other: the main one reads and checks all rows."},
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Off: training stops when the loss is NaN or infinite."}
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.output_dir is None:
            raise ValueError("output_dir is missing: give the folder that the trained model is written to.")
        # `--resume_from_checkpoint false` arrives as a string.
        resume = {"true": True, "false": None}.get(
            str(self.resume_from_checkpoint).lower(), self.resume_from_checkpoint
        )
        self.resume_from_checkpoint: str | bool | None = resume
        # transformers 5.23 renamed these, and warns about the old names even when TRL's default sets them.
        for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
            new = old.replace("gradient", "activation")
            if hasattr(self, new) and getattr(self, new) is None:
                setattr(self, new, getattr(self, old))
        super().__post_init__()


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[RunArguments, TrainingConfig]:
    """Parse the command line, or `argv`, which overrides the recipe given by `--config`.

    Raises:
        ValueError: if the recipe can't be read, or a field is unknown or has an invalid value.
    """
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--config")
    known, rest = recipe_parser.parse_known_args(argv)
    given = []
    if known.config is not None:
        check_recipe(Path(known.config))
        given = ["--config", known.config]
    parser = TrlParser((RunArguments, TrainingConfig), allow_abbrev=False)
    run_args, args = parser.parse_args_and_config([*given, *rest])
    run_args.recipe = known.config
    check_arguments(run_args, args)
    return run_args, args


def check_recipe(path: Path) -> None:
    """Raises `ValueError` if a recipe is missing, is not a mapping of fields to values, or has an empty field."""
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} can't be read ({error}).") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--config {path} is not a mapping of fields to values, such as `learning_rate: 1.0e-3`.")
    hints = typing.get_type_hints(RunArguments) | typing.get_type_hints(TrainingConfig)
    for name, value in recipe.items():
        if value is None and name in hints and not _fits(None, hints[name]):
            raise ValueError(f"--config {path}: {name} is empty; give it a value, or leave its line out.")


def check_fields(args: Any) -> None:
    """Check each field of a dataclass on its own: a recipe's values bypass the parser's types and choices.

    Raises:
        ValueError: that names the field.
    """
    hints = typing.get_type_hints(type(args))
    for entry in dataclasses.fields(args):
        name, value = entry.name, getattr(args, entry.name)
        if value is None:
            continue
        # `resume_from_checkpoint: true` is not a path.
        if value != entry.default and not _fits(value, hints[name]) and name != "resume_from_checkpoint":
            raise ValueError(f"{name} must be {_describe(hints[name])}, got {value!r}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}.")
        if name in AT_LEAST and value < AT_LEAST[name]:
            raise ValueError(f"{name} must be at least {AT_LEAST[name]}, got {value}.")
        if name in BELOW_ONE and value >= 1:
            raise ValueError(f"{name} must be below 1, got {value}.")
        if name in POSITIVE and value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}.")
        if name in FIXED and value != FIXED[name][0]:
            raise ValueError(f"{name} must stay {FIXED[name][0]!r}, got {value!r}: {FIXED[name][1]}.")
        choices = CHOICES.get(name) or entry.metadata.get("choices", (value,))
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def read_source(place: str, entry: Any) -> SourceArguments:
    """Parse an entry of a recipe's `datasets`. Raises `ValueError` that names the entry and the field."""
    if isinstance(entry, SourceArguments):
        return entry
    hints = typing.get_type_hints(SourceArguments)
    if not isinstance(entry, dict):
        raise ValueError(f"{place} must be a mapping of {', '.join(hints)}, got {entry!r}.")
    for name, value in entry.items():
        if name == "fraction":
            raise ValueError(f"{place}: give weight, how often an epoch sees each row, instead of TRL's fraction.")
        if name not in hints:
            raise ValueError(f"{place}: {name} is not a field of an entry; the fields are: {', '.join(hints)}.")
        if not _fits(value, hints[name]):
            raise ValueError(f"{place}: {name} must be {_describe(hints[name])}, got {value!r}.")
    if "path" not in entry:
        raise ValueError(f"{place}: path is missing: give a file or dataset.")
    source = SourceArguments(**{**entry, "weight": float(entry.get("weight", 1))})
    if not (math.isfinite(source.weight) and source.weight > 0):
        raise ValueError(f"{place}: weight must be a finite number above 0, got {source.weight}.")
    return source


def _fits(value: object, hint: Any) -> bool:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in options)
    if origin is Literal:
        return value in options
    kind = origin or hint
    if kind is list and isinstance(value, list):
        return all(_fits(item, option) for item in value for option in options)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind not in (bool, str, list, dict, type(None)) or isinstance(value, kind)


def _describe(hint: Any) -> str:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    described = []
    for option in options:
        if typing.get_origin(option) is Literal:
            described.append("one of " + ", ".join(map(str, typing.get_args(option))))
        elif typing.get_origin(option) is list:
            (item,) = typing.get_args(option)
            described.append(f"a list of {LISTED[item]}" if item in LISTED else "a list")
        elif option is not type(None):
            described.append(words.get(option, getattr(option, "__name__", str(option))))
    return " or ".join(described)


def check_arguments(run_args: RunArguments, args: TrainingConfig) -> None:
    """Refuse arguments that don't go together. Raises `ValueError` that names the fields."""
    for name in ("model_name_or_path", "dataset_name", "stage"):
        if getattr(run_args, name) is None and not (name == "dataset_name" and run_args.datasets is not None):
            raise ValueError(
                f"{name} is missing; training/recipes/ has recipes to start from."
                + (" Or name several sources in datasets." if name == "dataset_name" else "")
            )
    _check_sources(run_args)
    _check_stage(run_args, args)
    _check_batches(run_args, args)
    _check_held_out(run_args, args)
    _check_key_losses(run_args, args)
    if args.optim.startswith("schedule_free"):
        raise ValueError(
            f"optim {args.optim.value!r} trains on other weights than it is evaluated and saved with, and switches "
            "between them only where it evaluates: use another one, such as adamw_torch_fused."
        )
    _check_launch(args)
    if run_args.clip_by_module and args.deepspeed_plugin is not None:
        raise ValueError("DeepSpeed can only clip all gradients together: remove clip_by_module.")
    if args.max_grad_norm == 0 and args.deepspeed_plugin is not None:
        raise ValueError("Under DeepSpeed max_grad_norm 0 would leave gradients unchecked: give a large number.")
    if run_args.clip_by_module and args.max_grad_norm == 0:
        raise ValueError("max_grad_norm 0 clips nothing: remove clip_by_module, or give max_grad_norm.")
    if args.max_steps == 0 or args.max_steps < -1:
        raise ValueError(f"max_steps must be at least 1, or -1 for num_train_epochs, got {args.max_steps}.")
    if args.logging_strategy == "epoch":
        raise ValueError(
            "logging_strategy 'epoch' would log the figures of other steps: what is logged is measured in steps that "
            "are multiples of logging_steps."
        )
    if run_args.probe_steps is None and run_args.probe_samples != RunArguments.probe_samples:
        raise ValueError("probe_samples does nothing without probe_steps.")
    if run_args.resume_changed and args.resume_from_checkpoint is None:
        raise ValueError("resume_changed does nothing without resume_from_checkpoint.")


def _check_launch(args: TrainingConfig) -> None:
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        sharded = "SHARDED_STATE_DICT"
        for name, default, value, meaning in (
            ("fsdp_version", "1", "2", "1 is accelerate's default, and not supported"),
            ("fsdp_state_dict_type", sharded, sharded, "checkpoints of another type could not be resumed from"),
        ):
            if os.environ.get(name.upper(), default) != value:
                raise ValueError(
                    f"Set {name} to {value} in the launcher's fsdp_config, as training/accelerate/fsdp2.yaml does: "
                    f"{meaning}."
                )
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs, and Trainer would split each batch over them: start it with "
            "accelerate launch, or set CUDA_VISIBLE_DEVICES=0."
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no" and not args.bf16 and not args.fp16:
        raise ValueError(
            f"accelerate's launcher has mixed_precision {precision!r}, and bf16 is false: Trainer would follow the "
            "launcher. Give the recipe bf16: true, or launch with --mixed_precision no."
        )
    if args.deepspeed_plugin is not None:
        for section in ("optimizer", "scheduler"):
            if section in args.deepspeed_plugin.deepspeed_config:
                raise ValueError(
                    f"Remove the section {section!r} from DeepSpeed's config: it would give all modules one learning "
                    "rate. The recipe's optim, learning rates and lr_scheduler_type say what to use."
                )


def _check_sources(run_args: RunArguments) -> None:
    if run_args.datasets is None:
        return
    if not run_args.datasets:
        raise ValueError("datasets is empty: give an entry for each source, or dataset_name.")
    for name in ONE_SOURCE:
        if getattr(run_args, name) != getattr(RunArguments, name):
            raise ValueError(f"Give either {name} or datasets, whose entries have their own, not both.")
    if run_args.dataset_streaming and [source.weight for source in run_args.datasets] != [1]:
        raise ValueError(
            "dataset_streaming reads a single source of weight 1: remove it, or give dataset_name instead of "
            "datasets. Without it rows are not held in memory either."
        )


def _check_stage(run_args: RunArguments, args: TrainingConfig) -> None:
    stage = Stage(str(run_args.stage))
    if stage is Stage.INSTRUCT and run_args.vision_learning_rate is None:
        raise ValueError("Stage 'instruct' trains the vision encoder too: give vision_learning_rate.")
    if stage is not Stage.INSTRUCT and run_args.vision_learning_rate is not None:
        raise ValueError(f"vision_learning_rate does nothing in stage {stage.value!r}, which freezes the encoder.")
    if stage is not Stage.ADAPT and run_args.load_in_4bit:
        raise ValueError("load_in_4bit works only with stage 'adapt': 4-bit weights can't be trained.")
    for entry in dataclasses.fields(run_args):
        if getattr(run_args, entry.name) == entry.default:
            continue
        if stage is not Stage.ADAPT and entry.name.startswith(("lora_", "use_rslora", "use_dora")):
            raise ValueError(f"{entry.name} does nothing in stage {stage.value!r}, which has no adapters.")
        if not run_args.load_in_4bit and entry.name.startswith(("bnb_", "use_bnb")):
            raise ValueError(f"{entry.name} does nothing without load_in_4bit.")


def _check_key_losses(run_args: RunArguments, args: TrainingConfig) -> None:
    used = run_args.key_losses
    if run_args.key_layers == []:
        raise ValueError("key_layers is empty: give layers, or leave it out for all.")
    if run_args.key_layers is not None and not used:
        raise ValueError("key_layers does nothing without key_mmd_weight or key_gram_weight.")
    if not run_args.key_bandwidths or min(run_args.key_bandwidths) <= 0:
        raise ValueError(f"key_bandwidths must be numbers above 0, got {run_args.key_bandwidths}.")
    if tuple(run_args.key_bandwidths) != BANDWIDTHS and not run_args.key_mmd_weight:
        raise ValueError("key_bandwidths does nothing without key_mmd_weight.")
    if not used:
        return
    if Stage(str(run_args.stage)) is not Stage.ADAPT:
        raise ValueError(f"{used[0]} works only with stage 'adapt', which freezes k_proj itself.")
    if compile_plugin(args) is not None:
        raise ValueError(
            f"{used[0]} reads keys through hooks, which break compiling: set torch_compile to false, and launch "
            "without --dynamo_backend."
        )
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            f"{used[0]} needs gradient_checkpointing_kwargs use_reentrant false: otherwise keys have no graph."
        )


def _check_batches(run_args: RunArguments, args: TrainingConfig) -> None:
    packed, streaming = run_args.packed_length is not None, run_args.dataset_streaming
    if args.train_sampling_strategy != "random" and (packed or streaming):
        cause = "a stream comes in its own order" if streaming else "packed_length balances rows by length itself"
        raise ValueError(f"train_sampling_strategy {args.train_sampling_strategy!r} does nothing here: {cause}.")
    if not packed and run_args.attn_implementation == "varlen":
        raise ValueError("attn_implementation 'varlen' is for packed rows: give packed_length, or use 'sdpa'.")
    on_gpu = torch.cuda.is_available() and not args.use_cpu
    if run_args.attn_implementation == "varlen" and on_gpu and "window_size" not in VARLEN_OPTIONS:
        raise ValueError(
            f"attn_implementation 'varlen' needs torch 2.11 on a GPU, not {torch.__version__}: use 'sdpa'."
        )
    if packed and args.neftune_noise_alpha:
        raise ValueError(
            "neftune_noise_alpha scales its noise by the length of a row, which packing changes: remove one of them."
        )
    if packed and args.per_device_train_batch_size != 1:
        raise ValueError("With packed_length a device takes one row at a time: set per_device_train_batch_size to 1.")
    if streaming and args.max_steps <= 0:
        raise ValueError("The length of a stream is not known: give max_steps.")
    if streaming and packed and run_args.global_batch_size is not None:
        raise ValueError(
            "Rows packed from a stream hold as many samples as fit, so global_batch_size can't be met: give "
            "gradient_accumulation_steps, or remove dataset_streaming or packed_length."
        )
    if packed and not streaming and run_args.global_batch_size is None:
        raise ValueError("Packed rows hold varying numbers of samples: give global_batch_size, the samples of a step.")
    if args.dataloader_persistent_workers and not args.dataloader_num_workers:
        raise ValueError("dataloader_persistent_workers does nothing without dataloader_num_workers.")
    if run_args.global_batch_size is not None and args.gradient_accumulation_steps != 1:
        raise ValueError("Give either global_batch_size or gradient_accumulation_steps, not both.")


def _check_held_out(run_args: RunArguments, args: TrainingConfig) -> None:
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"lr_scheduler_type {args.lr_scheduler_type.value} sets the rate from evaluation results, but evaluation "
            "does not affect training here: use another one, such as cosine."
        )
    if run_args.eval_dataset_name is None:
        defaults = {entry.name: entry.default for kind in (run_args, args) for entry in dataclasses.fields(kind)}
        given = vars(run_args) | vars(args)
        for name in HELD_OUT:
            if given[name] != defaults[name]:
                raise ValueError(f"{name} does nothing without eval_dataset_name, the held-out rows.")
        if args.save_strategy == "best":
            raise ValueError("save_strategy 'best' needs held-out rows: give eval_dataset_name.")
        return
    if args.eval_strategy == "no":
        raise ValueError("eval_dataset_name does nothing without eval_strategy: 'steps' (with eval_steps) or 'epoch'.")
    if args.eval_strategy == "epoch":
        if args.eval_steps is not None:
            raise ValueError("eval_steps does nothing with eval_strategy 'epoch': use 'steps'.")
        if run_args.dataset_streaming:
            raise ValueError("A stream has no epochs: set eval_strategy to 'steps', and give eval_steps.")
        if args.save_strategy == "steps":
            raise ValueError(
                "With eval_strategy 'epoch' a checkpoint at an epoch's last step would be saved before its "
                "evaluation, which a resumed run would skip: set save_strategy to 'epoch', 'best' or 'no'."
            )
    batch_size_is_given = args.per_device_eval_batch_size != TrainingConfig.per_device_eval_batch_size
    if run_args.packed_length is not None and run_args.eval_samples == 0 and batch_size_is_given:
        raise ValueError("per_device_eval_batch_size does nothing with packed_length and eval_samples 0.")
    if args.loss_type != "nll":
        raise ValueError(
            f"loss_type {args.loss_type!r} can't measure quality: it falls when a model gets less sure of the truth. "
            "Remove eval_dataset_name, or use 'nll'."
        )
    _check_best(run_args, args)


def _check_best(run_args: RunArguments, args: TrainingConfig) -> None:
    chooses = args.load_best_model_at_end or args.save_strategy == "best"
    metrics = ["loss"] + ["exact_match"] * (run_args.eval_samples > 0)
    if chooses and args.metric_for_best_model not in metrics:
        raise ValueError(
            f"metric_for_best_model must be one of {', '.join(metrics)}, got {args.metric_for_best_model!r}."
        )
    if args.load_best_model_at_end and args.save_strategy == "steps" and args.save_steps != args.eval_steps:
        raise ValueError(
            f"load_best_model_at_end needs a checkpoint of every step that is evaluated: set save_steps "
            f"{args.save_steps} and eval_steps {args.eval_steps} to the same number, or save_strategy to 'best'."
        )
    if not chooses and args.metric_for_best_model is not None:
        raise ValueError("metric_for_best_model does nothing without load_best_model_at_end or save_strategy 'best'.")
