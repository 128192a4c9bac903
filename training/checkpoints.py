"""Checkpoints: saved aside and renamed, the newest complete one found, what came after it moved away; and the run's
result, published when all of it is written."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from training.run import RUN_FILE, Run


logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
SAVING_FOLDER = ".saving"


@contextmanager
def lock(output_dir: Path) -> Iterator[None]:
    """Lock a folder for one run, however it ends. `UserError` if another holds it."""
    is_new = not output_dir.exists()
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which forked workers would keep holding
        except (BlockingIOError, PermissionError) as error:
            raise UserError(f"output_dir {output_dir} is in use by another run.") from error
        except OSError as error:
            logger.warning("%s can't be locked (%s): start no other run in it.", output_dir, error)
        try:
            yield
        finally:
            if is_new and [path.name for path in output_dir.glob("*")] == [".lock"]:  # a mistake, and nothing written
                shutil.rmtree(output_dir, ignore_errors=True)


@contextmanager
def write_aside(output_dir: Path, accelerator: Accelerator) -> Iterator[Path]:
    """An empty folder that all processes write in; after the block all have written. All of them must enter."""
    aside = output_dir / SAVING_FOLDER
    if accelerator.is_main_process:
        fresh_folder(aside)
    accelerator.wait_for_everyone()
    yield aside
    accelerator.wait_for_everyone()


def save(folder: Path, destination: Path) -> None:
    """Make a finished folder a checkpoint: its files written through to the disk, then renamed in one step."""
    _sync(folder)
    os.rename(folder, destination)


def publish(folder: Path, output_dir: Path) -> None:
    """Move the files of a finished folder into the run's. config.json, which makes it a model, is moved second to
    last; the trainer state, which marks the end of the run, last."""
    _sync(folder)
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == STATE_FILE, path.name == "config.json")):
        os.replace(path, output_dir / path.name)
    folder.rmdir()


def _sync(folder: Path) -> None:
    """Write files through to the disk, and let others read them as far as the umask does: safetensors doesn't."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def find(output_dir: Path, named: str | bool | None) -> Path | None:
    """Where a run resumes: `named` is a checkpoint's path, `True` for the newest complete one, if any, or `None` to
    start anew. Raises `UserError` if it is not complete, or the folder holds a model or a run to overwrite."""
    found = checkpoints(output_dir)
    holds_something = bool(found) or any(output_dir.glob("*config.json"))
    if named is True:
        checkpoint = next(filter(is_complete, found), None)
        if checkpoint is None and holds_something and not steps_done(output_dir):
            raise UserError(f"{output_dir} holds no complete checkpoint to resume from: choose another folder.")
        if not holds_something:
            logger.warning("%s holds no checkpoint: the run starts from the beginning.", output_dir)
        return checkpoint
    checkpoint = None if named is None else Path(str(named))
    if checkpoint is not None and not is_complete(checkpoint):
        raise UserError(f"{checkpoint} can't be resumed from: it is not a complete checkpoint.")
    if holds_something and (checkpoint is None or checkpoint.resolve().parent != output_dir.resolve()):
        raise UserError(
            f"output_dir {output_dir} already holds a run or a model: resume a run with --resume_from_checkpoint "
            "true, or choose another folder."
        )
    return checkpoint


def recorded_argument(output_dir: Path, named: str | bool | None, argument: str) -> Any:
    """An argument as the run that is resumed recorded it; `None` if no run is, or its record lacks it.

    Args:
        output_dir: The run's folder.
        named: As for [`find`].
        argument: One of those that run.json holds.
    """
    folders: list[Path] = []
    if named is True:
        folders = [*checkpoints(output_dir), output_dir]
    elif named:
        folders = [Path(str(named))]

    for folder in folders:
        with suppress(ValueError):  # not complete; the one before it will be resumed
            return Run.read(folder).arguments.get(argument)
    return None


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint of the step that its name gives, with a run's record and its whole state."""
    try:
        Run.read(checkpoint)  # a run with `save_only_model` leaves no scheduler
        return steps_done(checkpoint) == step_of(checkpoint) and (checkpoint / "scheduler.pt").exists()
    except (ValueError, KeyError):
        return False


def restore(output_dir: Path, checkpoint: Path) -> None:
    """Move away what a run wrote after the checkpoint that it resumes from, before anything is written again."""
    later = [path for path in checkpoints(output_dir) if step_of(path) > step_of(checkpoint)]
    later += output_dir.glob(STATE_FILE)
    if later:
        superseded = output_dir / "superseded"
        away = superseded / str(len(list(superseded.glob("*"))) + 1)
        away.mkdir(parents=True)
        for path in later:
            logger.warning("%s is from steps that will be redone. Moved to %s", path, away)
            path.rename(away / path.name)


def steps_done(folder: Path) -> int:
    """Optimizer steps of a checkpoint, or of a finished run; 0 where nothing is recorded."""
    state = folder / STATE_FILE
    return json.loads(state.read_text(encoding="utf-8"))["global_step"] if state.exists() else 0


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name gives; -1 if it gives none."""
    number = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdigit() else -1


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    return [Path(path) for path in reversed(sort_checkpoints(str(output_dir)))]


def write_unsharded(model: Any, weights: dict[str, torch.Tensor], processor: Any, folder: Path) -> None:
    """Write the gathered weights of a model that FSDP2 shards as `from_pretrained` reads them."""
    # FSDP2 makes a class on the fly, whose file can't be copied along: an empty model of the class itself saves.
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"), no_init_weights():
        whole = kind._from_config(model.config)
    whole.generation_config = model.generation_config
    tied = set(whole.all_tied_weights_keys)
    whole.save_pretrained(folder, state_dict={name: weights[name] for name in weights if name not in tied})
    processor.save_pretrained(folder)


def check_weights(checkpoint: Path, model: Any) -> None:
    """Raises `UserError` if the names of a checkpoint's weights, unless they are sharded, are not those of the model
    that will load them: transformers would only warn."""
    given: set[str] = set()
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            given |= set(file.keys())
    expected = set(model.state_dict())
    if (checkpoint / "adapter_config.json").exists():
        from peft import get_peft_model_state_dict  # an extra

        expected = set(get_peft_model_state_dict(model))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing, unexpected = sorted(expected - given - tied), sorted(given - expected - tied)
    if given and (missing or unexpected):
        raise UserError(
            f"The weights of {checkpoint} don't match the model. Missing: {missing or 'none'}; unexpected: "
            f"{unexpected or 'none'}. Give the model that the run started with."
        )


def copy_record(source: Path, destination: Path) -> None:
    """Copy what a card reads a model's training from, as far as a folder has it, to one that was made from it."""
    for name in (RUN_FILE, STATE_FILE, "metrics.jsonl"):
        if (source / name).exists():
            shutil.copy(source / name, destination)
