"""Atomic checkpoints: how one is published, checked, chosen, and made the result."""

import errno
import fcntl
import itertools
import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from conversations.files import fresh_folder, write_whole
from training.run import RUN_FILE, Run


logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# Files that the model card reads the training from.
RECORD = (RUN_FILE, STATE_FILE, "metrics.jsonl")
# What FSDP's activation checkpointing puts into the names of a block's parameters; `state_dict` leaves it out.
CHECKPOINTED_BLOCK = "_checkpoint_wrapped_module."
# Maximum size of a weights file, unless a single weight is larger.
BYTES_PER_FILE = 5 * 10**9
LOCK_FILE = ".lock"
SAVING_FOLDER = ".saving"
BROKEN_FOLDER = "broken"
SUPERSEDED_FOLDER = "superseded"
# Files of a checkpoint besides the model: the state of training.
TRAINING_STATE = ("optimizer*", "scheduler*", "rng_state*", "scaler*", "global_step*", "latest", "zero_to_fp32.py",
                  "pytorch_model_fsdp*", "stream.json")  # fmt: skip


@contextmanager
def lock(output_dir: Path) -> Iterator[None]:
    """Lock a folder for one run. The system releases the lock when the process ends, however it ends.

    Raises:
        ValueError: if another run holds it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / LOCK_FILE).open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which forked workers would keep holding
        except OSError as error:
            cause = f"can't be locked ({error}): its file system must support POSIX locks"
            if error.errno in (errno.EACCES, errno.EAGAIN):
                cause = "is in use by another run. Wait until it ends"
            raise ValueError(f"output_dir {output_dir} {cause}, or choose another folder.") from error
        yield


def publish(folder: Path, destination: Path) -> None:
    """Move a finished folder to its place atomically: after a power cut either all of it is there or nothing.

    Files become readable by others: safetensors makes them readable by their owner only.
    """
    _make_durable(folder)
    if destination.exists():  # left by an earlier run from an older checkpoint
        shutil.rmtree(destination)
    os.rename(folder, destination)
    _sync(destination.parent)


def publish_files(folder: Path, destination: Path) -> None:
    """Move the files of a finished folder into an existing one. config.json, which makes it a model, is moved second
    to last; the trainer state, which marks the end of the run, is moved last."""
    _make_durable(folder)
    last = ("config.json", STATE_FILE)
    for path in sorted(folder.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
        os.replace(path, destination / path.name)
    folder.rmdir()
    _sync(destination)


def best_checkpoint(state: dict[str, Any], output_dir: Path) -> Path:
    """The checkpoint with the best held-out figure so far; `state` is what `trainer_state.json` holds.

    Raises:
        ValueError: if nothing was evaluated yet, or the checkpoint is not there.
    """
    if state["best_global_step"] is None:
        raise ValueError(
            "load_best_model_at_end: nothing was evaluated. Take it and metric_for_best_model out of the recipe, and "
            "resume with --resume_changed true."
        )
    checkpoint = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{state['best_global_step']}"
    if not checkpoint.exists():
        raise ValueError(
            f"load_best_model_at_end: the best checkpoint of step {state['best_global_step']} is not in {output_dir}. "
            "Copy it there, with the one to resume from, and give --resume_from_checkpoint true; or take it and "
            "metric_for_best_model out of the recipe, and resume with --resume_changed true."
        )
    return checkpoint


def publish_checkpoint(checkpoint: Path, output_dir: Path, end: dict[str, Any], resumed: bool) -> None:
    """Make the model of a checkpoint the run's result.

    Args:
        checkpoint: The checkpoint.
        output_dir: Where the result goes.
        end: Content of `trainer_state.json`: the state at the end of the run, which may be after the checkpoint.
        resumed: Whether the run was resumed, before the checkpoint or after it.

    Raises:
        ValueError: if the checkpoint's weights are sharded.
    """
    if not weight_files(checkpoint):
        raise ValueError(
            f"{checkpoint} is the end of the run, but its weights are sharded. Merge them into {output_dir} with "
            "FSDP's `accelerate merge-weights` or DeepSpeed's zero_to_fp32.py, and copy the checkpoint's other files "
            "there."
        )
    aside = fresh_folder(output_dir / SAVING_FOLDER)
    for path in checkpoint.iterdir():
        if not any(path.match(pattern) for pattern in TRAINING_STATE):
            shutil.copy(path, aside)
    run = Run.read(checkpoint)
    environment = replace(run.environment, resumed=run.environment.resumed or resumed)
    replace(run, environment=environment).write(aside)
    write_whole(aside / STATE_FILE, json.dumps(end, indent=2, sort_keys=True) + "\n")
    publish_files(aside, output_dir)


def write_sharded_weights(model: nn.Module, folder: Path, is_main_process: bool) -> None:
    """Write the weights of a model sharded by FSDP2 in `from_pretrained`'s format. Every process must call it.

    They are gathered file by file, so that at most one file's weights are in memory.
    """
    weights: dict[str, Any] = {  # tied ones once
        name.replace(CHECKPOINTED_BLOCK, ""): parameter for name, parameter in model.named_parameters()
    }
    split = split_state_dict_into_shards_factory(
        weights, get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        filename_pattern="model{suffix}.safetensors", max_shard_size=BYTES_PER_FILE,
    )  # fmt: skip
    for file, names in split.filename_to_tensors.items():
        held: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = weights[name].detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if is_main_process:
                held[name] = tensor.cpu().contiguous()
        if is_main_process:
            save_file(held, folder / file, metadata={"format": "pt"})
    if is_main_process and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_whole(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")


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


def copy_record(source: Path, destination: Path) -> None:
    """Copy a folder's record of its training, if it has one, to a model that was made from its model."""
    for name in RECORD:
        if (source / name).exists():
            shutil.copy(source / name, destination)


