"""Plans of a step's memory against what runs actually allocate, on CPU.

    python -m benchmarks.plan_check --output benchmarks/results/plan_cpu.json

Each run has a separate process: a small model of random weights, trained by NormLlavaTrainer on synthetic rows while
torch's profiler records every allocation of the CPU's allocator. The plan gets the config and the lengths of the rows
of the largest batch. For FSDP2, which accelerate does not run on a CPU, the model is sharded as in a plan and stepped
by hand, as one of two processes without communication: gloo's own buffers belong to no tensor.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from transformers import LlavaProcessor, set_seed

from benchmarks.synthetic import SIZES, checked_rows, synthetic_config, synthetic_processor
from conversations.tokens import RowTokenizer
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training.arguments import RunArguments, TrainingConfig, parse_arguments
from training.batches import deal_rows
from training.collator import VisionLanguageCollator
from training.environment import describe_environment
from training.key_alignment import KeyAlignment
from training.loading import name_sharding_units, prepare_model
from training.memory import largest_batch
from training.plan import Optimizer, Sample, arm, fake_processes, forward, make_batch, plan_step, shard
from training.run import Run
from training.stages import ModuleGroup, Stage
from training.trainer import NormLlavaTrainer


logger = logging.getLogger(__name__)

SIZE = SIZES["small"]
SAMPLES_PER_STEP = 24
ROWS_PER_BATCH = 8
ALIGN = {"stage": "align", "learning_rate": 1e-3}
INSTRUCT = {"stage": "instruct", "learning_rate": 1e-5, "vision_learning_rate": 2e-6}
ADAPT = {"stage": "adapt", "learning_rate": 2e-4, "lora_r": 16, "lora_alpha": 32}
KEYS = {**ADAPT, "key_mmd_weight": 0.1, "key_gram_weight": 0.1}
PACKED = {"packed_length": 1536, "attn_implementation": "varlen", "per_device_train_batch_size": 1}
PADDED = {"per_device_train_batch_size": ROWS_PER_BATCH, "train_sampling_strategy": "sequential"}
PLAIN, CHECKPOINTED = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}
FLOAT32, BF16 = {"bf16": False}, {"bf16": True}
RUNS: list[tuple[dict[str, Any], str]] = [
    ({**stage, **rows, **checkpointing, **precision}, "none")
    for stage in (ALIGN, INSTRUCT, ADAPT)
    for rows, checkpointing, precision in (
        (PADDED, PLAIN, FLOAT32), (PADDED, CHECKPOINTED, BF16), (PACKED, PLAIN, BF16), (PACKED, CHECKPOINTED, FLOAT32),
    )
]  # fmt: skip
RUNS += [({**KEYS, **PACKED, **CHECKPOINTED, **BF16}, "none")]
RUNS += [
    ({**stage, **PACKED, **checkpointing, **BF16}, sharding)
    for stage in (ALIGN, INSTRUCT)
    for checkpointing, sharding in ((PLAIN, "ddp"), (PLAIN, "fsdp2"), (CHECKPOINTED, "fsdp2"))
]
"""Fields of runs, and their sharding over two processes, if any."""


def parse(fields: dict[str, Any], folder: Path) -> tuple[RunArguments, TrainingConfig]:
    """The arguments of a run."""
    common = {
        "model_name_or_path": "none", "dataset_name": "none", "output_dir": str(folder), "max_steps": 2,
        "global_batch_size": SAMPLES_PER_STEP, "optim": "adamw_torch_fused", "use_cpu": True, "report_to": "none",
        "save_strategy": "no", "logging_steps": 100, "dataset_num_proc": 1,
    }  # fmt: skip
    return parse_arguments([word for name, value in (common | fields).items() for word in (f"--{name}", str(value))])


def config_of(fields: dict[str, Any], processor: LlavaProcessor) -> NormLlavaConfig:
    """The config of a run's model."""
    config = synthetic_config(SIZE, processor, ours=True)
    assert isinstance(config, NormLlavaConfig)
    config.key_adapter_rank = 16 if "key_mmd_weight" in fields else 0
    return config


def make_rows(fields: dict[str, Any], folder: Path, processor: LlavaProcessor) -> tuple[Dataset, RowTokenizer]:
    """Checked rows of the stage, the same eight repeated, so that the pass with the peak has a largest batch."""
    rows, tokenize = checked_rows(folder, Stage(fields["stage"]), SIZE, 2 * SAMPLES_PER_STEP, processor)
    return rows.select([number % ROWS_PER_BATCH for number in range(len(rows))]), tokenize


def train(
    fields: dict[str, Any], folder: Path, processor: LlavaProcessor, prepared: tuple[Any, Any, list[ModuleGroup]]
) -> list[list[Sample]]:
    """Train two steps as training does; returns what the largest batch held."""
    model, trained, groups = prepared
    run_args, args = parse(fields, folder)
    rows, tokenize = make_rows(fields, folder, processor)
    sampler, args.gradient_accumulation_steps = deal_rows(run_args, args, rows, tokenize.tokens_per_image)
    assert sampler is not None  # since it is not a stream
    key_alignment = None
    if run_args.key_losses:
        weights = run_args.key_mmd_weight, run_args.key_gram_weight, run_args.key_bandwidths
        key_alignment = KeyAlignment(model, processor, *weights)
    packed = run_args.packed_length is not None
    NormLlavaTrainer(
        trained,
        groups,
        Run("synthetic", args.world_size, {}, None, describe_environment(args.device.type, args.world_size, False)),
        sampler=sampler,
        key_alignment=key_alignment,
        args=args,
        train_dataset=rows,
        processing_class=processor,
        data_collator=VisionLanguageCollator(tokenize, packed),
    ).train()
    return largest_batch(rows, sampler, packed)


