"""Does one run of the study: makes the arm's model, trains it, measures it, and writes the run's record.

    python -m examples.emoji.study.run ARM SEED START FOLDER COMMIT

`examples.emoji.study` calls this for each run. ARM is the arm's name, START the folder of the seed's shared start,
FOLDER the run's own folder, and COMMIT the commit that the study was started at.
"""

import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.emoji.parts import RUN
from examples.emoji.study.cells import NUM_STEPS, Arm, Cell, Machine, Record, rates_of
from examples.emoji.study.measures import measure_gain, measure_model, measure_tokens, read_training
from examples.emoji.study.starts import make_arm_model, read_norm_ratio, write_rows
from examples.emoji.study.train import NOT_FINITE
from examples.steps import ROOT
from training.folders.run import current_commit
from training.options.arguments import is_cpu_fast_at_bf16


RECIPE = "training/recipes/SmolLM2-135M-Instruct/stage2.yaml"
CPU_INFO = Path("/proc/cpuinfo")  # Linux writes what it knows of the CPU here


def processor_name() -> str:
    """The name of this machine's GPU or, if there is no GPU, of its CPU and the instructions that torch uses.

    All arms of a seed must run on one processor. The number of threads may differ, since it changes only rounding.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()

    instructions = torch.backends.cpu.get_cpu_capability()  # such as "AVX512"
    if not CPU_INFO.exists():  # not on Linux
        return f"{platform.processor() or platform.machine()}, {instructions}"

    # The file has a paragraph for each core, with lines such as "model name : Intel(R) Xeon(R) Processor". Only the
    # first core's paragraph is read.
    first_core, *_ = CPU_INFO.read_text(encoding="utf-8").split("\n\n")
    fields = {}
    for line in first_core.splitlines():
        field, _, value = line.partition(":")
        fields[field.strip()] = value.strip()

    name = fields.get("model name", platform.machine())  # ARM CPUs have no "model name"
    family = fields.get("cpu family")
    model = fields.get("model")  # a number, unlike "model name"
    return f"{name} (family {family} model {model}), {instructions}"


def this_machine() -> Machine:
    """This machine's processor, and the arithmetic that a recipe without `bf16` takes on it.

    That is bfloat16 on a GPU and on a CPU that has instructions for it, and otherwise float32.
    """
    is_fast_at_bf16 = torch.cuda.is_available() or is_cpu_fast_at_bf16()
    return Machine(processor_name(), "bfloat16" if is_fast_at_bf16 else "float32")


def claim_folder(folder: Path, commit: str) -> None:
    """Make a folder, or empty it, unless this commit has begun it on this kind of machine.

    Training goes on from a checkpoint in the folder, which must not be another commit's or another machine's.
    """
    begun_by = {"commit": commit, **this_machine()._asdict()}
    marker = folder / "begun_by.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == begun_by:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.write_text(json.dumps(begun_by), encoding="utf-8")


def train_model(cell: Cell, untrained: Path, trained: Path) -> bool:
    """Train a run's model. Training goes on from its last checkpoint if there is one.

    Args:
        cell: The run.
        untrained: Folder of the model to train.
        trained: Folder to write the trained model to.

    Returns:
        Whether all losses and gradients were finite. If not, training has ended early, and there is no trained model.
    """
    rows_file = write_rows("train.json", untrained)
    rates = rates_of(cell.seed)
    options = {
        "config": RECIPE,
        "model_name_or_path": untrained,
        "dataset_name": rows_file,
        "image_folder": RUN / "pictures",
        "output_dir": trained,
        "seed": cell.seed,
        "max_steps": NUM_STEPS,
        "projector_learning_rate": rates.projector,
        "norm_learning_rate": rates.norm,
        "bf16": this_machine().arithmetic == "bfloat16",
        "resume_from_checkpoint": "true",
    }
    # On a GPU many runs share the machine, and each takes minutes. Checkpoints of all runs would fill the disk, and by
    # default each run would have eight workers.
    if torch.cuda.is_available():
        options |= {"save_strategy": "no", "dataloader_num_workers": 2}
    command = [sys.executable, "-m", "examples.emoji.study.train"]
    for name, value in options.items():
        command.append(f"--{name}={value}")

    status = subprocess.run(command, cwd=ROOT).returncode
    if status not in (0, NOT_FINITE):
        raise subprocess.CalledProcessError(status, command)
    return status == 0


def run_cell(cell: Cell, shared_start: Path, folder: Path, commit: str) -> Record:
    """Make, train and measure the model of a run.

    Args:
        cell: The run.
        shared_start: Folder of the seed's shared start.
        folder: Folder of the run.
        commit: Commit of this code.

    Returns:
        The run's record. `start` has measures of the untrained model, and `end` has those of the trained model. A run
        that failed, because a loss or a gradient wasn't finite, has no trained model and so none of its measures.
    """
    started = time.monotonic()
    claim_folder(folder, commit)
    untrained = folder / "untrained"
    trained = folder / "trained"

    model, llava_processor = make_arm_model(cell.arm, shared_start)
    model.save_pretrained(untrained)
    llava_processor.save_pretrained(untrained)
    measures_at_start = measure_tokens(model.to(best_device()).eval(), llava_processor)
    # Training runs in another process. It needs the memory, on a GPU also what torch keeps of it for later.
    del model
    torch.cuda.empty_cache()

    is_trained = train_model(cell, untrained, trained)
    shutil.rmtree(untrained)
    record: Record = {
        "arm": cell.arm.value,
        "seed": cell.seed,
        "commit": commit,
        **this_machine()._asdict(),
        "threads": torch.get_num_threads(),
        "rates": rates_of(cell.seed)._asdict(),
        "k": read_norm_ratio(shared_start),
        "start": measures_at_start,
        "failed": not is_trained,
        "data": None,
        **read_training(trained),  # `losses` and `clipped`
    }
    if is_trained:
        record |= measure_trained(trained)
    # If the run was stopped and resumed, these are the minutes since it was resumed.
    return record | {"minutes": (time.monotonic() - started) / 60}


def measure_trained(trained: Path) -> dict[str, Any]:
    """The fields of a run's record that come from its trained model, which is measured in float32."""
    model = AutoModelForImageTextToText.from_pretrained(trained).to(best_device()).eval()
    llava_processor = AutoProcessor.from_pretrained(trained)
    sft_record = json.loads((trained / "run.json").read_text(encoding="utf-8"))  # written by training/sft.py
    return {
        "data": sft_record["data"],
        "end": measure_tokens(model, llava_processor),
        "gain": measure_gain(model),  # how much the LayerNorm's weight has grown
        **measure_model(model, llava_processor),  # `answers`, `perplexity` and `layers`
    }


def best_device() -> str:
    """The device on which models are measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def main(arm_name: str, seed: str, shared_start: str, folder: str, commit: str) -> None:
    """Do a run, and write `record.json` into its folder. The arguments are those of the command line.

    Raises:
        RuntimeError: if the code has changed since the study was started.
    """
    commit_now = current_commit()  # None if this copy has no repository
    if commit_now is not None and commit_now != commit:
        raise RuntimeError(f"The study runs commit {commit}, and the code is {commit_now}.")

    # With TF32, convolutions on a GPU would round float32.
    torch.backends.cudnn.allow_tf32 = False
    cell = Cell(Arm(arm_name), int(seed))
    record = run_cell(cell, Path(shared_start), Path(folder), commit)
    Path(folder, "record.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
