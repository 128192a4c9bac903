"""The arguments of a run: TRL's and ours. What would change the result without a word is refused."""

# ruff: noqa: RUF009 - `option` makes a field of a dataclass, as `field` does

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from transformers.integrations import get_available_reporting_integrations
from trl import ModelConfig, SFTConfig, TrlParser
from trl import ScriptArguments as DatasetArguments

from common.console import parse
from common.errors import UserError
from training.checkpoints import recorded_argument
from training.stages import Stage


# Fields of TRL and transformers that would train something else, or be passed over, without a word.
ONLY: dict[str, tuple[Any, str]] = {
    "use_peft": (False, "stage 'adapt' is the one that trains adapters"),
    "lora_target_modules": (None, "adapters go on all linear layers of the decoder's blocks"),
    "lora_modules_to_save": (None, "beside the adapters, projector and norm are trained"),
    "load_in_8bit": (False, "only load_in_4bit is supported"),
    "bnb_4bit_quant_storage": (None, "4-bit weights are stored in bytes"),
    "completion_only_loss": (None, "what the assistant says is supervised, and nothing else"),
    "dtype": (ModelConfig.dtype, "trained weights are float32, and frozen ones bfloat16 where bf16 is true"),
    "logging_strategy": ("steps", "norms are measured in every step that is a multiple of logging_steps"),
    "train_sampling_strategy": ("random", "each epoch shuffles the rows"),
    "average_tokens_across_devices": (True, "every token of a step has the same weight on any device"),
    "auto_find_batch_size": (False, "the rows of a step would change; set per_device_train_batch_size"),
    "label_smoothing_factor": (0.0, "the loss is the cross entropy of the supervised tokens"),
    "include_num_input_tokens_seen": ("no", "num_tokens is always logged, without padding"),
    "packing": (False, "TRL packs only text; give packed_length to pack rows with pictures"),
    "enable_jit_checkpoint": (False, "it saves in the middle of a step; resume from the last checkpoint"),
    "assistant_only_loss": (False, "it is so anyway: what the assistant says is supervised"),
    "padding_free": (False, "give packed_length, which packs rows without padding"),
    "use_liger_kernel": (False, "Liger has no kernels for this model class"),
    "torch_compile_mode": (None, "layers are compiled in torch's default mode; no other has been tried"),
    "load_best_model_at_end": (False, "save_strategy 'best' keeps the best checkpoint; take it from its folder"),
    "chat_template_path": (None, "the chat template comes with the checkpoint; compose writes it"),
    "push_to_hub": (False, "it would upload training_args.bin, which holds your token; release with hub_cards"),
}
FIELDS = "Every field is an option: ours stand in docs/reference.md, the others in TRL's SFTConfig and ModelConfig."
# Fields that transformers and TRL have given up, and what to give in their place.
RENAMED = {
    "warmup_ratio": "give warmup_steps, where a number below 1 is a fraction of all steps, as in warmup_steps: 0.03",
    "torch_dtype": "give bf16: true or false; trained weights are float32",
}
# Paths in which a `~` stands for the home folder.
PATHS = ("model_name_or_path", "dataset_name", "image_folder", "eval_dataset_name", "eval_image_folder", "output_dir")
# Fields that must be 1 or more, where they are given.
COUNTS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "packed_length",
    "max_length",
    "lora_r",
)
# Fields that must be 0 or more, where they are given.
RATES = (
    "learning_rate",
    "vision_learning_rate",
    "projector_learning_rate",
    "norm_learning_rate",
    "key_mmd_weight",
    "key_gram_weight",
)
# Fields that only stage 'adapt' reads.
OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
# Fields that each entry of `datasets` has instead.
ONE_SOURCE = ("dataset_name", "dataset_config", "dataset_train_split", "image_folder")


