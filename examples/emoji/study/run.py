"""Does one run of the study: makes the arm's model, trains it, measures it, and writes the run's record.

python -m examples.emoji.study.run BLOCK ARM SEED START FOLDER COMMIT
"""

import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoProcessor

from examples.emoji.parts import RUN
from examples.emoji.study.cells import BLOCKS, NORM_RATE, PROJECTOR_RATE, Arm, Cell, Record
from examples.emoji.study.measures import measure_gain, measure_model, measure_tokens, read_training
from examples.emoji.study.starts import make_arm_model, read_norm_ratio, write_rows
from examples.steps import ROOT
from modeling_normllava import NormLlavaForConditionalGeneration
from training.run import current_commit


RECIPE = "training/recipes/SmolLM2-135M-Instruct/stage2.yaml"


def processor_name() -> str:
    """The name of the hardware that all arms of a seed must run on: the GPU, or the CPU and the instructions in use.

    The number of threads is not part of it: it depends on how many runs share the machine, and changes only rounding.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()

    # The file describes each core; the first one stands for all.
    cpu_fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        field, _, value = line.partition(":")
        cpu_fields.setdefault(field.strip(), value.strip())

    name = cpu_fields.get("model name", platform.machine())
    model = f"family {cpu_fields.get('cpu family')} model {cpu_fields.get('model')}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name} ({model}), {capability}"


def claim_folder(folder: Path, commit: str) -> None:
    """Make a run's folder. An existing folder is kept if this commit began it on this processor, otherwise emptied.

    A training would go on from a checkpoint in the folder, which must not be that of another commit or processor.
    """
    begun_by = {"commit": commit, "processor": processor_name()}
    marker = folder / "begun_by.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == begun_by:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.write_text(json.dumps(begun_by), encoding="utf-8")


def second_layer_rate(arm: Arm, norm_ratio: float) -> float:
    """The learning rate of the projector's second layer. `norm_ratio` is docs/study.md's k (see `read_norm_ratio`)."""
    return PROJECTOR_RATE * norm_ratio**arm.rate_power


def train(cell: Cell, untrained: Path, trained: Path, rate: float) -> None:
    """Train a cell's model. Training goes on from its last checkpoint if there is one.

    Args:
        cell: The cell.
        untrained: Folder of the model to train.
        trained: Folder to write the trained model to.
        rate: Learning rate of the projector's second layer.
    """
    options = {
        "config": RECIPE,
        "model_name_or_path": untrained,
        "dataset_name": write_rows("train.json", untrained),
        "image_folder": RUN / "pictures",
        "output_dir": trained,
        "seed": cell.seed,
        "max_steps": cell.block.steps,
        "projector_learning_rate": PROJECTOR_RATE,
        "norm_learning_rate": NORM_RATE,
        "bf16": "false",
        "resume_from_checkpoint": "true",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    subprocess.run([sys.executable, "-m", "examples.emoji.study.train", str(rate), *arguments], cwd=ROOT, check=True)


def run_cell(cell: Cell, start: Path, folder: Path, commit: str) -> Record:
    """Run a cell, and return its record.

    Args:
        cell: The cell.
        start: Folder of the seed's shared start.
        folder: Folder of the run, in which the trained model stays.
        commit: Commit of this code.
    """
    started = time.monotonic()
    claim_folder(folder, commit)
    untrained = folder / "begun"
    trained = folder / "trained"
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model, llava_processor = make_arm_model(cell.arm, start)
    model.save_pretrained(untrained)
    llava_processor.save_pretrained(untrained)
    at_start = measure_tokens(model.to(device).eval(), llava_processor)
    del model  # training, in a process of its own, needs the memory

    norm_ratio = read_norm_ratio(start)
    rate = second_layer_rate(cell.arm, norm_ratio)
    train(cell, untrained, trained, rate)
    shutil.rmtree(untrained)

    model = NormLlavaForConditionalGeneration.from_pretrained(trained).to(device).eval()
    llava_processor = AutoProcessor.from_pretrained(trained)
    return {
        "block": cell.block.number,
        "arm": cell.arm.name,
        "seed": cell.seed,
        "commit": commit,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "data": json.loads((trained / "run.json").read_text(encoding="utf-8"))["data"],
        "k": norm_ratio,
        "second_layer_rate": rate,
        "start": at_start,
        "end": measure_tokens(model, llava_processor),
        "gain": measure_gain(model),
        **read_training(trained),
        **measure_model(model, llava_processor),
        # A run that was stopped and resumed has only the minutes since it was resumed.
        "minutes": (time.monotonic() - started) / 60,
    }


def find_cell(block: int, arm: str, seed: int) -> Cell:
    """The cell with this block's number, this arm's name and this seed."""
    for candidate in BLOCKS:
        if candidate.number == block:
            arms_by_name = {member.name: member for member in candidate.arms}
            return Cell(candidate, arms_by_name[arm], seed)
    raise KeyError(block)


def main(block: str, arm: str, seed: str, start: str, folder: str, commit: str) -> None:
    """Run a cell, and write `record.json` into its folder.

    Raises:
        RuntimeError: if the code has changed since the study was started.
    """
    commit_now = current_commit()
    if commit_now is not None and commit_now != commit:
        raise RuntimeError(f"The study runs commit {commit}, and the code is {commit_now}.")

    # Convolutions would otherwise round to 10 bits on a GPU.
    torch.backends.cudnn.allow_tf32 = False
    record = run_cell(find_cell(int(block), arm, int(seed)), Path(start), Path(folder), commit)
    Path(folder, "record.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
