"""The output folder of a run: its lock, its checkpoints and its result.

Checkpoints and the result are first written into the folder `.saving`, and moved to their place once complete. So a
run that is killed while it writes leaves no half-written checkpoint.
"""

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
from transformers import TrainerState
from transformers.initialization import no_init_weights
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints

from normllava.diagnostics.training_answers import ANSWERS_FILE
from normllava.errors import UserError
from normllava.evaluation.json_records import read_record
from normllava.files import fresh_folder, let_others_read
from training.folders.run import COMPOSED_FILE, RUN_FILE, Run


logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"  # Trainer's file
LOCK_FILE = ".lock"
SAVING_FOLDER = ".saving"
# A run can be resumed from a checkpoint that isn't its newest. The later checkpoints are then moved into this folder.
SUPERSEDED_FOLDER = "superseded"


@contextmanager
def lock_output_dir(output_dir: Path) -> Iterator[None]:
    """A block in which the folder is locked, so that no other run uses it.

    However the process ends, the system unlocks the folder.

    Raises:
        UserError: if another run has locked the folder.
    """
    is_new = not output_dir.exists()
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / LOCK_FILE).open("w") as file:
        try:
            # lockf, not flock: worker processes inherit a flock, and a worker that outlives the run would keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # the lock is taken; the error depends on the system
            raise UserError(f"output_dir {output_dir} is in use by another run.") from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s can't be locked (%s): start no other run in it.", output_dir, error)

        try:
            yield
        finally:
            # A run that was refused before it wrote anything leaves no new folder behind.
            file_names = [path.name for path in output_dir.iterdir()]
            if is_new and file_names == [LOCK_FILE]:
                shutil.rmtree(output_dir, ignore_errors=True)


# Finding the checkpoint that a run resumes from


def find_checkpoint(output_dir: Path, resume: str | bool | None) -> Path | None:
    """The checkpoint that a run resumes from; `None` if the run is new, or only its result is left.

    Args:
        output_dir: The run's folder.
        resume: A checkpoint's path, `True` for the newest complete checkpoint, or `None` to start anew.

    Raises:
        UserError: if the checkpoint is not complete, or the folder holds a model or a run that would be overwritten.
    """
    if resume is True:
        return _find_newest_checkpoint(output_dir)

    checkpoint = None
    if resume is not None:
        checkpoint = Path(str(resume))
        if not is_complete(checkpoint):
            raise UserError(f"{checkpoint} can't be resumed from: it is not a complete checkpoint.")

    is_in_output_dir = checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()
    if _holds_run_or_model(output_dir) and not is_in_output_dir:
        raise UserError(
            f"output_dir {output_dir} already holds a run or a model: resume a run with --resume_from_checkpoint "
            "true, or choose another folder."
        )
    return checkpoint


def _find_newest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint of a folder; `None` if the folder is empty, or holds only a run's result.

    Raises:
        UserError: if the folder holds a model or checkpoints, but neither a complete checkpoint nor a run's result.
    """
    for checkpoint in list_checkpoints(output_dir):
        if is_complete(checkpoint):
            return checkpoint

    if not _holds_run_or_model(output_dir):
        logger.warning("%s holds no checkpoint: the run starts from the beginning.", output_dir)
        return None

    holds_result = steps_done(output_dir) > 0
    if not holds_result:
        raise UserError(f"{output_dir} holds no complete checkpoint to resume from: choose another folder.")
    return None  # training/sft.py then checks that the result has all steps of the run


def _holds_run_or_model(output_dir: Path) -> bool:
    # The pattern matches a model's config.json and an adapter's adapter_config.json.
    has_config = any(output_dir.glob("*config.json"))
    has_checkpoint = len(list_checkpoints(output_dir)) > 0
    return has_config or has_checkpoint


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, the newest first."""
    oldest_first = sort_checkpoints(str(output_dir))
    return [Path(path) for path in reversed(oldest_first)]


