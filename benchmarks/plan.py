"""Will a run fit, and how long will it take? From its recipe and the model's config, without weights, data or a GPU.

    python -m benchmarks.plan --config training/recipes/Qwen2.5-7B-Instruct/stage2.yaml --size Qwen2.5-7B \
        --num_processes 8 --device_memory 80

Fields of the recipe can be given too, as for training/sft.py. The model is the recipe's checkpoint, or
`--model_config`, or a known `--size`. Memory is that of training/plan.py's step (see there for what is counted, and
what is only by formula), FLOPs those of training/flops.py; benchmarks/plan_check.py compares plans with runs on CPU.
"""

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl.trainer.utils import get_peak_flops

from benchmarks.synthetic import SIZES, synthetic_config, synthetic_processor
from modeling_normllava import NormLlavaConfig, NormLlavaKeyAdapterConfig
from training.arguments import RunArguments, TrainingConfig, parse_arguments
from training.flops import step_flops
from training.loading import load_config
from training.plan import GIB, KINDS, Sample, StepPlan, as_zero3, picture_tokens, plan_step, shape_of, zero3_problem
from training.stages import Stage


# Rows of the data that the recipes name.
NUM_ROWS = {"LLaVA-Pretrain": 558_128, "LLaVA-NeXT-Data": 779_289}
# Text tokens of a sample, and supervised ones: of a caption, and of benchmarks/synthetic.py's mixture.
TEXT_TOKENS = {Stage.ALIGN: (30, 25), Stage.INSTRUCT: (350, 175), Stage.ADAPT: (350, 175)}
# Batches that each data loader worker prefetches.
PREFETCH = 2
STEP = 512
"""Packed lengths are tried in multiples of this."""
WAYS = ("ddp", "fsdp2", "zero3")
KEYS = {"key_adapter_rank": 16}  # as in malora.yaml


def find_config(args: argparse.Namespace, run_args: RunArguments) -> NormLlavaConfig:
    """The model's config.

    Raises:
        ValueError: if there is none, or it is not a NormLlava's.
    """
    if args.size is not None:
        size = SIZES[args.size]
        config = synthetic_config(size, synthetic_processor(size), ours=True)
        assert isinstance(config, NormLlavaConfig)
        return NormLlavaKeyAdapterConfig.from_dict(config.to_dict() | KEYS) if run_args.key_losses else config
    name = args.model_config or str(run_args.model_name_or_path)
    name = str(Path(name).parent) if name.endswith("config.json") else name
    try:
        return load_config(name, run_args.model_revision)
    except ValueError as error:
        raise ValueError(f"{error} Or give --model_config <folder or Hub id>, or --size.") from error


def fill_rows(run_args: RunArguments, args: TrainingConfig, sample: Sample, text_share: float) -> list[list[Sample]]:
    """What a device gets in a pass: a full packed row, its remainder filled with text only, or padded rows.

    Raises:
        ValueError: if no sample fits into a row.
    """
    if run_args.packed_length is None:
        return [[sample]] * args.per_device_train_batch_size
    count, rest = divmod(run_args.packed_length, sample.tokens)
    if not count:
        raise ValueError(f"packed_length {run_args.packed_length} is below the {sample.tokens} tokens of a sample.")
    text = [Sample(rest, 0, round(rest * text_share))] if rest else []
    return [[sample] * count + text]


