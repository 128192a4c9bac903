"""Training speed: NormLlavaTrainer on packed rows against TRL's plain SFTTrainer on Llava, on the same rows.

    python -m benchmarks.training --size small --output benchmarks/results/training_cpu.json

benchmarks/gpu.py does the same on a GPU, for models of 3 and 7 billion weights.

Each arm runs in a separate process, the arms alternate, several times; the result is the ratio of their speeds in a
repeat. Both have the same weights and dtypes, samples per step, optimizer and checkpointing. They differ in what a
user gets: padded batches and sdpa, or packed rows, of more tokens in a pass, and "varlen". See training/flops.py for
MFU, whose peak is measured with each run, and benchmarks/synthetic.py for the rows.
"""

import argparse
import json
import logging
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset, Image, List
from torch import nn
from transformers import LlavaForConditionalGeneration, LlavaProcessor, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

import training.attention  # noqa: F401 - registers "varlen"
from benchmarks.memory import process_memory
from benchmarks.synthetic import SIZES, Size, checked_rows, synthetic_config, synthetic_processor
from conversations.rows import picture_path, row_images, row_turns
from conversations.tokens import RowTokenizer
from modeling_normllava import NormLlavaForConditionalGeneration
from training.arguments import TrainingConfig
from training.batches import Batches, PackedBatches, RowSizes, plan_packing
from training.collator import VisionLanguageCollator
from training.environment import describe_environment
from training.flops import device_peak, step_flops
from training.run import Run
from training.stages import LearningRates, Stage, prepare_stage
from training.trainer import NormLlavaTrainer


logger = logging.getLogger(__name__)

# The first steps build caches and compile kernels.
WARM_UP_STEPS = 2
SEED = 42


class StepTimes(TrainerCallback):
    """When each step ended, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the time, once the device is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def pack(rows: Dataset, stage: Stage, size: Size, blank: int) -> PackedBatches:
    """The packed rows of one process."""
    sizes = RowSizes.of(rows, blank)
    return plan_packing(sizes, size.samples_per_step, 1, SEED, 1, size.packed_length[stage])


def our_trainer(
    model: NormLlavaForConditionalGeneration,
    stage: Stage,
    size: Size,
    rows: Dataset,
    tokenize: RowTokenizer,
    common: dict[str, Any],
) -> SFTTrainer:
    """NormLlavaTrainer on packed rows."""
    deal = pack(rows, stage, size, tokenize.tokens_per_image)
    frozen_dtype = torch.bfloat16 if common["bf16"] else torch.float32
    groups = prepare_stage(model, stage, LearningRates(1e-5, 2e-6, 1e-5), frozen_dtype)
    return NormLlavaTrainer(
        model,
        groups,
        Run("synthetic", 1, {}, None, describe_environment(model.device.type, 1, resumed=False)),
        sampler=Batches(deal, 1, 0),
        args=TrainingConfig(
            **common, per_device_train_batch_size=1, gradient_accumulation_steps=deal.accumulation_steps
        ),
        train_dataset=rows,
        processing_class=tokenize.processor,
        data_collator=VisionLanguageCollator(tokenize, packed=True),
    )


def plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row in TRL's format: TRL itself puts the pictures before the text."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = [
        {"role": roles[turn["from"]], "content": turn["value"].replace("<image>\n", "")} for turn in row_turns(row)
    ]
    return {"messages": messages, "images": [picture_path(row, image) for image in row_images(row)]}


def plain_trainer(
    model: LlavaForConditionalGeneration,
    stage: Stage,
    size: Size,
    rows: Dataset,
    tokenize: RowTokenizer,
    common: dict[str, Any],
) -> SFTTrainer:
    """TRL's SFTTrainer as documented for pictures."""
    for module in (model.model.vision_tower, model.model.language_model, model.lm_head):
        module.requires_grad_(stage is Stage.INSTRUCT)
        if stage is Stage.ALIGN and common["bf16"]:
            module.to(torch.bfloat16)
    processor: LlavaProcessor = tokenize.processor
    # TRL turns every message into a list of parts.
    processor.chat_template = tokenize.chat_template.replace('message["content"] +', 'message["content"][0]["text"] +')
    batch = size.rows_per_batch
    return SFTTrainer(
        model,
        SFTConfig(
            **common,
            max_length=None,
            remove_unused_columns=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=size.samples_per_step // batch,
            assistant_only_loss=True,
        ),
        train_dataset=Dataset.from_list([plain_row(row) for row in rows]).cast_column("images", List(Image())),
        processing_class=processor,
    )


