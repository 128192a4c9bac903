"""Checkpoints that are complete or not there: how one is published, examined, chosen and compared with a run."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


logger = logging.getLogger(__name__)

# What a run is made of, written into each checkpoint; a resumed run must be made of the same.
RUN_FILE = "run.json"
SAVING_FOLDER = ".saving"
BROKEN_FOLDER = "broken"


def publish(folder: Path, destination: Path) -> None:
    """Move a finished folder to its place, so that a power cut leaves either all of it there or nothing.

    Files become readable by others: safetensors creates them for their owner alone.
    """
    _make_durable(folder)
    if destination.exists():  # of an earlier run from an older checkpoint
        shutil.rmtree(destination)
    os.rename(folder, destination)
    _sync(destination.parent)


def publish_files(folder: Path, destination: Path) -> None:
    """Move the files of a finished folder into one that is there already, config.json last: no model without it."""
    _make_durable(folder)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
        os.replace(path, destination / path.name)
    folder.rmdir()
    _sync(destination)


def _make_durable(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.chmod(0o644)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_problem(checkpoint: Path) -> str | None:
    """Why a checkpoint can't be resumed from, or `None`. Opens every file; the content of tensors is not read."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        if checkpoint.name != f"{PREFIX_CHECKPOINT_DIR}-{state['global_step']}":
            return f"trainer_state.json is of step {state['global_step']}"
        run = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        return f"the state can't be read ({error})"
    sharded = [path for path in checkpoint.iterdir() if path.is_dir()]  # FSDP's and DeepSpeed's own formats
    for path in sharded:
        if not any(path.iterdir()):
            return f"{path.name} is empty"
    try:
        weights = _weight_files(checkpoint)
        for path in weights:
            with safe_open(path, framework="pt"):
                pass
        processes = run["num_processes"]
        needed = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
        if not sharded:
            needed += ["optimizer.pt", "scheduler.pt"]
        for name in needed:
            torch.load(checkpoint / name, map_location="cpu", mmap=True, weights_only=False)
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        return f"a file is missing or broken ({error})"
    if not weights and not sharded:
        return "there are no weights"
    return None


def _weight_files(checkpoint: Path) -> list[Path]:
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [checkpoint / name for name in sorted(names)]
    return sorted(checkpoint.glob("*.safetensors"))


def newest_complete(output_dir: Path, is_main_process: bool) -> Path | None:
    """The newest checkpoint that can be resumed from. Broken ones are moved into a folder `broken` beside it."""
    folders = [path for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    for path in sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        problem = checkpoint_problem(path)
        if problem is None:
            return path
        if is_main_process:
            aside = output_dir / BROKEN_FOLDER / path.name
            logger.warning("%s is not complete: %s. Moved to %s", path, problem, aside)
            aside.parent.mkdir(exist_ok=True)
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)
    return None


def check_same_run(checkpoint: Path, run: dict[str, Any]) -> None:
    """Compare what a run is made of with what the checkpoint's was made of.

    Raises:
        ValueError: if they differ; the message lists how.
    """
    before = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
    differences = [
        f"  {name}: {before.get(name)!r} before, {run.get(name)!r} now"
        for name in sorted(before.keys() | run.keys())
        if before.get(name) != run.get(name)
    ]
    if differences:
        raise ValueError(
            f"{checkpoint} is of another run than this one:\n" + "\n".join(differences) + "\nPut these back, or go "
            "on all the same with --resume_changed true."
        )