class Planner:
    """Plans one recipe on one kind of device, with several kinds of sharding."""

    def __init__(self, options: argparse.Namespace, fields: Sequence[str]) -> None:
        given = ["--config", str(options.config), *fields, "--use_cpu", "true", "--report_to", "none"]
        self.options, self.run_args, self.args = options, *parse_arguments(given)
        peak = get_peak_flops(options.device, "bfloat16")
        if peak is None:
            raise ValueError(
                f"--device {options.device}: TRL's table has no bfloat16 FLOP/s of it, as of an H100 or L40S."
            )
        self.peak = peak
        self.stage = Stage(str(self.run_args.stage))
        self.config = find_config(options, self.run_args)
        text, supervised = TEXT_TOKENS[self.stage]
        text = text if options.text_tokens is None else options.text_tokens
        self.supervised = min(supervised, text) if options.supervised_tokens is None else options.supervised_tokens
        if self.supervised > text:
            raise ValueError(f"--supervised_tokens {self.supervised} is more than the {text} text tokens of a sample.")
        self.text_share = self.supervised / text
        self.sample = Sample(options.pictures * picture_tokens(self.config) + text, options.pictures, self.supervised)
        self.shardings = self.choose_shardings()
        self._planned: dict[tuple[str, int | None], StepPlan] = {}

    def choose_shardings(self) -> list[str]:
        """Those that were asked for, or all that the run can have.

        Raises:
            ValueError: if one can't be had.
        """
        asked = self.options.sharding
        impossible = {}
        if self.options.num_processes == 1:
            impossible = dict.fromkeys(WAYS, "there is one process")
        elif self.run_args.load_in_4bit:
            impossible = dict.fromkeys(("fsdp2", "zero3"), "4-bit weights can't be sharded")
        elif hasattr(self.config, "key_adapter_rank"):
            impossible = {"zero3": "ZeRO-3 does not take key adapters"}
        elif (problem := zero3_problem(self.args)) is not None:
            impossible = {"zero3": problem}
        for sharding in asked or ():
            if sharding in impossible:
                raise ValueError(f"--sharding {sharding}: {impossible[sharding]}.")
        return asked or [sharding for sharding in WAYS if sharding not in impossible] or ["none"]

    def plan(self, sharding: str, packed_length: int | None) -> StepPlan:
        """The plan of a step with rows of this length."""
        if (sharding, packed_length) not in self._planned:
            if sharding == "zero3":
                planned = as_zero3(self.plan("fsdp2", packed_length), self.options.num_processes)
            else:
                self.run_args.packed_length, before = packed_length, self.run_args.packed_length
                planned = plan_step(
                    self.config, self.run_args, self.args,
                    fill_rows(self.run_args, self.args, self.sample, self.text_share),
                    self.options.num_processes, sharding, self.passes(),
                )  # fmt: skip
                self.run_args.packed_length = before
            self._planned[sharding, packed_length] = planned
        return self._planned[sharding, packed_length]

    def samples_per_pass(self) -> int:
        """Samples that a device takes in a pass; of a packed row, as many as fit."""
        if self.run_args.packed_length is None:
            return self.args.per_device_train_batch_size
        return self.run_args.packed_length // self.sample.tokens

    def samples_per_step(self) -> int:
        """Samples of a step over all devices."""
        per_step = self.samples_per_pass() * self.options.num_processes * self.args.gradient_accumulation_steps
        return self.run_args.global_batch_size or per_step

    def passes(self) -> int:
        """Forward passes of a device in a step."""
        return math.ceil(self.samples_per_step() / (self.samples_per_pass() * self.options.num_processes))

    def longest(self, sharding: str) -> int | None:
        """Approximately the longest packed row whose plan fits, at most a device's share of a step; `None` if not even
        a row of one sample fits.

        Memory is close to linear in the length, so each guess interpolates linearly between two plans.
        """
        limit = self.options.device_memory * 10**9
        share = math.ceil(self.samples_per_step() / self.options.num_processes)
        low, high = (math.ceil(count * self.sample.tokens / STEP) * STEP for count in (1, share))
        if self.plan(sharding, high).total <= limit:
            return high
        if self.plan(sharding, low).total > limit:
            return None
        for _ in range(4):
            little, much = self.plan(sharding, low).total, self.plan(sharding, high).total
            guess = int(low + (limit - little) / (much - little) * (high - low)) // STEP * STEP
            if guess in (low, high):
                break
            low, high = (guess, high) if self.plan(sharding, guess).total <= limit else (low, guess)
        return low

    def report(self) -> dict[str, Any]:
        """The whole report, for JSON."""
        options, length = self.options, self.run_args.packed_length
        planned = {sharding: self.plan(sharding, length) for sharding in self.shardings}
        model = next(iter(planned.values())).model
        samples, passes = self.samples_per_step(), self.passes()
        rows = fill_rows(self.run_args, self.args, self.sample, self.text_share)
        parts = step_flops(
            model,
            self.stage,
            [self.sample.tokens] * samples,
            samples * self.sample.pictures,
            samples * self.supervised,
        )
        flops = sum(parts.values())
        seconds = flops / (options.num_processes * self.peak * options.mfu)
        known = (count for name, count in NUM_ROWS.items() if name in str(self.run_args.dataset_name))
        num_rows = next(known, None) if options.rows is None else options.rows
        epochs = self.args.num_train_epochs
        steps = self.args.max_steps if self.args.max_steps > 0 else None
        if steps is None and num_rows is not None:
            steps = math.ceil(epochs * math.ceil(num_rows / samples))
        num_weights = sum(parameter.numel() for parameter in shape_of(self.config).parameters())
        pictures = sum(sample.pictures for row in rows for sample in row)
        side, channels = self.config.vision_config.image_size, self.config.vision_config.num_channels
        return {
            "recipe": str(options.config),
            "stage": self.stage.value,
            "packed_length": length,
            "rows": [[vars(sample) for sample in row] for row in rows],
            "passes": passes,
            "memory": {
                sharding: {
                    **plan.peak,
                    "total": plan.total,
                    "fits": plan.total <= options.device_memory * 10**9,
                    "longest packed_length": None if length is None else self.longest(sharding),
                }
                for sharding, plan in planned.items()
            },
            "host memory": {
                # By the main process only; a quantized model is loaded by every process, in bfloat16.
                "weights while loading": num_weights
                * (2 * options.num_processes if self.run_args.load_in_4bit else 4),
                "pictures ready": options.num_processes
                * self.args.dataloader_num_workers
                * PREFETCH
                * pictures
                * channels
                * side**2
                * 4,
            },
            "flops a step": parts,
            "seconds a step": seconds,
            "steps": steps,
            "hours": None if steps is None else steps * seconds / 3600,
        }


