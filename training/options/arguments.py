"""The arguments of a run: the fields of TRL and transformers, and this project's own fields."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, so calling it in a class body is safe

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from trl import ModelConfig, SFTConfig
from trl import ScriptArguments as DatasetArguments

from normllava.errors import UserError


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and the help text of its command-line option."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SourceArguments:
    """An entry of the recipe's `datasets`, which names a source of rows.

    `path`, `name` and `split` mean what they mean in TRL's `DatasetConfig`.
    """

    path: str
    name: str | None = None
    split: str = "train"
    image_folder: str | None = None
    """Prefix of the rows' image paths."""
    weight: float = 1.0
    """How often an epoch has each row. With 2 it has every row twice, with 0.1 a tenth of the rows once, and with 2.5
    every row twice and half of the rows a third time."""

    def __post_init__(self) -> None:
        is_valid = isinstance(self.weight, int | float) and 0 < self.weight < math.inf
        if not is_valid:
            raise UserError(f"datasets, {self.path}: weight must be a number above 0, got {self.weight!r}.")


@dataclass
class RunArguments(DatasetArguments, ModelConfig):
    """The arguments of a run that are not in [`TrainingConfig`]: TRL's for model and data, and this project's own."""

    attn_implementation: str | None = option(
        None,
        "Attention of the language model. Default: varlen where it can run, else sdpa; a resumed run keeps its own.",
    )
    lora_dropout: float = option(0.0, "Dropout before the adapters; TRL's is 0.05.")
    use_bnb_nested_quant: bool = option(True, "Quantize the 4-bit weights' scales too.")
    stage: Literal["align", "instruct", "adapt"] | None = option(None, "What to train; see docs/train.md.")
    datasets: list[SourceArguments] | None = option(None, "Sources instead of dataset_name; see docs/data.md.")
    image_folder: str | None = option(None, "Prefix of the image paths in a JSON file; by default the file's folder.")
    eval_dataset_name: str | None = option(None, "Held-out rows to evaluate the model on during training.")
    eval_image_folder: str | None = option(None, "image_folder of the held-out rows.")
    eval_answers: int = option(8, "Held-out rows that the model answers at each evaluation, into answers.jsonl.")
    vision_learning_rate: float | None = option(None, "Learning rate of the vision encoder in stage 'instruct'.")
    projector_learning_rate: float | None = option(None, "Learning rate of the projector; learning_rate by default.")
    norm_learning_rate: float | None = option(None, "Learning rate of the projector's norm; learning_rate by default.")
    clip_by_module: bool = option(False, "Clip each module's gradient to max_grad_norm, not the whole gradient.")
    key_mmd_weight: float = option(0.0, "Weight of the MMD² between visual and text keys; see key_alignment.py.")
    key_gram_weight: float = option(0.0, "Weight of the distance between the Gram matrices of keys and frozen keys.")
    global_batch_size: int | None = option(None, "Samples per step over all devices; sets the accumulation steps.")
    packed_length: int | None = option(None, "Join samples into rows of so many tokens at most, without padding.")
    max_tiles: int | None = option(None, "Cut pictures into fewer tiles than the processor does; 1 leaves them whole.")
    bad_rows: Literal["error", "skip"] = option("error", "Stop at a bad row, or leave it out and list it in a file.")
    open_pictures: bool = option(True, "Open every picture once before training, to find broken ones.")
    resume_changed: bool = option(False, "Resume even if data, batch or learning rate have changed.")
    recipe: str | None = field(default=None, init=False)
    """Path of the YAML file that `--config` named."""

    def __post_init__(self) -> None:
        if self.datasets is not None:
            self.datasets = [read_source(entry) for entry in self.datasets]
        super().__post_init__()

    @property
    def has_key_losses(self) -> bool:
        """Whether the training loss includes a term on the decoder's keys; see training/modules/key_alignment.py."""
        return self.key_mmd_weight > 0 or self.key_gram_weight > 0