def step_sharded(fields: dict[str, Any], folder: Path, model: Any, trained: Any) -> list[list[Sample]]:
    """Take two sharded steps of two passes; returns what a batch held."""
    _, args = parse(fields, folder)
    per_picture = (SIZE.vision["image_size"] // SIZE.vision["patch_size"]) ** 2
    rows = [[Sample(per_picture + 40, 1, 20)] * (fields["packed_length"] // (per_picture + 40))]
    batch = make_batch(model, rows, packed=True)
    side = SIZE.vision["image_size"]
    batch["pixel_values"] = torch.rand(len(rows[0]), 3, side, side)
    arm(model, trained, args)
    with fake_processes(2):
        shard(trained, args)
        take_steps(trained, batch, args)
    return rows


def take_steps(trained: Any, batch: dict[str, Any], args: TrainingConfig) -> None:
    """Take two steps of two passes."""
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer = Optimizer(trained, parameters, args, cuda=False)
    for _ in range(2):
        for _ in range(2):
            forward(trained, batch, args).backward()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None


def run(fields: dict[str, Any], sharding: str, folder: Path) -> list[list[Sample]]:
    """Make a model and train it; returns what the largest batch held."""
    set_seed(0)
    processor = synthetic_processor(SIZE)
    run_args, args = parse(fields, folder)
    attention = {"text_config": run_args.attn_implementation, "vision_config": "sdpa"}
    model = NormLlavaForConditionalGeneration._from_config(
        config_of(fields, processor), attn_implementation=attention, dtype=torch.float32
    )
    name_sharding_units(model)
    trained, groups = prepare_model(model, run_args, args)
    if sharding != "fsdp2":
        return train(fields, folder, processor, (model, trained, groups))
    del groups  # they hold unsharded parameters
    return step_sharded(fields, folder, model, trained)


def measure(fields: dict[str, Any], sharding: str) -> dict[str, Any]:
    """Peak bytes of this process's CPU allocator in a run, model included, and what the batch held."""
    with tempfile.TemporaryDirectory() as name:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            rows = run(fields, sharding, Path(name))
        # The allocator's own total: releases by other threads, such as gloo's, are not separate events.
        record.export_chrome_trace(f"{name}/trace.json")
        events = json.loads(Path(name, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    peak = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    return {"bytes": peak, "rows": [[asdict(sample) for sample in row] for row in rows]}


def compare(fields: dict[str, Any], sharding: str) -> dict[str, Any]:
    """Measure a run in separate processes, and compare it with its plan."""
    command = [sys.executable, "-m", "benchmarks.plan_check", "--measure", json.dumps([fields, sharding])]
    if sharding == "ddp":
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(f"The run {fields} failed:\n{result.stderr[-3000:]}")
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"bytes"')))
    return set_beside(fields, sharding, measured)


def set_beside(fields: dict[str, Any], sharding: str, measured: dict[str, Any]) -> dict[str, Any]:
    """The measurement and its plan."""
    num_processes = 1 if sharding == "none" else 2
    rows = [[Sample(**sample) for sample in row] for row in measured["rows"]]
    with tempfile.TemporaryDirectory() as name:
        run_args, args = parse(fields, Path(name))
        plan = plan_step(
            config_of(fields, synthetic_processor(SIZE)), run_args, args, rows, num_processes, sharding, cuda=False
        )
    return {
        "fields": fields,
        "sharding": sharding,
        "planned_mib": plan.total / 2**20,
        "measured_mib": measured["bytes"] / 2**20,
        "ratio": plan.total / measured["bytes"],
        "planned": {kind: size / 2**20 for kind, size in plan.peak.items()},
    }


def describe(result: dict[str, Any]) -> str:
    """A line of the table."""
    fields = result["fields"]
    words = [
        fields["stage"] + (", losses on keys" if "key_mmd_weight" in fields else ""),
        "packed" if "packed_length" in fields else "padded",
        "checkpointed" if fields["gradient_checkpointing"] else "plain",
        "bf16" if fields["bf16"] else "float32",
        result["sharding"],
    ]
    figures = f"{result['planned_mib']:10.1f}{result['measured_mib']:10.1f}{result['ratio']:8.3f}"
    return f"{words[0]:24}" + "".join(f"{word:14}" for word in words[1:]) + figures


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare plans of memory with runs on CPU.")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        measured = measure(*args.measure)
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stdout.write(json.dumps(measured) + "\n")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results = []
    for fields, sharding in RUNS:
        results.append(compare(fields, sharding))
        logger.info("%s", describe(results[-1]))
    ratios = [result["ratio"] for result in results]
    logger.info("planned / measured: %.3f to %.3f in %d runs", min(ratios), max(ratios), len(ratios))
    if args.output is not None:
        write_report(results, args.output)


def write_report(results: list[dict[str, Any]], output: Path) -> None:
    """All results as JSON."""
    ratios = [result["ratio"] for result in results]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    report = {"versions": versions, "ratio": [min(ratios), max(ratios)], "runs": results}
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
