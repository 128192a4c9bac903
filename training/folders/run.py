"""The record of a run, `run.json`, which lies in every checkpoint and beside every finished model."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from normllava.errors import UserError
from normllava.evaluation.json_records import read_record
from normllava.files import weights_fingerprint, write_whole


RUN_FILE = "run.json"
COMPOSED_FILE = "composed.json"
# The packages whose versions are recorded.
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")
# The arguments on which the trained weights depend. They must be the same when a run is resumed. The arguments that
# name the data are left out, because the data is compared by its content.
COMPARED_ARGUMENTS = (
    "stage", "model_name_or_path", "model_revision", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    "attn_implementation", "torch_compile", "torch_compile_backend", "tf32",
    "lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora",
    "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "packed_length", "max_length",
    "max_tiles", "num_train_epochs", "max_steps", "dataset_streaming", "seed", "data_seed", "bf16",
    "fp16", "learning_rate", "vision_learning_rate", "projector_learning_rate", "norm_learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "optim_target_modules",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "clip_by_module", "loss_type",
    "neftune_noise_alpha", "key_mmd_weight", "key_gram_weight",
)  # fmt: skip


@dataclass(frozen=True)
class SourceRecord:
    """The record of a source of rows. `path`, `name`, `split` and `weight` are as the recipe gives them."""

    path: str
    name: str | None
    split: str
    is_local: bool
    """Whether `path` is a local file or folder, not a dataset on the Hub."""
    rows: int | None
    """The number of rows in the source, good and bad; `None` for a stream, whose rows nobody counts."""
    good_rows: int | None
    """The number of rows that passed the check; `None` for a stream."""
    weight: float
    drawn: int | None
    """The number of rows in an epoch that come from this source; `None` for a stream."""
    fingerprint: str
    """The fingerprint of the good rows' content, or of what a stream reads."""


@dataclass(frozen=True)
class Environment:
    """Hardware and software of a run."""

    device: str
    """Name of the GPU, or the architecture of the CPU, such as x86_64."""
    num_processes: int
    resumed: bool
    """Whether the run was resumed from a checkpoint. If so, its timings don't cover the whole run."""
    commit: str | None
    """The git commit of this code, with "-dirty" if files have changed since; `None` if the code isn't in git."""
    packages: dict[str, str]
    """The versions of `PACKAGES`, by name."""


