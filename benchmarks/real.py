"""Compares our command's and TRL's SFTTrainer's speed on a CPU, on a real model, with a bare PyTorch loop.

    make emoji                  # makes the model and the rows that are taken by default
    python -m benchmarks.real

After each step of a trainer, the bare loop takes a step on the same batch, so that other load on the machine slows
both. The trainer's time includes making the batch, and the loop's time doesn't. TRL trains plain Llava with the same
weights, uses the chat format in both stages, and can't pack rows with pictures. `benchmarks.gpu` measures on a GPU.

In the table, `ratio` is the trainer's time over the loop's time. `share_of_peak` is the trainer's speed over the peak,
and `bare_share` is the loop's speed over the peak. The peak is the speed of a matrix product with the language model's
shapes. `padding_share` is the share of padding among all tokens.
"""

import os


os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise tokenizers warns in processes that fork
os.environ["OMP_WAIT_POLICY"] = "passive"  # waiting threads sleep; torch reads this variable while it is loaded

import argparse
import gc
import itertools
import json
import platform
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from normllava.command_line import command, parse

import torch
import transformers.trainer
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoProcessor, LlavaForConditionalGeneration, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.bare_step import take_step
from benchmarks.trl_rows import trl_dataset
from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.errors import UserError
from training import sft


ROW_FILES = {"align": "captions.json", "instruct": "train.json"}  # of stages 1 and 2, in the folder --data
PACKED_LENGTH = 65536  # tokens; with the default model, all rows of a step fit into one packed row
# The arms that are compared: our command on padded rows and on packed rows, and TRL's trainer on padded rows.
ARMS = ("ours, padded", "ours, packed", "TRL, padded")
# The printed table has a column of arms and these columns of figures. Widths are in characters.
ARM_WIDTH = 24
FIGURE_WIDTH = 18
COLUMNS = ("seconds", "ratio", "tokens_per_second", "share_of_peak", "bare_share", "padding_share")
Report = dict[str, Any]  # an arm's stage, name and figures


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description="Compare training speed on a CPU with a bare loop and plain TRL.")
    add = parser.add_argument
    add("--output", type=Path, default=Path("benchmarks/results/real_cpu.json"), help="JSON file of the figures")
    add("--model", type=Path, default=Path("runs/emoji/aligned"), help="folder of a NormLlava")
    add("--data", type=Path, default=Path("runs/emoji/pictures"), help="folder of its rows")
    add("--steps", type=int, default=6, help="steps of each run, the first not timed")
    add("--batch_size", type=int, default=16, help="rows of a step")
    add("--attention", default="varlen", help="attention of packed rows: varlen, sdpa, flash_attention_2, ...")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parse(build_parser(), argv)
    require_files(options)
    results = describe_run(options)
    sys.stdout.write(render_header() + "\n")
    for stage, arm in itertools.product(ROW_FILES, ARMS):
        report = measure(options, stage, arm)
        results["arms"].append(report)
        sys.stdout.write(render_report(report) + "\n")
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def require_files(options: argparse.Namespace) -> None:
    """Check that the model and its files of rows exist.

    Raises:
        UserError: if a file is missing.
    """
    row_files = [options.data / name for name in ROW_FILES.values()]
    for path in [options.model / "config.json", *row_files]:
        if not path.exists():
            raise UserError(f"{path} is missing: run `make emoji` first, or name others by --model and --data.")


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the file of results before the first arm: what all arms share, and an empty list of reports."""
    return {
        "settings": {name: str(value) for name, value in vars(options).items()},
        "device": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],  # the machine's mean load in the last minute
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")},
        "arms": [],
    }


def render_header() -> str:
    """The first line of the printed table."""
    headings = [name.rjust(FIGURE_WIDTH) for name in COLUMNS]
    return " " * ARM_WIDTH + "".join(headings)


def render_report(report: Report) -> str:
    """An arm's line of the printed table."""
    line = f"{report['stage']}: {report['arm']}".ljust(ARM_WIDTH)
    for name in COLUMNS:
        line += f"{report[name]:.3f}".rjust(FIGURE_WIDTH)
    return line


