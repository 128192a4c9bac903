"""One run of the study: begin as the arm does, train, measure, and write the record.

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
from examples.emoji.study.cells import BLOCKS, NORM_RATE, PROJECTOR_RATE, Cell, Record
from examples.emoji.study.measures import measure_gain, measure_model, measure_tokens, read_training
from examples.emoji.study.starts import begin, read_k, write_rows
from examples.steps import ROOT
from modeling_normllava import NormLlavaForConditionalGeneration
from training.run import describe_environment


RECIPE = "training/recipes/SmolLM2-135M-Instruct/stage2.yaml"


def processor_name() -> str:
    """The GPU, or the CPU with the instructions that torch uses on it: what a seed's arms have in common.

    How many threads a run has depends on how many share the machine; they change rounding alone.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()

    described: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        field, _, value = line.partition(":")
        described.setdefault(field.strip(), value.strip())

    name = described.get("model name", platform.machine())
    model = f"family {described.get('cpu family')} model {described.get('model')}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name} ({model}), {capability}"


def claim(folder: Path, commit: str) -> None:
    """Make a run's folder, or go on with the one that is there if this code on this processor began it.

    Otherwise it is emptied: a checkpoint of another processor would be continued on this one.
    """
    begun_by = {"commit": commit, "processor": processor_name()}
    marker = folder / "begun_by.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == begun_by:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.write_text(json.dumps(begun_by), encoding="utf-8")


def second_layer_rate(cell: Cell, k: float) -> float:
    """The learning rate of the projector's second layer."""
    return PROJECTOR_RATE * k**cell.arm.rate_power


def train(cell: Cell, begun: Path, trained: Path, rate: float) -> None:
    """Train an arm's model on all drawings but those of the three artists that are asked about; resumes if it can."""
    rows = write_rows("train.json", begun)
    options = {
        "config": RECIPE,
        "model_name_or_path": begun,
        "dataset_name": rows,
        "image_folder": RUN / "pictures",
        "output_dir": trained,
        "seed": cell.seed,
        "max_steps": cell.block.steps,
        "projector_learning_rate": PROJECTOR_RATE,
        "norm_learning_rate": NORM_RATE,
        "bf16": "false",
        "resume_from_checkpoint": "true",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    subprocess.run([sys.executable, "-m", "examples.emoji.study.train", str(rate), *given], cwd=ROOT, check=True)


def run_cell(cell: Cell, start: Path, folder: Path, commit: str) -> Record:
    """Run a cell in `folder` from the seed's shared start, and return its record. The trained model stays there."""
    started = time.monotonic()
    claim(folder, commit)
    begun = folder / "begun"
    trained = folder / "trained"
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model, processor = begin(cell.arm, start)
    model.save_pretrained(begun)
    processor.save_pretrained(begun)
    at_start = measure_tokens(model.to(device).eval(), processor)
    del model

    k = read_k(start)
    rate = second_layer_rate(cell, k)
    train(cell, begun, trained, rate)
    shutil.rmtree(begun)

    model = NormLlavaForConditionalGeneration.from_pretrained(trained).to(device).eval()
    processor = AutoProcessor.from_pretrained(trained)
    return {
        "block": cell.block.number,
        "arm": cell.arm.name,
        "seed": cell.seed,
        "commit": commit,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "data": json.loads((trained / "run.json").read_text(encoding="utf-8"))["data"],
        "k": k,
        "second_layer_rate": rate,
        "start": at_start,
        "end": measure_tokens(model, processor),
        "gain": measure_gain(model),
        **read_training(trained),
        **measure_model(model, processor),
        "minutes": (time.monotonic() - started) / 60,
    }


def find_cell(block: int, arm: str, seed: int) -> Cell:
    """The cell of these names."""
    for candidate in BLOCKS:
        if candidate.number == block:
            arms = {member.name: member for member in candidate.arms}
            return Cell(candidate, arms[arm], seed)
    raise KeyError(block)


def main(block: str, arm: str, seed: str, start: str, folder: str, commit: str) -> None:
    """Run a cell, and write `record.json` into its folder.

    Raises:
        RuntimeError: if the code has changed since the study was started.
    """
    now = describe_environment("cpu", 1, resumed=False).commit
    if now not in (None, commit):
        raise RuntimeError(f"The study runs commit {commit}, and the code is {now}.")

    # Convolutions would otherwise round to 10 bits on a GPU.
    torch.backends.cudnn.allow_tf32 = False
    record = run_cell(find_cell(int(block), arm, int(seed)), Path(start), Path(folder), commit)
    Path(folder, "record.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