@dataclass(frozen=True)
class Composed:
    """What `training/compose.py` did to a model, for the model's card: `composed.json` beside the untrained model.

    Each run copies it into its own record, since a plain Llava's config has no place for it.
    """

    projector_scaled: bool
    """Whether the projector was scaled, so that image tokens started at the text's norm."""
    projector_aligned: bool
    """Whether the projector was aligned with the embeddings of captions' text."""
    llava_name_or_path: str | None
    """The Hub id or folder of the Llava that the model was converted from; `None` if it was made of parts."""

    def write(self, folder: Path) -> None:
        """Write `composed.json` into a folder."""
        write_whole(folder / COMPOSED_FILE, json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class RecordOfComposing:
    """The one field of `run.json` that is read of a run that isn't resumed. Records of earlier versions lack it."""

    composed: Composed | None = None


@dataclass(frozen=True)
class Run:
    """The record of a run's data, arguments and environment."""

    data: str
    """The fingerprint of all rows."""
    arguments: dict[str, Any]
    """The arguments in `COMPARED_ARGUMENTS`, by name, and `gradient_checkpointing`, which a resumed run may change."""
    recipe: str | None
    """Path of the recipe; `None` if all fields were given on the command line."""
    environment: Environment
    sources: tuple[SourceRecord, ...] = ()
    """The records of the sources of rows."""
    start_weights: str | None = None
    """The fingerprint of the weights of the model that the run started from; `None` if it has no safetensors files."""
    composed: Composed | None = None
    """How the model that the first stage started from was composed; `None` if that isn't known."""

    def with_start(self, start_weights: str | None, composed: Composed | None) -> "Run":
        """The same record, with these fields of the model that the run started from."""
        return replace(self, start_weights=start_weights, composed=composed)

    def with_checkpointing(self, is_on: bool) -> "Run":
        """The same record, with the argument `gradient_checkpointing` set to `is_on`."""
        return replace(self, arguments={**self.arguments, "gradient_checkpointing": is_on})

    def write(self, folder: Path) -> None:
        """Write `run.json` into a folder."""
        write_whole(folder / RUN_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read `run.json` from a folder.

        Raises:
            UserError: if the file can't be read, or lacks a field.
        """
        return read_record(cls, folder / RUN_FILE)


def describe_run(
    arguments: Mapping[str, Any],
    data: str,
    environment: Environment,
    recipe: str | None = None,
    sources: Sequence[SourceRecord] = (),
) -> Run:
    """The record of a run that is about to start.

    Args:
        arguments: All arguments of the run, by name.
        data: The fingerprint of all rows.
        environment: The hardware and software.
        recipe: Path of the recipe.
        sources: The records of the sources of rows.
    """
    compared_arguments = {name: arguments[name] for name in COMPARED_ARGUMENTS if name in arguments}
    return Run(
        data=data,
        # JSON changes some values, such as tuples to lists. The round trip through JSON makes the same changes here,
        # so that the arguments can be compared with those read from a file.
        arguments=json.loads(json.dumps(compared_arguments, default=str)),
        recipe=None if recipe is None else os.path.abspath(recipe),
        environment=environment,
        sources=tuple(sources),
    )


def check_same_run(checkpoint: Path, run: Run) -> None:
    """Check that a run is the same as the run that wrote a checkpoint.

    Raises:
        UserError: if the records of the two runs differ. The message lists the differences.
    """
    fields_before = _compared_fields(Run.read(checkpoint))
    fields_now = _compared_fields(run)

    differences = ""
    for name, now in fields_now.items():
        if name not in fields_before:  # the checkpoint is from a version of this code without the field
            continue
        before = fields_before[name]
        if before != now:
            differences += f"  {name}: {before!r} before, {now!r} now\n"
    if differences:
        raise UserError(
            f"{checkpoint} belongs to a different run:\n{differences}"
            "Restore these, or resume anyway with --resume_changed true."
        )


def read_composed(name: str) -> Composed | None:
    """How the model in a folder was composed: by its `composed.json`, or by the record of the run that trained it.

    Returns:
        `None` for a model of the Hub, and for a folder without such a record.

    Raises:
        UserError: if a record can't be read.
    """
    folder = Path(name)
    if (folder / COMPOSED_FILE).exists():
        return read_record(Composed, folder / COMPOSED_FILE)
    if (folder / RUN_FILE).exists():
        return read_record(RecordOfComposing, folder / RUN_FILE).composed
    return None


def start_weights(name: str, revision: str | None) -> str | None:
    """The fingerprint of the weights of a model on this disk: a folder, or what was downloaded of a Hub id."""
    config_file = cached_file(name, "config.json", revision=revision)
    assert config_file is not None  # the model has been loaded
    return weights_fingerprint(Path(config_file).parent)


def check_start_weights(folder: Path, name: str, weights_now: str | None) -> None:
    """Check that an adapter's base model still has the weights that the adapter was trained on.

    Args:
        folder: The adapter's folder, or a checkpoint's. A folder without a record of the weights isn't checked.
        name: The base model.
        weights_now: What [`start_weights`] returns for the base model.

    Raises:
        UserError: if the weights have changed.
    """
    if not (folder / RUN_FILE).exists():
        return
    recorded = Run.read(folder).start_weights
    if recorded is not None and recorded != weights_now:
        raise UserError(
            f"{folder} was trained on weights with the fingerprint {recorded}, and those of {name} now have "
            f"{weights_now}: restore the weights that it was trained on, or train the adapter anew."
        )


def _compared_fields(run: Run) -> dict[str, Any]:
    """All that must be the same when a run is resumed, by name."""
    return {"data": run.data, "num_processes": run.environment.num_processes, **run.arguments}


def describe_environment(device_type: str, num_processes: int, resumed: bool) -> Environment:
    """The environment of a run. Call this when the run starts, since the commit may change during training.

    Args:
        device_type: torch's name for the kind of device that the run trains on, `"cuda"` or `"cpu"`.
        num_processes: How many processes the run has.
        resumed: Whether the run is resumed from a checkpoint.
    """
    device = platform.machine()
    if device_type == "cuda":
        device = torch.cuda.get_device_name()
    return Environment(
        device=device,
        num_processes=num_processes,
        resumed=resumed,
        commit=current_commit(),
        packages={name: version(name) for name in PACKAGES},
    )


def current_commit() -> str | None:
    """The git commit of this code; `None` if no repository tracks the code."""
    # An installed copy may lie inside the repository of another project, whose commit says nothing about this code.
    # `ls-files --error-unmatch` fails for a file that the repository doesn't track.
    if _run_git("ls-files", "--error-unmatch", __file__) is None:
        return None
    # By default `describe` names the commit by a tag. `--exclude=*` excludes all tags, so that it prints the hash.
    return _run_git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _run_git(*arguments: str) -> str | None:
    """What a git command prints when it runs in this file's folder; `None` if the command fails."""
    try:
        completed = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.decode().strip()