def option(default: Any, text: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SourceArguments:
    """An entry of the recipe's `datasets`; `path`, `name` and `split` are named as in TRL's `DatasetConfig`."""

    path: str
    name: str | None = None
    split: str = "train"
    image_folder: str | None = None
    weight: float = 1.0
    """How often an epoch sees each row: 2 is twice, 0.1 a tenth of them, 2.5 all twice and half of them once more."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(f"datasets, {self.path}: weight must be a number above 0, got {self.weight}.")


def read_source(entry: dict[str, Any]) -> SourceArguments:
    """An entry of `datasets`.

    Raises:
        UserError: if it has no path, or a field that no entry has.
    """
    known = [known_field.name for known_field in fields(SourceArguments)]
    unknown = sorted(entry.keys() - set(known))
    if unknown or "path" not in entry:
        wrong = f"{unknown[0]} is unknown" if unknown else "path is missing"
        raise UserError(f"datasets: {wrong} in {entry}; an entry has {', '.join(known)}.")
    return SourceArguments(**entry)


@dataclass
class RunArguments(DatasetArguments, ModelConfig):
    """What a run needs besides [`TrainingConfig`]: TRL's fields for model and data, and ours."""

    attn_implementation: str | None = option(
        None, "Attention of the language model. Default: varlen with packed_length, else sdpa, or as resumed."
    )
    lora_dropout: float = option(0.0, "Dropout before the adapters; TRL's is 0.05.")
    use_bnb_nested_quant: bool = option(True, "Quantize the 4-bit weights' scales too.")
    stage: Literal["align", "instruct", "adapt"] | None = option(None, "What to train; see training/stages.py.")
    datasets: list[SourceArguments] | None = option(None, "Sources instead of dataset_name; see docs/data.md.")
    image_folder: str | None = option(None, "Prefix of the image paths in a JSON file; by default the file's folder.")
    eval_dataset_name: str | None = option(None, "Held-out rows to evaluate the model on during training.")
    eval_image_folder: str | None = option(None, "image_folder of the held-out rows.")
    vision_learning_rate: float | None = option(None, "Learning rate of the vision encoder in stage 'instruct'.")
    projector_learning_rate: float | None = option(None, "Learning rate of the projector; learning_rate by default.")
    norm_learning_rate: float | None = option(None, "Learning rate of the projector's norm; learning_rate by default.")
    clip_by_module: bool = option(False, "Clip each module's gradient to max_grad_norm, not the whole gradient.")
    key_mmd_weight: float = option(0.0, "Weight of the MMD² between visual and text keys; see key_alignment.py.")
    key_gram_weight: float = option(0.0, "Weight of the distance between the Gram matrices of keys and frozen keys.")
    global_batch_size: int | None = option(None, "Samples per step over all devices; sets the accumulation steps.")
    packed_length: int | None = option(None, "Join samples into rows of so many tokens at most, without padding.")
    bad_rows: Literal["error", "skip"] = option("error", "Stop at a bad row, or leave it out and list it in a file.")
    open_pictures: bool = option(True, "Open every picture once before training, to find broken ones.")
    resume_changed: bool = option(False, "Resume even if data, batch or learning rate have changed.")
    recipe: str | None = field(default=None, init=False)
    """Path of the YAML file that `--config` named."""

    def __post_init__(self) -> None:
        if self.datasets is not None:
            entries: list[Any] = self.datasets
            self.datasets = [read_source(entry) for entry in entries]
        super().__post_init__()


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's arguments, with defaults that lose no data, and on a CPU the arithmetic that is faster there."""

    max_length: int | None = option(None, "Longest sample allowed, in tokens; longer ones are bad rows, never cut.")
    remove_unused_columns: bool = option(False, "Must stay off: rows are read when needed.")
    ddp_find_unused_parameters: bool | None = option(False, "Off: every trained parameter always has a gradient.")
    ddp_timeout: int = option(3 * 3600, "Seconds to wait for the main process, which reads and checks all rows.")
    use_cpu: bool = option(False, "Train on the CPU, as is done where there is no accelerator.")
    torch_compile: bool = option(False, "Compile each layer of the decoder; see docs/train.md for what it refuses.")
    bf16: bool | None = option(None, "bfloat16 arithmetic. Default: on a GPU, on a CPU fast at it, or as resumed.")

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UserError("output_dir is missing: give the folder that the trained model is written to.")
        named = self.resume_from_checkpoint  # of a command line a string
        self.resume_from_checkpoint: str | bool | None = {"true": True, "false": None}.get(str(named).lower(), named)
        # transformers 5.23 renamed this, and warns about the old name even when TRL's default sets it.
        if getattr(self, "activation_checkpointing", True) is None:
            self.activation_checkpointing = self.gradient_checkpointing
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        # TRL would turn `None` into true, which is slower on most CPUs.
        if self.use_cpu and self.bf16 is None and not self.fp16:
            self.bf16 = self._choose_bf16()
        # With torch_compile transformers would turn TF32 on, which rounds products in float32 to 10 bits.
        if self.torch_compile and self.tf32 is None:
            self.tf32: bool | None = False
        super().__post_init__()

    def _choose_bf16(self) -> bool:
        """As the run that is resumed recorded it; else whether the CPU multiplies bfloat16, by AMX or AVX-512."""
        recorded = recorded_argument(Path(self.output_dir), self.resume_from_checkpoint, "bf16")
        if recorded is not None:
            return bool(recorded)
        capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))

    @property
    def frozen_dtype(self) -> torch.dtype:
        """What frozen weights are held in. On a CPU float32 whatever the arithmetic: casting them would cost more."""
        return torch.bfloat16 if self.bf16 and self.device.type != "cpu" else torch.float32