def is_complete(checkpoint: Path) -> bool:
    """Whether a run can resume from a folder.

    The folder must hold the run's record, the trainer's state after the step that the folder is named for, and the
    scheduler.
    """
    try:
        Run.read(checkpoint)  # raises a UserError if the record is missing or incomplete
        num_steps = steps_done(checkpoint)
    except UserError:
        return False
    # A run with `save_only_model` saves no scheduler, so it can't be resumed.
    has_scheduler = (checkpoint / "scheduler.pt").exists()
    return has_scheduler and num_steps == checkpoint_step(checkpoint)


@dataclass(frozen=True)
class TrainerProgress:
    """The one field of `trainer_state.json` that this project reads."""

    global_step: int


def steps_done(folder: Path) -> int:
    """The number of optimizer steps that `trainer_state.json` in a folder records; 0 if the folder has no such file.

    Every checkpoint has this file, and so does the output folder of a finished run.

    Raises:
        UserError: if the file is incomplete.
    """
    state_file = folder / STATE_FILE
    if not state_file.exists():
        return 0
    return read_record(TrainerProgress, state_file).global_step


def checkpoint_step(checkpoint: Path) -> int:
    """The step in a checkpoint's name, such as 40 in "checkpoint-40"; -1 if the name has no step."""
    step = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    if not step.isdigit():
        return -1
    return int(step)


def recorded_arguments(output_dir: Path, resume: str | bool | None) -> dict[str, Any]:
    """The arguments in the record of the run that is resumed; empty if no run is resumed.

    Args:
        output_dir: The run's folder.
        resume: A checkpoint's path, `True` for the newest complete checkpoint, or `None` to start anew.
    """
    folders: list[Path] = []
    if resume is True:
        folders = [*list_checkpoints(output_dir), output_dir]  # output_dir has the record of a finished run
    elif resume is not None:
        folders = [Path(str(resume))]

    for folder in folders:
        try:
            return Run.read(folder).arguments
        except UserError:
            continue  # an incomplete checkpoint, from which no run is resumed
    return {}


def move_superseded(output_dir: Path, checkpoint: Path) -> None:
    """Move a run's later checkpoints, and a finished run's state file, into a new folder in `superseded`."""
    resumed_step = checkpoint_step(checkpoint)
    later_paths = [path for path in list_checkpoints(output_dir) if checkpoint_step(path) > resumed_step]
    # A state file in the output folder itself would mark the run as finished.
    if (output_dir / STATE_FILE).exists():
        later_paths.append(output_dir / STATE_FILE)
    if not later_paths:
        return

    superseded_folder = output_dir / SUPERSEDED_FOLDER
    num_earlier = len(list(superseded_folder.glob("*")))
    destination = superseded_folder / str(num_earlier + 1)
    destination.mkdir(parents=True)
    for path in later_paths:
        logger.warning("%s is from steps that will be redone. Moved to %s", path, destination)
        path.rename(destination / path.name)


# Writing checkpoints and the result


@contextmanager
def checkpoint_folder(
    output_dir: Path, accelerator: Accelerator, run: Run, state: TrainerState, num_kept: int | None
) -> Iterator[Path]:
    """A block that writes a checkpoint into the folder that it gets. After it, the folder is in its place.

    Every process must enter the block.

    Args:
        output_dir: The run's folder.
        accelerator: The accelerator of this process.
        run: The run's record, which is added to the checkpoint.
        state: The trainer's state, which is added to the checkpoint.
        num_kept: The number of checkpoints that are kept; `None` for all.
    """
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    with open_saving_folder(output_dir, accelerator) as saving_folder:
        yield saving_folder / name

    if state.best_model_checkpoint is not None:
        # Trainer has set this to a path in the saving folder, which the checkpoint is about to leave.
        state.best_model_checkpoint = str(output_dir / Path(state.best_model_checkpoint).name)
    if accelerator.is_main_process:
        run.write(saving_folder / name)
        state.save_to_json(str(saving_folder / name / STATE_FILE))
        publish_checkpoint(saving_folder / name, output_dir / name)
        rotate_checkpoints(str(output_dir), num_kept, state.best_model_checkpoint)