def run_arm(arm: str, stage: Stage, size_name: str, steps: int, common: dict[str, Any]) -> dict[str, Any]:
    """Train for `steps` steps and measure, in this process."""
    size, cuda = SIZES[size_name], not common["use_cpu"]
    set_seed(SEED)
    with tempfile.TemporaryDirectory() as name:
        processor = synthetic_processor(size)
        rows, tokenize = checked_rows(Path(name), stage, size, steps * size.samples_per_step, processor)
        supervised = sum(label != -100 for row in rows for label in row["labels"])
        num_images = sum(len(row_images(row)) for row in rows)

        ours = arm == "ours"
        model_class = NormLlavaForConditionalGeneration if ours else LlavaForConditionalGeneration
        attention = {"text_config": "varlen" if ours else "sdpa", "vision_config": "sdpa"}
        with torch.device("cuda" if cuda else "cpu"):
            model = model_class._from_config(
                synthetic_config(size, processor, ours), attn_implementation=attention, dtype=torch.float32
            )
        make = our_trainer if ours else plain_trainer
        trainer = make(model, stage, size, rows, tokenize, {**common, "output_dir": name, "max_steps": steps})
        times = StepTimes()
        trainer.add_callback(times)
        computed: list[int] = []

        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            computed.append(kwargs["input_ids"].numel())

        model.model.register_forward_pre_hook(count, with_kwargs=True)
        flops = sum(step_flops(model, stage, rows["length"], num_images, supervised).values())
        peak_flops_before = peak_flops(cuda)
        if cuda:  # building the model takes more than some steps: in float32, before parts are cast
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.train()

    share = 1 - WARM_UP_STEPS / steps
    seconds = times.times[-1] - times.times[WARM_UP_STEPS - 1]
    tokens = sum(rows["length"])
    memory = torch.cuda.max_memory_allocated() if cuda else process_memory("VmHWM")
    return {
        "seconds": seconds,
        "tokens_per_second": tokens * share / seconds,
        "supervised_tokens_per_second": supervised * share / seconds,
        "model_flops_per_second": flops * share / seconds,
        "peak_flops_before": peak_flops_before,
        "peak_flops_after": peak_flops(cuda),
        "padding_share": 1 - tokens / sum(computed),
        "peak_memory_gib": memory / 2**30,
        "train_loss": trainer.state.log_history[-1]["train_loss"],
    }


def peak_flops(cuda: bool) -> float | None:
    """Peak FLOP/s of the device: on a GPU the data sheet's, dense bfloat16, `None` if TRL has none; on a
    CPU the best of ten products of 2048 x 2048 matrices, float32, at this moment and with this process's threads."""
    if cuda:
        return device_peak(torch.device("cuda"))
    a = torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best


def utilisation(run: dict[str, Any]) -> float | None:
    """MFU of one run, over the higher of the peaks that were measured right before and right after it; `None` where
    none is known.

    Raises:
        ValueError: if it is over 100%: other load slowed both measurements of the peak but not the run.
    """
    flops, before, after = (run[name] for name in ("model_flops_per_second", "peak_flops_before", "peak_flops_after"))
    if before is None or after is None:
        return None
    mfu = flops / max(before, after)
    if mfu > 1:
        raise ValueError(
            f"An MFU of {mfu:.0%} is impossible: the run did {flops:.3g} FLOP/s, the device at most {before:.3g} just "
            f"before it and {after:.3g} right after. Something else was running: measure again."
        )
    return mfu


