"""The arguments of a run: TRL's and ours. What would change the result without a word is refused."""

# ruff: noqa: RUF009 - `option` makes a field of a dataclass, as `field` does

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from accelerate.utils import gather_object, parse_flag_from_env
from trl import ModelConfig, SFTConfig, TrlParser
from trl import ScriptArguments as DatasetArguments

from training.checkpoints import checkpoints
from training.run import RUN_FILE
from training.stages import Stage


# Fields of TRL and transformers that would train something else, or be passed over, without a word.
ONLY: dict[str, tuple[Any, str]] = {
    "use_peft": (False, "stage 'adapt' is the one that trains adapters"),
    "lora_target_modules": (None, "adapters go on all linear layers of the decoder's blocks"),
    "packing": (False, "TRL packs only text; give packed_length to pack rows with pictures"),
    "completion_only_loss": (None, "the loss always covers assistant turns, and nothing else"),
    "average_tokens_across_devices": (True, "every token of a step has the same weight on any device"),
    "auto_find_batch_size": (False, "the rows of a step would change; set per_device_train_batch_size"),
    "ignore_data_skip": (False, "a resumed run would train on rows twice"),
    "torch_compile": (False, "compiled code would pass over the hooks that cut the loss down to supervised tokens"),
    "enable_jit_checkpoint": (False, "it saves in the middle of a step; resume from the last checkpoint"),
    "load_best_model_at_end": (False, "save_strategy 'best' keeps the best checkpoint; take it from its folder"),
    "chat_template_path": (None, "the chat template comes with the checkpoint; compose writes it"),
    "push_to_hub": (False, "it would upload training_args.bin, which holds your token; release with hub_cards"),
}
SAMPLING = ("random", "group_by_length", "sequential")
# Fields that each entry of `datasets` has instead.
ONE_SOURCE = ("dataset_name", "dataset_config", "dataset_train_split", "image_folder")
# Kernel bandwidths of the losses on keys, as in the diagnostics' MMD².
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)


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

    @classmethod
    def parse(cls, entry: Any, place: str) -> "SourceArguments":
        """Read an entry. Raises `ValueError` that says which one."""
        try:
            source = cls(**{**entry, "weight": float(entry.get("weight", 1))})
        except (TypeError, ValueError, AttributeError) as error:
            fields = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"{place} must be a mapping of {fields}, got {entry!r} ({error}).") from error
        if not 0 < source.weight < math.inf:
            raise ValueError(f"{place}: weight must be a finite number above 0, got {source.weight}.")
        return source