def steps_done(folder: Path) -> int:
    """Optimizer steps of a checkpoint, or of a finished run; 0 where nothing is recorded."""
    state = folder / STATE_FILE
    return json.loads(state.read_text(encoding="utf-8"))["global_step"] if state.exists() else 0


def checkpoint_problem(checkpoint: Path) -> str | None:
    """Why a checkpoint can't be resumed from, or `None`. Opens every file; the content of tensors is not read."""
    if not (checkpoint / STATE_FILE).exists():
        return f"{STATE_FILE} is missing" if checkpoint.is_dir() else "there is no such folder"
    try:
        step = steps_done(checkpoint)
        if checkpoint.name != f"{PREFIX_CHECKPOINT_DIR}-{step}":
            return f"{STATE_FILE} is of step {step}"
        run = Run.read(checkpoint)
        for path in checkpoint.glob("*.json"):
            json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the state can't be read ({error})"
    sharded = [path for path in checkpoint.iterdir() if path.is_dir()]  # FSDP's and DeepSpeed's own formats
    for path in sharded:
        if not any(path.iterdir()):
            return f"{path.name} is empty"
    if not sharded and not any((checkpoint / name).exists() for name in ("config.json", "adapter_config.json")):
        return "config.json is missing"
    try:
        weights = weight_files(checkpoint)
        for path in weights:
            with safe_open(path, framework="pt"):
                pass
        processes = run.num_processes
        needed = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
        if not sharded:
            needed += ["optimizer.pt", "scheduler.pt"] + ["scaler.pt"] * bool(run.arguments.get("fp16"))
        for name in needed:
            with safe_globals():  # a checkpoint from elsewhere must not run code
                torch.load(checkpoint / name, map_location="cpu", mmap=True, weights_only=True)
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, SafetensorError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        return f"a file is missing or broken ({error})"
    if not weights and not sharded:
        return "there are no weights"
    return None


def weight_files(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index where it has one."""
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [checkpoint / name for name in sorted(names)]
    return sorted(checkpoint.glob("*.safetensors"))


def check_weights(checkpoint: Path, model: Any) -> None:
    """Compare the names of a checkpoint's weights with those of the model that will load them.

    Raises:
        ValueError: if a name is missing or unknown; transformers would only warn.
    """
    given: set[str] = set()
    for path in weight_files(checkpoint):
        with safe_open(path, framework="pt") as file:
            given |= set(file.keys())
    if not given:  # sharded
        return
    if (checkpoint / "adapter_config.json").exists():
        from peft import get_peft_model_state_dict  # an extra

        expected, tied = set(get_peft_model_state_dict(model)), set()
    else:
        expected, tied = set(model.state_dict()), set(getattr(model, "all_tied_weights_keys", None) or ())
    missing, unexpected = sorted(expected - given - tied), sorted(given - expected - tied)
    if missing or unexpected:
        raise ValueError(
            f"The weights of {checkpoint} don't match the model. Missing: {missing or 'none'}; unexpected: "
            f"{unexpected or 'none'}. Give the model that the run started with."
        )


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    folders = [path for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    return sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True)


def newest_complete(output_dir: Path, is_main_process: bool) -> Path | None:
    """The newest checkpoint that can be resumed from. Newer, broken ones are moved into a folder `broken` next to it.

    Raises:
        ValueError: if there are checkpoints, but none that can be resumed from.
    """
    problems: dict[Path, str] = {}
    for path in checkpoints(output_dir):
        problem = checkpoint_problem(path)
        if problem is not None:
            problems[path] = problem
            continue
        for broken, cause in problems.items() if is_main_process else ():
            logger.warning("%s is not complete: %s. Moved to %s", broken, cause, output_dir / BROKEN_FOLDER)
            _move_into(output_dir / BROKEN_FOLDER, broken)
        return path
    if problems:
        causes = "".join(f"\n  {path.name}: {problem}" for path, problem in problems.items())
        raise ValueError(
            f"{output_dir} holds no checkpoint that can be resumed from:{causes}\nRepair them, or start again with "
            "another output_dir."
        )
    return None


def supersede(output_dir: Path, checkpoint: Path) -> None:
    """Move what a run wrote after the checkpoint that it resumes from into a folder `superseded`."""
    step = steps_done(checkpoint)
    later = [path for path in checkpoints(output_dir) if steps_done(path) > step]
    for path in [*later, output_dir / STATE_FILE]:
        if path.exists():
            logger.warning("%s is from steps that will be redone. Moved to %s", path, output_dir / SUPERSEDED_FOLDER)
            _move_into(output_dir / SUPERSEDED_FOLDER, path)


def _move_into(folder: Path, path: Path) -> None:
    folder.mkdir(exist_ok=True)
    names = (f"{path.name}.{number}" if number else path.name for number in itertools.count())
    path.rename(next(folder / name for name in names if not (folder / name).exists()))
