"""Does one run of the study: makes the arm's model, trains it, measures it, and writes the run's record.

    python -m examples.emoji.study.run BLOCK ARM SEED START FOLDER COMMIT

`examples.emoji.study` calls this for each run. BLOCK is the block's number, ARM the arm's name, START the folder of
the seed's shared start, FOLDER the run's own folder, and COMMIT the commit that the study was started at.
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
    """The name of this machine's GPU or, if there is no GPU, of its CPU and the instructions that torch uses.

    All arms of a seed must run on one processor. The number of threads may differ, since it changes only rounding.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()

    # /proc/cpuinfo has a paragraph for each core, with lines such as "model name : Intel(R) Xeon(R) Processor". Only
    # the first core's paragraph is read.
    first_core, *_ = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")
    fields = {}
    for line in first_core.splitlines():
        field, _, value = line.partition(":")
        fields[field.strip()] = value.strip()

    name = fields.get("model name", platform.machine())  # ARM CPUs have no "model name"
    family = fields.get("cpu family")
    model = fields.get("model")  # a number, unlike "model name"
    instructions = torch.backends.cpu.get_cpu_capability()  # such as "AVX512"
    return f"{name} (family {family} model {model}), {instructions}"


def claim_folder(folder: Path, commit: str) -> None:
    """Make a folder, or empty it, unless this commit has begun it on this kind of CPU or GPU.

    Training goes on from a checkpoint in the folder, which must not be another commit's or another processor's.
    """
    begun_by = {"commit": commit, "processor": processor_name()}
    marker = folder / "begun_by.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == begun_by:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.write_text(json.dumps(begun_by), encoding="utf-8")


def second_layer_rate(arm: Arm, k: float) -> float:
    """The learning rate of the projector's second layer.

    `k` is the norm of image tokens before the projector was scaled, divided by the norm of text embeddings.
    """
    return PROJECTOR_RATE * k**arm.rate_power


def train_model(cell: Cell, untrained: Path, trained: Path, rate: float) -> None:
    """Train a run's model. Training goes on from its last checkpoint if there is one.

    Args:
        cell: The run.
        untrained: Folder of the model to train.
        trained: Folder to write the trained model to.
        rate: Learning rate of the projector's second layer.
    """
    rows_file = write_rows("train.json", untrained)
    options = {
        "config": RECIPE,
        "model_name_or_path": untrained,
        "dataset_name": rows_file,
        "image_folder": RUN / "pictures",
        "output_dir": trained,
        "seed": cell.seed,
        "max_steps": cell.block.steps,
        "projector_learning_rate": PROJECTOR_RATE,
        "norm_learning_rate": NORM_RATE,
        "bf16": "false",  # the study trains in float32
        "resume_from_checkpoint": "true",
    }
    # On a GPU many runs share the machine, and each takes minutes. Checkpoints of all runs would fill the disk, and by
    # default each run would have eight workers.
    if torch.cuda.is_available():
        options |= {"save_strategy": "no", "dataloader_num_workers": 2}
    command = [sys.executable, "-m", "examples.emoji.study.train", str(rate)]
    for name, value in options.items():
        command.append(f"--{name}={value}")
    subprocess.run(command, cwd=ROOT, check=True)


def run_cell(cell: Cell, shared_start: Path, folder: Path, commit: str) -> Record:
    """Make, train and measure the model of a run.

    Args:
        cell: The run.
        shared_start: Folder of the seed's shared start.
        folder: Folder of the run, in which the trained model stays.
        commit: Commit of this code.

    Returns:
        The run's record. `start` has measures of the untrained model, and `end` has those of the trained model.
    """
    started = time.monotonic()
    claim_folder(folder, commit)
    untrained = folder / "untrained"
    trained = folder / "trained"
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model, llava_processor = make_arm_model(cell.arm, shared_start)
    model.save_pretrained(untrained)
    llava_processor.save_pretrained(untrained)
    measures_at_start = measure_tokens(model.to(device).eval(), llava_processor)
    # Training runs in another process. It needs the memory, on a GPU also what torch keeps of it for later.
    del model
    torch.cuda.empty_cache()

    k = read_norm_ratio(shared_start)
    rate = second_layer_rate(cell.arm, k)
    train_model(cell, untrained, trained, rate)
    shutil.rmtree(untrained)

    model = NormLlavaForConditionalGeneration.from_pretrained(trained).to(device).eval()
    llava_processor = AutoProcessor.from_pretrained(trained)
    sft_record = json.loads((trained / "run.json").read_text(encoding="utf-8"))  # written by training/sft.py
    return {
        "block": cell.block.number,
        "arm": cell.arm.name,
        "seed": cell.seed,
        "commit": commit,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "data": sft_record["data"],
        "k": k,
        "second_layer_rate": rate,
        "start": measures_at_start,
        "end": measure_tokens(model, llava_processor),
        "gain": measure_gain(model),  # how much the LayerNorm's weight has grown
        **read_training(trained),  # `losses` and `clipped`
        **measure_model(model, llava_processor),  # `hits` and `perplexity`
        # If the run was stopped and resumed, these are the minutes since it was resumed.
        "minutes": (time.monotonic() - started) / 60,
    }


def find_cell(block_number: int, arm_name: str, seed: int) -> Cell:
    """The run with this block's number, this arm's name and this seed.

    Raises:
        KeyError: if there is no such block, or the block has no such arm.
    """
    blocks = {block.number: block for block in BLOCKS}
    block = blocks[block_number]
    arms = {arm.name: arm for arm in block.arms}
    return Cell(block, arms[arm_name], seed)


def main(block_number: str, arm_name: str, seed: str, shared_start: str, folder: str, commit: str) -> None:
    """Do a run, and write `record.json` into its folder. The arguments are those of the command line.

    Raises:
        RuntimeError: if the code has changed since the study was started.
    """
    commit_now = current_commit()  # None if this copy has no repository
    if commit_now is not None and commit_now != commit:
        raise RuntimeError(f"The study runs commit {commit}, and the code is {commit_now}.")

    # With TF32, convolutions on a GPU would round float32.
    torch.backends.cudnn.allow_tf32 = False
    cell = find_cell(int(block_number), arm_name, int(seed))
    record = run_cell(cell, Path(shared_start), Path(folder), commit)
    Path(folder, "record.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
