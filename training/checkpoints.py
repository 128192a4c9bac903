"""The folder of a run: its lock, its checkpoints, which are written aside and renamed, and its result."""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from transformers.initialization import no_init_weights
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from common.errors import UserError
from common.files import fresh_folder
from common.records import read_record
from training.run import RUN_FILE, Run


logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
LOCK_FILE = ".lock"
SAVING_FOLDER = ".saving"
SUPERSEDED_FOLDER = "superseded"


@contextmanager
def lock_output_dir(output_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder for the time of the block; the system unlocks it however the process ends.

    Raises:
        UserError: if another run is in it.
    """
    is_new = not output_dir.exists()
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / LOCK_FILE).open("w") as file:
        try:
            # Not flock, which forked workers would keep holding.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(f"output_dir {output_dir} is in use by another run.") from error
        except OSError as error:
            logger.warning("%s can't be locked (%s): start no other run in it.", output_dir, error)

        try:
            yield
        finally:
            # A run that was refused leaves no folder behind.
            if is_new and [path.name for path in output_dir.iterdir()] == [LOCK_FILE]:
                shutil.rmtree(output_dir, ignore_errors=True)


# Where a run goes on


def find_checkpoint(output_dir: Path, resume: str | bool | None) -> Path | None:
    """The checkpoint that a run goes on from, if any.

    Args:
        output_dir: The run's folder.
        resume: A checkpoint's path, `True` for the newest complete one, or `None` to start anew.

    Raises:
        UserError: if that checkpoint is not complete, or the folder holds a model or a run that would be overwritten.
    """
    if resume is True:
        return _find_newest_checkpoint(output_dir)

    checkpoint = None
    if resume is not None:
        checkpoint = Path(str(resume))
        if not is_complete(checkpoint):
            raise UserError(f"{checkpoint} can't be resumed from: it is not a complete checkpoint.")

    is_own = checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()
    if _holds_run_or_model(output_dir) and not is_own:
        raise UserError(
            f"output_dir {output_dir} already holds a run or a model: resume a run with --resume_from_checkpoint "
            "true, or choose another folder."
        )
    return checkpoint


def _find_newest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint; `None` where the folder is empty, or holds a result without checkpoints."""
    for checkpoint in list_checkpoints(output_dir):
        if is_complete(checkpoint):
            return checkpoint

    if not _holds_run_or_model(output_dir):
        logger.warning("%s holds no checkpoint: the run starts from the beginning.", output_dir)
    elif steps_done(output_dir) == 0:
        raise UserError(f"{output_dir} holds no complete checkpoint to resume from: choose another folder.")
    return None


def _holds_run_or_model(output_dir: Path) -> bool:
    return bool(list_checkpoints(output_dir)) or any(output_dir.glob("*config.json"))


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, the newest first."""
    return [Path(path) for path in reversed(sort_checkpoints(str(output_dir)))]


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint of the step that its name gives, with a run's record and its whole state."""
    try:
        Run.read(checkpoint)
        num_steps = steps_done(checkpoint)
    except UserError:
        return False
    # A run with `save_only_model` leaves no scheduler.
    return num_steps == step_of(checkpoint) and (checkpoint / "scheduler.pt").exists()


@dataclass(frozen=True)
class TrainerProgress:
    """What we read of `trainer_state.json`."""

    global_step: int


def steps_done(folder: Path) -> int:
    """Optimizer steps of a checkpoint, or of a finished run; 0 where nothing is recorded.

    Raises:
        UserError: if the record is torn.
    """
    state_file = folder / STATE_FILE
    if not state_file.exists():
        return 0
    return read_record(TrainerProgress, state_file).global_step


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name gives; -1 if it gives none."""
    number = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdigit() else -1


def recorded_arguments(output_dir: Path, resume: str | bool | None) -> dict[str, Any]:
    """The arguments that the run which goes on recorded; none if no run goes on.

    Args:
        output_dir: The run's folder.
        resume: As for [`find_checkpoint`].
    """
    folders: list[Path] = []
    if resume is True:
        folders = [*list_checkpoints(output_dir), output_dir]
    elif resume is not None:
        folders = [Path(str(resume))]

    for folder in folders:
        try:
            return Run.read(folder).arguments
        except UserError:
            continue  # not complete; the one before it will be resumed
    return {}


def move_superseded(output_dir: Path, checkpoint: Path) -> None:
    """Move away what a run wrote after the checkpoint that it resumes from, before anything is written again."""
    later = [path for path in list_checkpoints(output_dir) if step_of(path) > step_of(checkpoint)]
    later += output_dir.glob(STATE_FILE)
    if not later:
        return

    superseded = output_dir / SUPERSEDED_FOLDER
    destination = superseded / str(len(list(superseded.glob("*"))) + 1)
    destination.mkdir(parents=True)
    for path in later:
        logger.warning("%s is from steps that will be redone. Moved to %s", path, destination)
        path.rename(destination / path.name)


# What a run writes


@contextmanager
def write_aside(output_dir: Path, accelerator: Accelerator) -> Iterator[Path]:
    """An empty folder that all processes write in; after the block all have written. All of them must enter."""
    aside = output_dir / SAVING_FOLDER
    if accelerator.is_main_process:
        fresh_folder(aside)
    accelerator.wait_for_everyone()
    yield aside
    accelerator.wait_for_everyone()


def publish_checkpoint(folder: Path, destination: Path) -> None:
    """Make a finished folder a checkpoint: its files written through to the disk, then renamed in one step."""
    _write_through(folder)
    os.rename(folder, destination)


def publish_result(folder: Path, output_dir: Path) -> None:
    """Move the files of a finished folder into the run's.

    config.json, which makes it a model, comes second to last; the trainer's state, which marks the run's end, last.
    """
    _write_through(folder)
    last = ["config.json", STATE_FILE]
    names = sorted(path.name for path in folder.iterdir() if path.name not in last)
    for name in [*names, *last]:
        if (folder / name).exists():  # adapters have no config.json
            os.replace(folder / name, output_dir / name)
    folder.rmdir()


def _write_through(folder: Path) -> None:
    """Write files through to the disk, and let others read them as far as the umask does: safetensors doesn't."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_unsharded(model: Any, weights: dict[str, torch.Tensor], processor: Any, folder: Path) -> None:
    """Write the gathered weights of a model that FSDP2 shards as `from_pretrained` reads them."""
    # FSDP2 makes a class on the fly, whose file can't be copied along: an empty model of the class itself saves.
    model_class: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"), no_init_weights():
        whole = model_class._from_config(model.config)
    whole.generation_config = model.generation_config

    tied = set(whole.all_tied_weights_keys)
    untied_weights = {name: weights[name] for name in weights if name not in tied}
    whole.save_pretrained(folder, state_dict=untied_weights)
    processor.save_pretrained(folder)


def copy_record(source: Path, destination: Path) -> None:
    """Copy what a card reads a model's training from, as far as a folder has it, to one that was made from it."""
    for name in (RUN_FILE, STATE_FILE, "metrics.jsonl"):
        if (source / name).exists():
            shutil.copy(source / name, destination)


# What a run reads back


def check_weights(checkpoint: Path, model: Any) -> None:
    """Compare the names of a checkpoint's weights, unless they are sharded, with those of the model that will load
    them: transformers would only warn.

    Raises:
        UserError: if they differ; it lists the names.
    """
    given: set[str] = set()
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            given |= set(file.keys())
    if not given:
        return

    expected = set(model.state_dict())
    if (checkpoint / "adapter_config.json").exists():
        from peft import get_peft_model_state_dict  # only adapters need it, and it is slow to import

        expected = set(get_peft_model_state_dict(model))

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(expected - given - tied)
    unexpected = sorted(given - expected - tied)
    if missing or unexpected:
        raise UserError(
            f"The weights of {checkpoint} don't match the model. Missing: {missing or 'none'}; unexpected: "
            f"{unexpected or 'none'}. Give the model that the run started with."
        )