def summarise(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each arm's runs, and the arms' ratio repeat by repeat; of an arm that ran out of memory only
    that, and then no ratio. Raises `ValueError` as `utilisation` does."""
    report: dict[str, Any] = {}
    for arm, runs in measured.items():
        if "out_of_memory" in runs[-1]:
            report[arm] = runs[-1]
            continue
        runs = [{**run, "mfu": utilisation(run)} for run in runs]
        report[arm] = {
            name: None if runs[0][name] is None else statistics.median(run[name] for run in runs) for name in runs[0]
        }
    if not any("out_of_memory" in report[arm] for arm in measured):
        ratios = [
            ours["tokens_per_second"] / plain["tokens_per_second"]
            for ours, plain in zip(measured["ours"], measured["plain"], strict=True)
        ]
        report["speed_ratio"] = {"median": statistics.median(ratios), "all": ratios}
    return report


def out_of_memory(message: str) -> dict[str, Any]:
    """Running out of memory as a figure: the first sentence of PyTorch's message."""
    return {"out_of_memory": message.split(". ")[0]}


@dataclass(frozen=True)
class Comparison:
    """What is compared: the size's name, steps of each arm, and how often the two arms alternate; less often if the
    next time would take it past so many seconds."""

    size: str
    steps: int
    repeats: int
    seconds: float = math.inf


def use_one_gpu() -> None:
    """Hide all GPUs but the first, before CUDA starts: Trainer would spread each batch over them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def common_arguments(cuda: bool, gradient_checkpointing: bool, optim: str) -> dict[str, Any]:
    """Trainer's arguments of both arms."""
    return {
        "learning_rate": 1e-5,
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": gradient_checkpointing,
        "optim": optim,
        "seed": SEED,
        "dataloader_num_workers": 8 if cuda else 0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def compare(stage: Stage, comparison: Comparison, common: dict[str, Any]) -> dict[str, Any]:
    """Alternate the arms, each in a separate process, and compare them repeat by repeat. An arm that runs out of
    memory is not run again."""
    measured: dict[str, list[dict[str, Any]]] = {"plain": [], "ours": []}
    started = time.monotonic()
    for repeat in range(comparison.repeats):
        if repeat and (time.monotonic() - started) * (repeat + 1) / repeat > comparison.seconds:
            break
        for arm in ("plain", "ours") if repeat % 2 == 0 else ("ours", "plain"):
            if measured[arm] and "out_of_memory" in measured[arm][-1]:
                continue
            command = [sys.executable, "-m", "benchmarks.training", "--size", comparison.size]
            command += ["--steps", str(comparison.steps)]
            command += ["--arm", arm, "--stage", stage.value, "--common", json.dumps(common)]
            result = subprocess.run(command, capture_output=True, text=True)
            full = re.search("OutOfMemoryError: (.*)", result.stderr)
            if full:
                measured[arm].append(out_of_memory(full[1]))
                logger.info("%s, %s: %s", stage.value, arm, full[1])
                continue
            if result.returncode:
                raise RuntimeError(f"arm {arm!r} of stage {stage.value!r} failed:\n{result.stderr[-3000:]}")
            measured[arm].append(json.loads(result.stdout.splitlines()[-1]))
            logger.info("%s, %s: %.1f tokens/s", stage.value, arm, measured[arm][-1]["tokens_per_second"])
    return summarise(measured)


def describe(stage: Stage, report: dict[str, Any]) -> str:
    """The table of a stage."""
    columns = ["tokens_per_second", "supervised_tokens_per_second", "mfu", "peak_memory_gib", "padding_share"]
    lines = [f"{stage.value:10}" + "".join(f"{name.replace('_per_second', '/s'):>22}" for name in columns)]
    for arm in ("plain", "ours"):
        if "out_of_memory" in report[arm]:
            lines.append(f"{arm:10}  {report[arm]['out_of_memory']}")
            continue
        cells = ("?" if report[arm][name] is None else f"{report[arm][name]:.4g}" for name in columns)
        lines.append(f"{arm:10}" + "".join(f"{cell:>22}" for cell in cells))
    if "speed_ratio" in report:
        ratios = report["speed_ratio"]
        every = ", ".join(f"{ratio:.2f}" for ratio in ratios["all"])
        lines.append(f"ratio of tokens/s: {ratios['median']:.2f} ({every})")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Compare training speed with plain TRL.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="model and batches")
    parser.add_argument(
        "--steps", type=int, default=12, help=f"steps of each arm, the first {WARM_UP_STEPS} not timed"
    )
    parser.add_argument("--repeats", type=int, default=3, help="how often the two arms alternate")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="in both arms")
    parser.add_argument("--optim", default="adamw_torch", help="optimizer of both arms")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--arm", choices=("ours", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=Stage, help=argparse.SUPPRESS)
    parser.add_argument("--common", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    use_one_gpu()
    if args.arm is not None:
        sys.stdout.write(json.dumps(run_arm(args.arm, args.stage, args.size, args.steps, args.common)) + "\n")
        return
    cuda = torch.cuda.is_available()
    common = common_arguments(cuda, args.gradient_checkpointing, args.optim)
    comparison = Comparison(args.size, args.steps, args.repeats)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "size": args.size,
        "steps": args.steps,
        "settings": common,
    }
    for stage in (Stage.ALIGN, Stage.INSTRUCT):
        results[stage.value] = compare(stage, comparison, common)
        logger.info("%s", describe(stage, results[stage.value]))
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