def build_parser() -> TrlParser:
    """Knows the fields of a recipe, as options."""
    return TrlParser((RunArguments, TrainingConfig), allow_abbrev=False, usage=argparse.SUPPRESS)


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[RunArguments, TrainingConfig]:
    """Parse the command line, or `argv`, which overrides the recipe given by `--config`.

    Raises:
        UserError: if the recipe can't be read, a field is unknown, or what it asks for would be passed over.
    """
    recipe_parser = argparse.ArgumentParser("training/sft.py", epilog=FIELDS, allow_abbrev=False)
    recipe_parser.add_argument("--config", metavar="RECIPE", help="YAML file of a run's fields; options win over it")
    known, rest = recipe_parser.parse_known_args(argv)
    parser = build_parser()
    try:
        refuse_renamed([option_given for option_given in rest if option_given.startswith("--")])
        given = [] if known.config is None else read_recipe(Path(known.config), parser)
        parse(parser, given, f"{known.config}: ")
        parse(parser, rest)
        run_args, args = parser.parse_args_into_dataclasses([*given, *rest])
    except (ValueError, TypeError, yaml.YAMLError) as error:  # of libraries; ours are told in one line
        raise UserError(str(error)) from error
    run_args.recipe = known.config
    for arguments in (run_args, args):
        for name in PATHS:
            if getattr(arguments, name, None) is not None:
                setattr(arguments, name, os.path.expanduser(getattr(arguments, name)))
    check_arguments(run_args, args)
    return run_args, args


def refuse_renamed(options: Sequence[str]) -> None:
    """Say the new name of a field that people know by an old one.

    Raises:
        UserError: if one is given.
    """
    for option_given in options:
        name = option_given.removeprefix("--").partition("=")[0].replace("-", "_")
        if name in RENAMED:
            raise UserError(f"{name} is gone: {RENAMED[name]}.")


def read_recipe(path: Path, parser: TrlParser) -> list[str]:
    """A recipe's fields as options: argparse then checks their types and choices, which TRL's own reading does not.
    Lists and mappings become the parser's defaults. Raises `UserError` if it is not a mapping of fields to values.
    """
    with path.open(encoding="utf-8") as file:
        recipe = yaml.safe_load(file)
    if not isinstance(recipe, dict) or None in recipe.values():
        raise UserError(f"--config {path} must be a mapping of fields to values; leave out what has none.")
    refuse_renamed(list(recipe))
    nested = {name: value for name, value in recipe.items() if isinstance(value, list | dict)}
    unknown = parser.set_defaults_with_config(**nested)
    choices = {action.dest: action.choices for action in parser._actions}
    options = list(unknown)
    for name, value in recipe.items():
        if name in nested:
            continue
        # YAML reads a bare `no` as false, and `no` is what some fields are called when they are off.
        if value is False and "no" in (choices.get(name) or ()):
            value = "no"
        options.append(f"--{name}={value}")
    return options


def check_arguments(run_args: RunArguments, args: TrainingConfig) -> None:
    """Refuse what would change the result without a word. Raises `UserError` that names the fields."""
    for name in ("model_name_or_path", "dataset_name", "stage"):
        if getattr(run_args, name) is None and not (name == "dataset_name" and run_args.datasets):
            raise UserError(f"{name} is missing; training/recipes/ has recipes to start from.")
    for name, (value, reason) in ONLY.items():
        given = getattr(run_args, name, getattr(args, name, value))
        if given != value:
            raise UserError(f"{name} must stay {value!r}, got {getattr(given, 'value', given)!r}: {reason}.")
    check_ranges(run_args, args)
    check_combinations(run_args, args)
    stage, packed = Stage(str(run_args.stage)), run_args.packed_length is not None
    no_rate = stage is Stage.INSTRUCT and run_args.vision_learning_rate is None
    losses = run_args.key_mmd_weight or run_args.key_gram_weight
    adapts = stage is not Stage.ADAPT and (losses or run_args.load_in_4bit)
    twice = [name for name in ONE_SOURCE if getattr(run_args, name) != getattr(RunArguments, name)]
    no_stream = run_args.dataset_streaming and (run_args.datasets or packed or args.max_steps <= 0)
    samples, passes = run_args.global_batch_size, args.gradient_accumulation_steps
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if not args.bf16 and not args.fp16 else "no"
    missing = [name for name in args.report_to if name not in get_available_reporting_integrations()]
    no_steps = args.max_steps <= 0 and args.num_train_epochs <= 0
    other = os.environ.get("FSDP_VERSION", "2") != "2" or os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT"
    unused = run_args.eval_dataset_name and args.eval_strategy == "no" and not args.eval_on_start
    refusals = (
        (no_rate, "Stage 'instruct' trains the vision encoder too: give vision_learning_rate."),
        (adapts, "Losses on keys and load_in_4bit work only with stage 'adapt', which freezes the language model."),
        (run_args.datasets and twice, f"Give either {', '.join(twice)} or datasets, not both."),
        (no_stream, "A stream takes dataset_name and max_steps, and neither datasets nor packed_length."),
        (samples and passes != 1, "Give either global_batch_size or gradient_accumulation_steps, not both."),
        (packed and samples is None, "Packed rows hold varying numbers of samples: give global_batch_size."),
        (packed and args.neftune_noise_alpha, "neftune_noise_alpha depends on rows' lengths: remove packed_length."),
        (precision != "no", f"The launcher has mixed_precision {precision!r}: give bf16: true, or launch with 'no'."),
        (args.deepspeed_plugin, "DeepSpeed is not supported: shard with FSDP2, see training/accelerate/fsdp2.yaml."),
        (args.fsdp, "Take fsdp out of the recipe: launch with --config_file training/accelerate/fsdp2.yaml."),
        (other, "Set fsdp_version: 2 and SHARDED_STATE_DICT, as training/accelerate/fsdp2.yaml does."),
        (missing, f"report_to: {', '.join(missing)} is not installed: install it, or give report_to: none."),
        (no_steps, f"num_train_epochs {args.num_train_epochs:g} trains nothing: give a number above 0, or max_steps."),
        (args.fp16 and args.use_cpu, "fp16 needs a GPU: a CPU would compute in float32 all the same. Leave it out."),
        (unused, "eval_dataset_name needs an eval_strategy, or eval_on_start."),
        (args.optim.startswith("schedule_free"), "A schedule_free optimizer trains other weights than it saves."),
    )
    for applies, message in refusals:
        if applies:
            raise UserError(message)
    check_compiling(run_args, args)