@dataclass
class RunArguments(DatasetArguments, ModelConfig):
    """What a run needs besides [`TrainingConfig`]: TRL's fields for model and data, and ours."""

    attn_implementation: str = option("sdpa", "Attention of the language model; flash_attention_2 on a GPU.")
    lora_dropout: float = option(0.0, "Dropout before the adapters; TRL's is 0.05.")
    use_bnb_nested_quant: bool = option(True, "Quantize the 4-bit weights' scales too.")
    stage: Literal["align", "instruct", "adapt"] | None = option(None, "What to train; see training/stages.py.")
    datasets: list[SourceArguments] | None = option(
        None, "Several sources instead of dataset_name, each with the fields of SourceArguments."
    )
    image_folder: str | None = option(None, "Prefix of the image paths in a JSON file; by default the file's folder.")
    eval_dataset_name: str | None = option(None, "Held-out rows to evaluate the model on during training.")
    eval_image_folder: str | None = option(None, "image_folder of the held-out rows.")
    vision_learning_rate: float | None = option(
        None, "Learning rate of the vision encoder; required in stage 'instruct'."
    )
    projector_learning_rate: float | None = option(None, "Learning rate of the projector; learning_rate by default.")
    norm_learning_rate: float | None = option(None, "Learning rate of the projector's norm; learning_rate by default.")
    clip_by_module: bool = option(False, "Clip each module's gradient to max_grad_norm, not the whole gradient.")
    key_mmd_weight: float = option(0.0, "Weight of the MMD² between visual and text keys; see key_alignment.py.")
    key_gram_weight: float = option(0.0, "Weight of the distance between the Gram matrices of keys and frozen keys.")
    key_layers: list[int] | None = option(None, "Decoder layers whose keys have these losses; all by default.")
    key_bandwidths: list[float] = field(
        default_factory=lambda: list(BANDWIDTHS),
        metadata={"help": "Kernel bandwidths of the MMD², as multiples of the mean squared distance."},
    )
    global_batch_size: int | None = option(
        None, "Samples per step over all devices; sets gradient_accumulation_steps."
    )
    packed_length: int | None = option(
        None, "Join samples into rows of at most this many tokens, instead of padding them."
    )
    bad_rows: Literal["error", "skip"] = option(
        "error", "Stop at a bad row, or skip bad rows and list them in a file."
    )
    open_pictures: bool = option(True, "Open every picture once before training, to find broken ones.")
    resume_changed: bool = option(False, "Resume even if data, batch or learning rate have changed.")
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
        if self.datasets is not None:
            self.datasets = [
                SourceArguments.parse(entry, f"datasets, entry {n}") for n, entry in enumerate(self.datasets, 1)
            ]
        super().__post_init__()


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's arguments, with defaults that lose no data, and on a CPU the arithmetic that is faster there."""

    max_length: int | None = option(None, "Longest sample allowed, in tokens; longer ones are bad rows, never cut.")
    remove_unused_columns: bool = option(False, "Must stay off: rows are read when needed.")
    ddp_find_unused_parameters: bool | None = option(
        False, "Off: every trained parameter has a gradient in every batch."
    )
    ddp_timeout: int = option(
        3 * 3600, "Seconds that processes wait for each other: the main one reads and checks all rows."
    )
    use_cpu: bool = option(False, "Train on the CPU, as is done where there is no accelerator.")
    bf16: bool | None = option(
        None,
        "Arithmetic in bfloat16. If not given: on a GPU; on a CPU if it has AMX, or as the resumed run did.",
    )
    logging_nan_inf_filter: bool = option(False, "Off: training stops when the loss is NaN or infinite.")

    def __post_init__(self) -> None:
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
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.chose_bf16 = self.use_cpu and self.bf16 is None and not self.fp16
        if self.chose_bf16:  # TRL would turn `None` into true, which is slower on a CPU without AMX
            self.bf16 = self._choose_bf16()
        super().__post_init__()
        if self.chose_bf16 and len(set(gather_object([self.bf16]))) > 1:
            raise ValueError("Some processes run on CPUs with AMX and some without: set bf16 to true or false.")

    def _choose_bf16(self) -> bool:
        """As the run that is resumed recorded it; else whether the CPU is faster at bfloat16, by AMX."""
        output_dir, named = Path(self.output_dir), self.resume_from_checkpoint
        for folder in [*checkpoints(output_dir), output_dir] if named is True else [Path(str(named))] if named else []:
            try:
                return bool(json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["arguments"]["bf16"])
            except (OSError, ValueError, KeyError):  # not complete; the one before it will be resumed
                continue
        capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        return bool(capabilities.get("amx_bf16"))

    @property
    def frozen_dtype(self) -> torch.dtype:
        """What frozen weights are held in. On a CPU float32 whatever the arithmetic: casting them would cost more."""
        return torch.bfloat16 if self.bf16 and self.device.type != "cpu" else torch.float32


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[RunArguments, TrainingConfig]:
    """Parse the command line, or `argv`, which overrides the recipe given by `--config`.

    Raises:
        ValueError: if the recipe can't be read, a field is unknown, or what it asks for would be passed over.
    """
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--config")
    known, rest = recipe_parser.parse_known_args(argv)
    parser = TrlParser((RunArguments, TrainingConfig), allow_abbrev=False, usage=argparse.SUPPRESS)
    given = [] if known.config is None else read_recipe(Path(known.config), parser)
    try:
        run_args, args = parser.parse_args_into_dataclasses([*given, *rest])
    except ValueError as error:  # from transformers or TRL: raised here, it is told in one line as ours are
        raise ValueError(str(error)) from error
    run_args.recipe = known.config
    check_arguments(run_args, args)
    return run_args, args