def measure(options: argparse.Namespace, stage: str, arm: str) -> Report:
    """Train an arm, and return its report."""
    gc.collect()  # a trainer refers to itself, so only this frees the trainer of the arm before
    all_rows = json.loads((options.data / ROW_FILES[stage]).read_text(encoding="utf-8"))
    rows = random.Random(42).sample(all_rows, options.steps * options.batch_size)
    is_packed = arm == "ours, packed"
    attention = options.attention if is_packed else "sdpa"
    loop = BareLoop(options.model, attention=attention)

    with tempfile.TemporaryDirectory() as folder, called_by_all_trainers(loop):
        if arm == "TRL, padded":
            train_trl(stage, rows, options, Path(folder))
        else:
            train_ours(stage, rows, options, Path(folder), is_packed)

    return {"stage": stage, "arm": arm, **report_trainer(loop), **report_loop(loop)}


@contextmanager
def called_by_all_trainers(callback: TrainerCallback) -> Iterator[None]:
    """Within the block, every new trainer gets this callback, also the trainer that our command makes."""
    transformers.trainer.DEFAULT_CALLBACKS.append(callback)
    try:
        yield
    finally:
        transformers.trainer.DEFAULT_CALLBACKS.remove(callback)


def common_fields(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The fields of the config that TRL's trainer and ours have in common."""
    return {
        "output_dir": str(folder / "run"),
        "max_steps": options.steps,
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 42,
    }


def train_ours(
    stage: str, rows: Sequence[Mapping[str, Any]], options: argparse.Namespace, folder: Path, is_packed: bool
) -> None:
    """Train with our command, in this process."""
    rows_file = folder / "rows.json"
    rows_file.write_text(json.dumps(rows), encoding="utf-8")

    fields = {
        **common_fields(options, folder),
        "stage": stage,
        "model_name_or_path": options.model,
        "dataset_name": rows_file,
        "image_folder": options.data,
        "global_batch_size": options.batch_size,
        "per_device_train_batch_size": 1 if is_packed else options.batch_size,
    }
    if stage == "instruct":
        fields["vision_learning_rate"] = 1e-5
    if is_packed:
        fields |= {"packed_length": PACKED_LENGTH, "attn_implementation": options.attention}
    sft.main([f"--{name}={value}" for name, value in fields.items()])


def train_trl(stage: str, rows: Sequence[dict[str, Any]], options: argparse.Namespace, folder: Path) -> None:
    """Train plain Llava with TRL's trainer, as TRL's documentation does for pictures."""
    model = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    if stage == "align":
        model.requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)

    args = SFTConfig(
        **common_fields(options, folder),
        max_length=None,
        remove_unused_columns=False,
        assistant_only_loss=True,
        per_device_train_batch_size=options.batch_size,
        train_sampling_strategy="sequential",  # `trl_dataset` has put the rows in order
    )
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=trl_dataset(rows, options.data, args.seed),
        processing_class=AutoProcessor.from_pretrained(options.model),
    )
    trainer.train()


