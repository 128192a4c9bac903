"""Checkpoints: saved aside and renamed, the newest complete one found, what came after it moved away, the last one
published as the run's result."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from transformers.initialization import no_init_weights
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from conversations.files import fresh_folder
from training.run import RUN_FILE, Run


logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# Files that the model card reads the training from.
RECORD = (RUN_FILE, STATE_FILE, "metrics.jsonl")
SAVING_FOLDER, SUPERSEDED_FOLDER = ".saving", "superseded"
# Files of a checkpoint besides the model: the state of training.
TRAINING_STATE = ("optimizer*", "scheduler*", "rng_state*", "scaler*", "global_step*", "latest", "zero_to_fp32.py",
                  "pytorch_model_fsdp*", "stream.json")  # fmt: skip


@contextmanager
def lock(output_dir: Path) -> Iterator[None]:
    """Lock a folder for one run, until the process ends, however it ends. Raises `ValueError` if another holds it."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which forked workers would keep holding
        except OSError as error:
            raise ValueError(
                f"output_dir {output_dir} is in use by another run, or can't be locked: {error}"
            ) from error
        yield


@contextmanager
def write_aside(output_dir: Path, name: str, accelerator: Accelerator) -> Iterator[Path]:
    """An empty folder to write in. An error there is noted with where the run can go on. All processes must enter."""
    aside = output_dir / SAVING_FOLDER
    try:
        if accelerator.is_main_process:
            fresh_folder(aside)
        accelerator.wait_for_everyone()
        yield aside
    except Exception as error:
        last = next(iter(checkpoints(output_dir)), None)
        error.add_note(
            f"{name} was not written. Last checkpoint: {last or 'none'}; --resume_from_checkpoint true goes on there."
        )
        raise
    accelerator.wait_for_everyone()


def save(folder: Path, destination: Path) -> None:
    """Make a finished folder a checkpoint: its files durable, then renamed in one step."""
    _finish_files(folder)
    if destination.exists():  # not complete, so not resumed from and not moved away
        shutil.rmtree(destination)
    os.rename(folder, destination)


def find(output_dir: Path, named: str | bool | None) -> Path | None:
    """Where a run resumes.

    Args:
        output_dir: The run's folder.
        named: A checkpoint's path, or `True` for the newest complete one, if there is one; `None` to start anew.

    Raises:
        ValueError: if the folder holds a model that is not a run's or a run that is not to be resumed, or what is
            asked for is not complete.
    """
    found = checkpoints(output_dir)
    holds_run = bool(found) or steps_done(output_dir) > 0
    if not holds_run and any(output_dir.glob("*config.json")):
        raise ValueError(f"output_dir {output_dir} holds a model, and no run to resume: choose another folder.")
    if named is True:
        problems = {path: problem(path) for path in found}
        newest = next((path for path in found if problems[path] is None), None)
        if found and newest is None:
            causes = "; ".join(f"{path.name}: {cause}" for path, cause in problems.items())
            raise ValueError(f"{output_dir} holds no checkpoint to resume from ({causes}). Choose another output_dir.")
        return newest
    checkpoint = None if named is None else Path(str(named))
    if checkpoint is not None and (cause := problem(checkpoint)) is not None:
        raise ValueError(f"{checkpoint} can't be resumed from: {cause}.")
    if holds_run and (checkpoint is None or checkpoint.resolve().parent != output_dir.resolve()):
        raise ValueError(
            f"output_dir {output_dir} already holds a run. Resume it with --resume_from_checkpoint true, or choose "
            "another folder."
        )
    return checkpoint


def problem(checkpoint: Path) -> str | None:
    """Why a checkpoint is not complete; `None` if it is: its state is written last, and the folder renamed then."""
    try:
        if checkpoint.name != f"{PREFIX_CHECKPOINT_DIR}-{steps_done(checkpoint)}":
            return f"{STATE_FILE} is missing, or of another step"
        Run.read(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        return f"it is not complete ({error})"
    return None


def restore(output_dir: Path, checkpoint: Path) -> None:
    """Move away what a run wrote after the checkpoint that it resumes from, before anything is written again."""
    step, away = steps_done(checkpoint), output_dir / SUPERSEDED_FOLDER
    later = [path for path in checkpoints(output_dir) if step_of(path) > step]
    for path in [*later, *output_dir.glob(STATE_FILE)]:
        logger.warning("%s is from steps that will be redone. Moved to %s", path, away)
        away.mkdir(exist_ok=True)
        taken = len(list(away.glob(f"{path.name}*")))
        path.rename(away / (f"{path.name}.{taken}" if taken else path.name))


def publish(source: Path, output_dir: Path) -> None:
    """Move the files of a finished folder into the run's. config.json, which makes it a model, is moved second to
    last; the trainer state, which marks the end of the run, last."""
    _finish_files(source)
    last = ("config.json", STATE_FILE)
    for path in sorted(source.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
        os.replace(path, output_dir / path.name)
    source.rmdir()


def publish_checkpoint(checkpoint: Path, output_dir: Path) -> None:
    """Make the model of the last checkpoint the run's result. Raises `ValueError` if its weights are sharded."""
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
    replace(Run.read(checkpoint), progress=None).write(aside)
    publish(aside, output_dir)


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


def _finish_files(folder: Path) -> None:
    """Write files through to the disk, and let others read them as far as the umask does: safetensors doesn't."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
            with path.open("rb") as file:
                os.fsync(file.fileno())


def steps_done(folder: Path) -> int:
    """Optimizer steps of a checkpoint, or of a finished run; 0 where nothing is recorded."""
    state = folder / STATE_FILE
    return json.loads(state.read_text(encoding="utf-8"))["global_step"] if state.exists() else 0


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name gives; -1 if it gives none."""
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    found = [path for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) >= 0]
    return sorted(found, key=step_of, reverse=True)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, by its index where it has one."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def check_weights(checkpoint: Path, model: Any) -> None:
    """Raises `ValueError` if the names of a checkpoint's weights, unless they are sharded, are not those of the model
    that will load them: transformers would only warn."""
    given: set[str] = set()
    for path in weight_files(checkpoint):
        with safe_open(path, framework="pt") as file:
            given |= set(file.keys())
    expected = set(model.state_dict())
    if (checkpoint / "adapter_config.json").exists():
        from peft import get_peft_model_state_dict  # an extra

        expected = set(get_peft_model_state_dict(model))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing, unexpected = sorted(expected - given - tied), sorted(given - expected - tied)
    if given and (missing or unexpected):
        raise ValueError(
            f"The weights of {checkpoint} don't match the model. Missing: {missing or 'none'}; unexpected: "
            f"{unexpected or 'none'}. Give the model that the run started with."
        )


def copy_record(source: Path, destination: Path) -> None:
    """Copy a folder's record of its training, if it has one, to a model that was made from its model."""
    for name in RECORD:
        if (source / name).exists():
            shutil.copy(source / name, destination)
