"""Hardware and software of a run, for its model card."""

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch


PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


@dataclass(frozen=True)
class Environment:
    """Hardware and software of a run.

    Attributes:
        device: Name of the GPU, or the kind of CPU.
        num_processes: How many processes train.
        resumed: Whether the run was resumed from a checkpoint, so that timings don't cover all of it.
        commit: Of this code; `None` without a git repository.
        commit_is_clean: Whether the code was exactly that of the commit.
        python: Version of Python.
        packages: Versions of `PACKAGES`.
    """

    device: str
    num_processes: int
    resumed: bool
    commit: str | None
    commit_is_clean: bool | None
    python: str
    packages: dict[str, str]


def describe_environment(device_type: str, num_processes: int, resumed: bool) -> Environment:
    """The environment at the start of a run: the commit may have changed by its end. `device_type` is as torch has it,
    `"cuda"` or `"cpu"`; a run may leave a GPU unused."""
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return Environment(
        device=torch.cuda.get_device_name() if device_type == "cuda" else platform.machine(),
        num_processes=num_processes,
        resumed=resumed,
        commit=commit,
        commit_is_clean=None if status is None else not status,
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
    )


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