def check_ranges(run_args: RunArguments, args: TrainingConfig) -> None:
    """Refuse numbers out of range before anything is read. Raises `UserError` that names the field."""
    given = {**vars(args), **vars(run_args)}
    for name in COUNTS:
        if given[name] is not None and given[name] < 1:
            raise UserError(f"{name} must be 1 or more, got {given[name]}.")
    for name in RATES:
        if given[name] is not None and not 0 <= given[name] < math.inf:
            raise UserError(f"{name} must be 0 or more, got {given[name]}.")


def check_combinations(run_args: RunArguments, args: TrainingConfig) -> None:
    """Refuse fields that would be passed over, or fail late, beside others. Raises `UserError` that names them."""
    if run_args.stage != "adapt":
        for name in OF_ADAPTERS:
            if getattr(run_args, name) != getattr(RunArguments, name):
                raise UserError(f"{name} is read in stage 'adapt' alone, got stage {run_args.stage!r}: leave it out.")

    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if evaluates and args.loss_type == "dft":
        raise UserError(
            "loss_type 'dft' weighs each token by its probability, so eval/loss would be no cross entropy: leave out "
            "loss_type, or evaluation."
        )

    has_key_losses = run_args.key_mmd_weight or run_args.key_gram_weight
    is_reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if has_key_losses and args.gradient_checkpointing and is_reentrant:
        raise UserError(
            "key_mmd_weight and key_gram_weight need the keys' gradients, which reentrant checkpointing doesn't give: "
            "set use_reentrant to false in gradient_checkpointing_kwargs."
        )

    if run_args.clip_by_module and not args.max_grad_norm:
        raise UserError("clip_by_module clips to max_grad_norm, and 0 clips nothing: give a number above 0.")


def check_devices(args: TrainingConfig) -> None:
    """Refuse several GPUs in one process, as in a notebook, for which transformers takes `nn.DataParallel`.

    Raises:
        UserError: if this process would use several.
    """
    if args.n_gpu > 1:
        raise UserError(
            f"This process would split its batches over {args.n_gpu} GPUs by DataParallel, which is not supported: "
            "start the run with accelerate launch, one process a GPU, or set CUDA_VISIBLE_DEVICES=0."
        )


def check_compiling(run_args: RunArguments, args: TrainingConfig) -> None:
    """Refuse what compiled layers can't do. Raises `UserError` that names the fields."""
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise UserError(
            "The launcher would compile the whole model: launch with --dynamo_backend no, and give "
            "torch_compile: true, which compiles the decoder's layers."
        )
    if args.torch_compile_backend not in (None, "inductor", "aot_eager"):
        raise UserError(
            "torch_compile_backend must be inductor, which is the default, or aot_eager: no other has been tried but "
            "eager, which draws dropout anew where a checkpointed layer is computed again."
        )
    if args.torch_compile and (run_args.key_mmd_weight or run_args.key_gram_weight):
        raise UserError(
            "key_mmd_weight and key_gram_weight read keys inside the layers, which compiled layers hide: set "
            "torch_compile to false."
        )