def describe(planner: Planner, report: dict[str, Any]) -> str:
    """The report as text."""
    options, sample = planner.options, planner.sample
    limit = options.device_memory * 10**9 / GIB
    rows = f"packed rows of {report['packed_length']} tokens" if report["packed_length"] else "padded rows"
    lines = [
        f"{report['recipe']}: stage {report['stage']}, {rows}, {options.num_processes} x {options.device_memory:g} GB "
        f"({limit:.1f} GiB)",
        f"assumed: a sample has {sample.pictures} picture(s) and {sample.tokens} tokens, {sample.supervised} of them "
        f"supervised; {report['passes']} pass(es) a step",
        "",
        f"{'GiB a device':24}" + "".join(f"{sharding:>10}" for sharding in report["memory"]),
    ]
    for kind in (*KINDS, "total"):
        lines.append(f"{kind:24}" + "".join(f"{memory[kind] / GIB:10.1f}" for memory in report["memory"].values()))
    lines.append(f"{'fits':24}" + "".join(f"{'yes' if m['fits'] else 'no':>10}" for m in report["memory"].values()))
    if report["packed_length"] is not None:
        longest = [memory["longest packed_length"] for memory in report["memory"].values()]
        lines.append(f"{'longest packed_length':24}" + "".join(f"{length or 'none':>10}" for length in longest))
    if "zero3" in report["memory"]:
        lines.append("zero3: states by formula, activations as fsdp2's.")
    if planner.run_args.load_in_4bit:
        lines.append("4-bit weights: by formula.")
    host = ", ".join(f"{size / GIB:.1f} GiB {name}" for name, size in report["host memory"].items())
    lines += ["", f"host memory of all processes: {host}"]
    step = sum(report["flops a step"].values())
    parts = ", ".join(f"{name} {flops / step:.0%}" for name, flops in report["flops a step"].items())
    lines += [f"{step:.3g} FLOPs a step:", f"    {parts}"]
    time = f"{report['seconds a step']:.1f} s a step at an MFU of {options.mfu:.0%} of {options.device}'s"
    if report["steps"] is not None:
        time += f"; {report['steps']} steps, {report['hours']:.1f} hours"
    return "\n".join([*lines, time])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Plan memory and time of a run.", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--config", type=Path, required=True, help="recipe; its fields can be given too")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model_config", help="folder, config.json or Hub id of the NormLlava to train")
    model.add_argument("--size", choices=SIZES, help="shapes of a known model to train instead")
    parser.add_argument("--num_processes", type=int, default=8, help="devices")
    parser.add_argument(
        "--sharding", nargs="+", choices=WAYS, help="how several devices share the model; all that the run can have"
    )
    parser.add_argument(
        "--device_memory", type=float, default=80, help="of a device, in GB of 10^9 bytes. A card has about 6%% more "
        "than its nominal size, which is left to CUDA, communication and fragmentation",
    )  # fmt: skip
    parser.add_argument("--device", default="H100", help="GPU whose peak FLOP/s is used, by TRL's table")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that training reaches")
    parser.add_argument("--pictures", type=int, default=1, help="per sample")
    parser.add_argument("--text_tokens", type=int, help="per sample; 30 in stage align, otherwise 350")
    parser.add_argument("--supervised_tokens", type=int, help="per sample; 25 in stage align, otherwise 175")
    parser.add_argument("--rows", type=int, help="rows of the data; known for the recipes' own")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options, fields = parser.parse_known_args(argv)
    for name in ("num_processes", "device_memory", "mfu", "pictures", "text_tokens", "supervised_tokens", "rows"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be above 0, got {value}")
    logging.disable(logging.WARNING)  # libraries' messages are of no use here
    try:
        with warnings.catch_warnings(action="ignore"):
            planner = Planner(options, fields)
            report = planner.report()
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)
    sys.stdout.write(describe(planner, report) + "\n")
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
