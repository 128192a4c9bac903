"""The record of a run, `run.json`, written with every checkpoint and every finished model."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.files import write_whole
from common.records import read_record


RUN_FILE = "run.json"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")
# Arguments that the weights depend on: a resumed run must have the same. The data is compared by its content.
SAME = (
    "stage", "model_name_or_path", "model_revision", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    "attn_implementation", "torch_compile", "lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora",
    "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "packed_length", "max_length",
    "num_train_epochs", "max_steps", "dataset_streaming", "seed", "data_seed", "bf16",
    "fp16", "learning_rate", "vision_learning_rate", "projector_learning_rate", "norm_learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "clip_by_module", "loss_type", "neftune_noise_alpha",
    "key_mmd_weight", "key_gram_weight",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What a run takes from a source; `path`, `name`, `split` and `weight` are as given."""

    path: str
    name: str | None
    split: str
    is_local: bool
    """Whether `path` is a local file or folder, not a dataset on the Hub."""
    rows: int
    good_rows: int
    weight: float
    drawn: int
    """Rows of an epoch that come from this source."""
    fingerprint: str
    """Of the good rows' content."""


@dataclass(frozen=True)
class Environment:
    """Hardware and software of a run."""

    device: str
    """Name of the GPU, or the kind of CPU."""
    num_processes: int
    resumed: bool
    """Whether the run was resumed from a checkpoint, so that timings don't cover all of it."""
    commit: str | None
    """Of this code, with "-dirty" if files have changed since; `None` without a git repository."""
    packages: dict[str, str]


@dataclass(frozen=True)
class Run:
    """What a run trained on, and how."""

    data: str
    """Fingerprint of the rows."""
    arguments: dict[str, Any]
    """Those of `SAME`, by name."""
    recipe: str | None
    """Path of the recipe."""
    environment: Environment
    sources: tuple[Source, ...] = ()
    """None for a stream."""

    def write(self, folder: Path) -> None:
        """Write `run.json` into a folder."""
        write_whole(folder / RUN_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read `run.json` from a folder.

        Raises:
            UserError: if it can't be read, or lacks a field.
        """
        return read_record(cls, folder / RUN_FILE)


def describe_run(
    arguments: Mapping[str, Any],
    data: str,
    environment: Environment,
    recipe: str | None = None,
    sources: Sequence[Source] = (),
) -> Run:
    """The record of a run that is about to start, from all of its arguments by name."""
    recorded = {name: arguments[name] for name in SAME if name in arguments}
    return Run(
        data=data,
        arguments=json.loads(json.dumps(recorded, default=str)),  # as they will be read back, to be compared
        recipe=None if recipe is None else os.path.abspath(recipe),
        environment=environment,
        sources=tuple(sources),
    )


def check_same_run(checkpoint: Path, run: Run) -> None:
    """Compare a run with the record in a checkpoint.

    Raises:
        UserError: if they differ; it lists the differences.
    """
    before = _compared_fields(Run.read(checkpoint))
    now = _compared_fields(run)

    differences = ""
    for name in now:
        # A field that only one of the two records was added by a later version.
        if name in before and before[name] != now[name]:
            differences += f"  {name}: {before[name]!r} before, {now[name]!r} now\n"
    if differences:
        raise UserError(
            f"{checkpoint} belongs to a different run:\n{differences}"
            "Restore these, or resume anyway with --resume_changed true."
        )


def _compared_fields(run: Run) -> dict[str, Any]:
    return {"data": run.data, "num_processes": run.environment.num_processes, **run.arguments}


def describe_environment(device_type: str, num_processes: int, resumed: bool) -> Environment:
    """The environment at the start of a run: the commit may have changed by its end.

    Args:
        device_type: What the run trains on, as torch has it, `"cuda"` or `"cpu"`; it may leave a GPU unused.
        num_processes: Processes of the run.
        resumed: Whether it goes on from a checkpoint.
    """
    return Environment(
        device=torch.cuda.get_device_name() if device_type == "cuda" else platform.machine(),
        num_processes=num_processes,
        resumed=resumed,
        commit=current_commit(),
        packages={name: version(name) for name in PACKAGES},
    )


def current_commit() -> str | None:
    """The commit of this code; `None` if no repository tracks it.

    An installed copy may lie in a folder of another project's repository, which doesn't track it.
    """
    if _run_git("ls-files", "--error-unmatch", __file__) is None:
        return None
    return _run_git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _run_git(*arguments: str) -> str | None:
    """What git prints of this file's repository; `None` if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode().strip()
