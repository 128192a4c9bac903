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
    """A run's data (its fingerprint), arguments (of `SAME`), recipe, environment, and sources (of a stream none)."""

    data: str
    arguments: dict[str, Any]
    recipe: str | None
    environment: Environment
    sources: tuple[Source, ...] = ()

    def write(self, folder: Path) -> None:
        """Write `run.json` into a folder."""
        write_whole(folder / RUN_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read `run.json` from a folder. Raises `UserError` if it can't be read or lacks a field."""
        return read_record(cls, folder / RUN_FILE)


def describe_run(
    arguments: Mapping[str, Any],
    data: str,
    environment: Environment,
    recipe: str | None = None,
    sources: Sequence[Source] = (),
) -> Run:
    """The record of a run that is about to start, from all of its arguments by name."""
    kept = {name: arguments[name] for name in SAME if name in arguments}
    as_read_back = json.loads(json.dumps(kept, default=str))
    return Run(data, as_read_back, None if recipe is None else os.path.abspath(recipe), environment, tuple(sources))


def check_same_run(checkpoint: Path, run: Run) -> None:
    """Compare a run with the record in a checkpoint. Raises `UserError` that lists the differences."""
    before, now = (
        {"data": of.data, "num_processes": of.environment.num_processes, **of.arguments}
        for of in (Run.read(checkpoint), run)
    )
    differences = [
        f"  {name}: {before[name]!r} before, {now[name]!r} now\n"
        for name in now
        if name in before and before[name] != now[name]  # a later version may record more
    ]
    if differences:
        raise UserError(
            f"{checkpoint} belongs to a different run:\n{''.join(differences)}"
            "Restore these, or resume anyway with --resume_changed true."
        )


def describe_environment(device_type: str, num_processes: int, resumed: bool) -> Environment:
    """The environment at the start of a run: the commit may have changed by its end. `device_type` is as torch has it,
    `"cuda"` or `"cpu"`; a run may leave a GPU unused."""
    # An installed copy may lie in a folder of another project's repository, which doesn't track it.
    tracked = _git("ls-files", "--error-unmatch", __file__) is not None
    return Environment(
        device=torch.cuda.get_device_name() if device_type == "cuda" else platform.machine(),
        num_processes=num_processes,
        resumed=resumed,
        commit=_git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if tracked else None,
        packages={name: version(name) for name in PACKAGES},
    )


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, check=True)
        return done.stdout.decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None
