"""What a run was made with and on, for its model card."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


def describe_environment(num_processes: int, resumed: bool) -> dict[str, str | int | bool | None]:
    """Devices, versions, and the commit of this code; `None` for a commit where there is no git repository.

    To be called before training: by its end there may be another commit.

    Args:
        num_processes: How many processes train.
        resumed: Whether the run goes on from a checkpoint, so that what is timed from now on is not all of it.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    commit, clean = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return {
        "device": device,
        "num_processes": num_processes,
        "resumed": resumed,
        "commit": commit,
        "commit_is_clean": None if clean is None else not clean,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