def read_source(entry: Any) -> SourceArguments:
    """Turn an entry of a recipe's `datasets` into `SourceArguments`, unless it is a `SourceArguments` already.

    Raises:
        UserError: if the entry is no mapping, has no path, or has an unknown field.
    """
    if isinstance(entry, SourceArguments):
        return entry

    known_names = [known_field.name for known_field in fields(SourceArguments)]
    entry_help = f"an entry has {', '.join(known_names)}."
    if not isinstance(entry, dict):
        raise UserError(f"datasets: {entry!r} is no mapping; {entry_help}")

    for name in entry:
        if name not in known_names:
            raise UserError(f"datasets: {name} is unknown in {entry}; {entry_help}")
    if "path" not in entry:
        raise UserError(f"datasets: path is missing in {entry}; {entry_help}")
    return SourceArguments(**entry)


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's arguments with this project's defaults. By default no row is cut.

    On a CPU, arithmetic is in bfloat16 by default if the CPU has instructions for bfloat16, and otherwise in float32.
    """

    max_length: int | None = option(None, "Longest sample allowed, in tokens; longer ones are bad rows, never cut.")
    remove_unused_columns: bool = option(False, "Must stay off: rows are read when needed.")
    ddp_find_unused_parameters: bool | None = option(False, "Off: every trained parameter always has a gradient.")
    ddp_timeout: int = option(3 * 3600, "Seconds to wait for the main process, which reads and checks all rows.")
    use_cpu: bool = option(False, "Train on the CPU, as is done where there is no accelerator.")
    dataloader_num_workers: int = option(  # `None` only until `__post_init__`
        None, "Processes that open pictures. Default: on a GPU up to 8, a core each; none on a CPU and for streams."
    )
    dataloader_persistent_workers: bool = option(True, "Keep these processes from one epoch to the next.")
    pad_to_multiple_of: int | None = option(None, "Must stay off: a batch is padded to its longest row.")
    logging_nan_inf_filter: bool = option(False, "Must stay off: a loss that isn't finite ends the run.")
    gradient_checkpointing: bool | None = option(
        None,
        "Compute activations again in the backward pass, which saves memory. Default: on a GPU only if memory is too "
        "small without, which the rehearsal measures; true on a CPU and for streams. A resumed run keeps its own.",
    )
    torch_compile: bool = option(False, "Compile each layer and the projector; see docs/gpus.md for what it refuses.")
    bf16: bool | None = option(
        None, "Compute in bfloat16. Default: true on a GPU and on a CPU fast at it; a resumed run keeps its own."
    )

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise UserError("output_dir is missing: give the folder that the trained model is written to.")
        self.resume_from_checkpoint: str | bool | None = read_resume(self.resume_from_checkpoint)

        # transformers 5.23 renamed gradient_checkpointing to activation_checkpointing, which older versions lack.
        has_new_field = hasattr(self, "activation_checkpointing")
        new_value = getattr(self, "activation_checkpointing", None)
        # If the recipe gives neither field, layers are checkpointed until the rehearsal of the largest batches has
        # decided.
        self.chooses_checkpointing = self.gradient_checkpointing is None and new_value is None
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = True
        # transformers warns if only the old field is set, so both are set. If they differ, it takes the new field.
        if has_new_field and new_value is None:
            self.activation_checkpointing = self.gradient_checkpointing

        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.dataloader_num_workers is None:
            self.dataloader_num_workers = 0 if self.use_cpu else default_num_workers()
        # TRL would turn bf16 from `None` into true, but most CPUs are slower in bfloat16.
        arithmetic_is_given = self.bf16 is not None or self.fp16
        if self.use_cpu and not arithmetic_is_given:
            self.bf16 = is_cpu_fast_at_bf16()
        # With torch_compile, transformers would turn on TF32, which rounds the factors of float32 products to 10 bits.
        if self.torch_compile and self.tf32 is None:
            self.tf32: bool | None = False

        try:
            super().__post_init__()
        except ValueError as error:  # transformers refuses arguments, such as bf16 on a GPU that can't compute in it
            raise UserError(str(error)) from error

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The dtype in which frozen weights are kept.

        On a CPU it is float32 even with bf16, since casting bfloat16 weights to float32 in every step would cost more
        time than bfloat16 saves.
        """
        if self.bf16 and self.device.type != "cpu":
            return torch.bfloat16
        return torch.float32


def default_num_workers() -> int:
    """How many processes open pictures for a process that trains on a GPU: a core each, and 8 at most."""
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # on Linux, where a process may be confined to some cores
        num_cores = len(os.sched_getaffinity(0))
    num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by the launcher
    return min(num_cores // num_local_processes, 8)


def read_resume(given: str | bool | None) -> str | bool | None:
    """Read `resume_from_checkpoint`, which is a string if the command line gives it, even for "true" and "false".

    Returns:
        A checkpoint's path, `True` for the newest checkpoint, or `None` to start anew.
    """
    word = str(given).lower()  # "none" for `None`
    if word == "true":
        return True
    if word in ("false", "none"):
        return None
    return given


def is_cpu_fast_at_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices faster than float32 ones, by AMX or by AVX-512.

    Intel's CPUs with `avx512_fp16` have AMX, but some clouds hide it. By AVX-512 they take twice float32's time.
    """
    if not hasattr(torch.cpu, "get_capabilities"):  # an older version of torch
        return False
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_bf16"):
        return True
    return bool(capabilities.get("avx512_bf16") and not capabilities.get("avx512_fp16"))
