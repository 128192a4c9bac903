"""Compares the memory that a run will take on a device with what the device has.

The plan (`training/plan.py`) is made in a separate process, while the weights are loaded.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from transformers.trainer_pt_utils import BatchRebalanceSampler

from conversations.measured import row_lengths
from conversations.tokens import IGNORED
from modeling_normllava import NormLlavaConfig
from training.arguments import RunArguments, TrainingConfig
from training.plan import GIB, Sample, as_zero3, plan_step, zero3_problem


# Share of a device's memory that a plan may take: the rest goes to CUDA and fragmentation.
USABLE = 0.94
# Environment variables that tell a process that it is one of several, or to look for a GPU.
NOT_HANDED_ON = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "ACCELERATE_", "FSDP_", "TORCHELASTIC_", "GROUP_")
# Precedes the plan in the other process's output, which may hold what a library prints.
RESULT = b"\nmemory plan:\n"


def largest_batch(rows: Dataset, sampler: BatchRebalanceSampler, packed: bool) -> list[list[Sample]]:
    """The samples of this process's largest batch in the first epoch, by tokens including padding."""
    lengths = row_lengths(rows)

    def size(batch: list[int]) -> int:
        counts = [lengths[row] for row in batch]
        return sum(counts) if packed else len(counts) * max(counts, default=0)

    samples = []
    for number in max(sampler, key=size):
        row = rows[number]
        supervised = sum(label != IGNORED for label in row["labels"])
        samples.append(Sample(row["length"], row["num_images"], supervised))
    return [samples] if packed else [[sample] for sample in samples]


def start_plan(run_args: RunArguments, args: TrainingConfig, rows: list[list[Sample]]) -> subprocess.Popen[bytes]:
    """Start planning a run's step whose passes are of these rows."""
    sharding = "none" if args.world_size == 1 else "ddp"
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        sharding = "fsdp2"
    elif getattr(args.deepspeed_plugin, "zero_stage", 0) == 3:
        sharding = "zero3"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_HANDED_ON)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-m", "training.memory"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((run_args, args, rows, args.world_size, sharding)))
    process.stdin.close()
    process.stdin = None
    return process


def finish_plan(process: subprocess.Popen[bytes]) -> dict[str, int] | str:
    """The result of `start_plan`: bytes by kind at the peak of a step, or why it failed; a run goes on without it."""
    output, errors = process.communicate()
    if process.returncode:
        return (errors.decode(errors="replace").strip().splitlines() or ["no error message"])[-1]
    return pickle.loads(output.rpartition(RESULT)[2])


def describe_plan(found: dict[str, int] | str, available: int) -> str:
    """The plan in one line, with the bytes that a device has."""
    if isinstance(found, str):
        return f"memory a device: not planned ({found})"
    total = sum(found.values())
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in found.items())
    line = f"memory a device: {total / GIB:.1f} GiB by plan ({parts}), of {available / GIB:.1f} GiB"
    if total > USABLE * available:
        line += ". IT WILL HARDLY FIT: lower packed_length or per_device_train_batch_size; see benchmarks/plan.py"
    return line


def plan(
    run_args: RunArguments, args: TrainingConfig, rows: list[list[Sample]], num_processes: int, sharding: str
) -> dict[str, int]:
    """Bytes on a device by kind, at the peak of a step."""
    config: Any = NormLlavaConfig.from_pretrained(run_args.model_name_or_path, revision=run_args.model_revision)
    if sharding == "zero3" and (problem := zero3_problem(args)) is not None:
        raise ValueError(f"ZeRO-3: {problem}")
    as_planned = "fsdp2" if sharding == "zero3" else sharding
    planned = plan_step(config, run_args, args, rows, num_processes, as_planned, args.gradient_accumulation_steps)
    return (as_zero3(planned, num_processes) if sharding == "zero3" else planned).peak


if __name__ == "__main__":
    found = plan(*pickle.load(sys.stdin.buffer))
    sys.stdout.buffer.write(RESULT + pickle.dumps(found))