class BareLoop(TrainerCallback):
    """A loop of plain PyTorch, as a callback of a trainer.

    After each step of the trainer, the loop takes a step on the same batch. Both steps are timed.

    Args:
        model_folder: Folder of the model.
        attention: Attention of the loop's decoder.
    """

    def __init__(self, model_folder: Path, attention: str) -> None:
        self.model_folder = model_folder
        self.attention = attention
        self.losses: list[float] = []
        # The time at which training began. Then two times for each step: when the trainer ended its step, and when the
        # loop ended its step on the same batch.
        self.clock_readings: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read all batches of the trainer, and load the loop's model.

        Raises:
            UserError: if the trainer's steps have several batches, since the loop's steps have one.
        """
        if args.gradient_accumulation_steps != 1:
            raise UserError(
                f"The rows of a step fill {args.gradient_accumulation_steps} batches, and the loop beside the trainer "
                "takes one. Lower --batch_size."
            )
        loader = kwargs["train_dataloader"]
        # accelerate's loader counts how often it is read, and begins another epoch. The loader inside doesn't.
        self.batches = list(getattr(loader, "base_dataloader", loader))
        self.args = args
        self.load_model(dict(kwargs["model"].named_parameters()))
        self.read_clock()

    def load_model(self, trainer_parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Load the loop's model, and prepare it to train what the trainer trains, in the same dtypes.

        Args:
            trainer_parameters: All parameters of the trainer's model, by name.
        """
        model = NormLlavaForConditionalGeneration.from_pretrained(
            self.model_folder, dtype=torch.float32, attn_implementation={"text_config": self.attention}
        )
        self.model = model.train()
        for name, parameter in self.model.named_parameters():
            if name in trainer_parameters:  # TRL's plain Llava lacks the norm, which the loop trains all the same
                parameter.requires_grad_(trainer_parameters[name].requires_grad)
                parameter.data = parameter.data.to(trainer_parameters[name].dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.args.learning_rate, weight_decay=0, fused=True
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the loop's step. What the trainer does afterwards is timed as part of the trainer's next step."""
        self.read_clock()
        # A step has one batch: `on_train_begin` refuses several. `global_step` counts from 1.
        inputs = self.batches[state.global_step - 1]
        is_first_step = state.global_step == 1
        if is_first_step:
            self.count_flops(inputs)  # counting is slow, but the first step is not timed
        else:
            self.take_step(inputs)
        self.read_clock()

    def read_clock(self) -> None:
        """Record the time."""
        self.clock_readings.append(perf_counter())

    def take_step(self, inputs: dict[str, Any]) -> None:
        """Take a step on one batch, and keep its loss."""
        loss = take_step(self.model, [inputs], self.optimizer, self.args)
        self.losses.append(loss.item())

    def count_flops(self, inputs: dict[str, Any]) -> None:
        """Take a step and count its FLOPs for each token."""
        with FlopCounterMode(display=False) as counter:
            self.take_step(inputs)
        self.flops_per_token = counter.get_total_flops() / inputs["input_ids"].numel()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the trainer's mean loss."""
        self.trainer_loss = state.log_history[-1]["train_loss"]

    def step_seconds(self) -> torch.Tensor:
        """The seconds of the trainer and of the loop in each step but the first, `[steps - 1, 2]`."""
        seconds = torch.tensor(self.clock_readings, dtype=torch.float64).diff()  # trainer, loop, trainer, loop, ...
        seconds_by_step = seconds.unflatten(0, (-1, 2))  # [steps, 2]
        return seconds_by_step[1:]

    def timed_batches(self) -> list[dict[str, Any]]:
        """The batches of all steps but the first. A step has one batch."""
        return self.batches[1:]


def report_trainer(loop: BareLoop) -> Report:
    """The trainer's figures. Times are medians over all steps but the first."""
    step_seconds = loop.step_seconds()
    trainer_seconds = median(step_seconds[:, 0])  # the loop's seconds are in the other column

    computed_tokens = 0
    padding_tokens = 0
    for batch in loop.timed_batches():
        computed_tokens += batch["input_ids"].numel()
        if "attention_mask" in batch:  # a packed batch has no mask, and no padding
            padding_tokens += int((batch["attention_mask"] == 0).sum())

    num_timed_steps = len(step_seconds)
    unpadded_per_step = (computed_tokens - padding_tokens) / num_timed_steps
    return {
        "seconds": trainer_seconds,
        "loss": loop.trainer_loss,
        "tokens_per_second": unpadded_per_step / trainer_seconds,
        "padding_share": padding_tokens / computed_tokens,
        "steps": step_seconds.tolist(),
    }


def report_loop(loop: BareLoop) -> Report:
    """The bare loop's figures, and the trainer's figures that are relative to the loop or to the peak."""
    trainer_steps, loop_steps = loop.step_seconds().unbind(1)
    trainer_seconds = median(trainer_steps)
    bare_seconds = median(loop_steps)

    computed_tokens = sum(batch["input_ids"].numel() for batch in loop.timed_batches())
    computed_per_step = computed_tokens // len(loop_steps)
    flops_per_step = loop.flops_per_token * computed_per_step
    seconds_at_peak = flops_per_step / measure_peak(loop.model, computed_per_step)
    return {
        "bare_seconds": bare_seconds,
        "ratio": median(trainer_steps / loop_steps),
        "bare_loss": sum(loop.losses) / len(loop.losses),
        "share_of_peak": seconds_at_peak / trainer_seconds,
        "bare_share": seconds_at_peak / bare_seconds,
    }


def median(seconds: torch.Tensor) -> float:
    """The median. Of an even number of values it is the mean of the two in the middle, unlike `torch.median`."""
    return seconds.quantile(0.5).item()


def measure_peak(model: Any, num_tokens: int) -> float:
    """The highest FLOP/s of a matrix product of the language model's MLP on the CPU, for this number of tokens."""
    config = model.config.text_config
    matrices = {
        "left": torch.rand(num_tokens, config.hidden_size),
        "right": torch.rand(config.hidden_size, config.intermediate_size),
    }
    timer = Timer("left @ right", globals=matrices, num_threads=torch.get_num_threads())
    seconds = min(timer.blocked_autorange(min_run_time=2).times)  # it repeats the product for two seconds
    return 2 * num_tokens * config.hidden_size * config.intermediate_size / seconds


if __name__ == "__main__":
    main()