@contextmanager
def result_folder(output_dir: Path, accelerator: Accelerator, run: Run, state: TrainerState) -> Iterator[Path]:
    """A block that writes the final model into the folder that it gets. After it, the files are in the run's folder.

    Every process must enter the block. The arguments are those of [`checkpoint_folder`].
    """
    with open_saving_folder(output_dir, accelerator) as saving_folder:
        yield saving_folder

    if accelerator.is_main_process:
        run.write(saving_folder)
        state.save_to_json(str(saving_folder / STATE_FILE))
        publish_result(saving_folder, output_dir)


@contextmanager
def open_saving_folder(output_dir: Path, accelerator: Accelerator) -> Iterator[Path]:
    """A block with an empty folder, into which all processes write.

    Every process must enter the block. At its end, each process waits for all others.
    """
    saving_folder = output_dir / SAVING_FOLDER
    if accelerator.is_main_process:
        fresh_folder(saving_folder)
    accelerator.wait_for_everyone()
    yield saving_folder
    accelerator.wait_for_everyone()


def publish_checkpoint(folder: Path, destination: Path) -> None:
    """Write a complete checkpoint's files through to the disk, and move its folder by an atomic rename."""
    _flush_to_disk(folder)
    os.rename(folder, destination)


def publish_result(folder: Path, output_dir: Path) -> None:
    """Move the files of a complete folder into the run's output folder."""
    _flush_to_disk(folder)
    # config.json makes the folder a model, so it is moved after the model's files. The trainer's state marks the run
    # as finished, so it is moved last.
    last_names = ["config.json", STATE_FILE]
    first_names = sorted(path.name for path in folder.iterdir() if path.name not in last_names)
    for name in [*first_names, *last_names]:
        if (folder / name).exists():  # adapters have no config.json
            os.replace(folder / name, output_dir / name)
    folder.rmdir()


def _flush_to_disk(folder: Path) -> None:
    """Write a folder's files through to the disk, and let others read them as the user's umask says."""
    let_others_read(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_unsharded(model: Any, weights: dict[str, torch.Tensor], processor: Any, folder: Path) -> None:
    """Save the gathered weights of a model that FSDP2 shards, as a folder that `from_pretrained` loads."""
    # FSDP2 gives a model a class made at run time, which has no source file for `save_pretrained` to copy. So an
    # empty model of the original class saves the weights. The original class is the first base of the new class that
    # has nothing to do with FSDP2.
    bases_without_fsdp = [base for base in type(model).__mro__ if not issubclass(base, FSDPModule)]
    original_class: Any = bases_without_fsdp[0]
    with torch.device("meta"), no_init_weights():
        empty_model = original_class._from_config(model.config)
    empty_model.generation_config = model.generation_config

    tied_names = set(empty_model.all_tied_weights_keys)  # such as a head that shares the embedding's weight
    untied_weights = {name: tensor for name, tensor in weights.items() if name not in tied_names}
    empty_model.save_pretrained(folder, state_dict=untied_weights)
    processor.save_pretrained(folder)


def copy_record(source: Path, destination: Path) -> None:
    """Copy the files that record how a model was composed and trained into another folder, for the model's card.

    Files that are not in `source` are left out.
    """
    for name in (COMPOSED_FILE, RUN_FILE, STATE_FILE, ANSWERS_FILE):
        if (source / name).exists():
            shutil.copy(source / name, destination)


# Reading a checkpoint's weights


def check_weights(checkpoint: Path, model: Any) -> None:
    """Check that a checkpoint's weights have the names of the model's weights. Trainer would only warn.

    A checkpoint with sharded weights, which has no safetensors file, is not checked.

    Raises:
        UserError: if names differ. The message lists them.
    """
    saved_names: set[str] = set()
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved_names |= set(file.keys())
    if not saved_names:
        return

    model_names = set(model.state_dict())
    if (checkpoint / "adapter_config.json").exists():
        from peft import get_peft_model_state_dict  # imported here because it is slow, and only adapters need it

        model_names = set(get_peft_model_state_dict(model))

    # A checkpoint may leave tied weights out.
    tied_names = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(model_names - saved_names - tied_names)
    unexpected = sorted(saved_names - model_names - tied_names)
    if missing or unexpected:
        raise UserError(
            f"The weights of {checkpoint} don't match the model. Missing: {missing or 'none'}; unexpected: "
            f"{unexpected or 'none'}. Give the model that the run started with."
        )