def read_recipe(path: Path, parser: TrlParser) -> list[str]:
    """A recipe's fields as options: argparse then checks their types and choices, which TRL's own reading does not.
    Lists and mappings become the parser's defaults.

    Raises:
        ValueError: if it can't be read, is not a mapping of fields to values, or has an empty field.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} can't be read ({' '.join(str(error).split())}).") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--config {path} is not a mapping of fields to values, such as `learning_rate: 1.0e-3`.")
    options = []
    for name, value in recipe.items():
        if value is None:
            raise ValueError(f"--config {path}: {name} is empty; give it a value, or leave its line out.")
        if isinstance(value, list | dict):
            options += parser.set_defaults_with_config(**{name: value})
        else:
            options.append(f"--{name}={value}")
    return options


def check_arguments(run_args: RunArguments, args: TrainingConfig) -> None:
    """Refuse what would change the result without a word. Raises `ValueError` that names the fields."""
    for name in ("model_name_or_path", "dataset_name", "stage"):
        if getattr(run_args, name) is None and not (name == "dataset_name" and run_args.datasets):
            raise ValueError(f"{name} is missing; training/recipes/ has recipes to start from.")
    for name, (value, reason) in ONLY.items():
        given = getattr(run_args, name, getattr(args, name, value))
        if given != value:
            raise ValueError(f"{name} must stay {value!r}, got {given!r}: {reason}.")
    for check in (_check_stage, _check_rows, _check_launcher):
        for applies, message in check(run_args, args):
            if applies:
                raise ValueError(message)


# What is refused, each with whether it applies.
Refusals = Sequence[tuple[Any, str]]


def _check_stage(run_args: RunArguments, args: TrainingConfig) -> Refusals:
    stage, key_losses = Stage(str(run_args.stage)), ", ".join(run_args.key_losses)
    needs_rate = stage is Stage.INSTRUCT and run_args.vision_learning_rate is None
    other = stage is not Stage.ADAPT
    schedule_free = args.optim.startswith("schedule_free")
    return (
        (needs_rate, "Stage 'instruct' trains the vision encoder too: give vision_learning_rate."),
        (
            other and run_args.load_in_4bit,
            "load_in_4bit works only with stage 'adapt': 4 bits can't be trained.",
        ),
        (other and key_losses, f"{key_losses} works only with stage 'adapt', which freezes k_proj itself."),
        (schedule_free, f"optim {args.optim.value!r} trains on other weights than it saves: use adamw_torch."),
    )


def _check_rows(run_args: RunArguments, args: TrainingConfig) -> Refusals:
    packed, streaming = run_args.packed_length is not None, run_args.dataset_streaming
    samples, order = run_args.global_batch_size, args.train_sampling_strategy
    twice = [name for name in ONE_SOURCE if getattr(run_args, name) != getattr(RunArguments, name)]
    mixed = [source.weight for source in run_args.sources] != [1]
    noise = packed and args.neftune_noise_alpha
    return (
        (run_args.datasets is not None and twice, f"Give either {', '.join(twice)} or datasets, not both."),
        (streaming and mixed, "dataset_streaming reads a single source of weight 1: remove it."),
        (streaming and args.max_steps <= 0, "The length of a stream is not known: give max_steps."),
        (
            order not in (SAMPLING[:1] if packed else SAMPLING),
            f"train_sampling_strategy must be one of {', '.join(SAMPLING)}, and random with packed_length.",
        ),
        (noise, "neftune_noise_alpha scales its noise by a row's length, which packed_length changes: remove one."),
        (
            samples is not None and (args.gradient_accumulation_steps != 1 or (packed and streaming)),
            "Give either global_batch_size or gradient_accumulation_steps, not both; the latter for packed streams.",
        ),
        (
            samples is None and packed and not streaming,
            "Packed rows hold varying numbers of samples: give global_batch_size, the samples of a step.",
        ),
    )


def _check_launcher(run_args: RunArguments, args: TrainingConfig) -> Refusals:
    environ, deepspeed = os.environ, args.deepspeed_plugin
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    compiles = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"
    sharded = "SHARDED_STATE_DICT"
    known = environ.get("FSDP_VERSION") == "2" and environ.get("FSDP_STATE_DICT_TYPE", sharded) == sharded
    has_own = deepspeed is not None and {"optimizer", "scheduler"} & deepspeed.deepspeed_config.keys()
    clips = deepspeed is not None and run_args.clip_by_module
    return (
        (
            precision != "no" and not args.bf16 and not args.fp16,
            f"accelerate's launcher has mixed_precision {precision!r}, which Trainer would follow: give bf16: true, "
            "or launch with --mixed_precision no.",
        ),
        (compiles, "Launch without --dynamo_backend: compiled code would pass over the hooks that the loss needs."),
        (
            parse_flag_from_env("ACCELERATE_USE_FSDP") and not known,
            f"Set fsdp_version to 2 and fsdp_state_dict_type to {sharded} in the launcher's fsdp_config, as "
            "training/accelerate/fsdp2.yaml does.",
        ),
        (has_own, "Remove optimizer and scheduler from DeepSpeed's config: all modules would get one learning rate."),
        (clips, "DeepSpeed can only clip all gradients together: remove clip_by_module."),
    )
