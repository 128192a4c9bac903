"""Training speed of a real model: our command and TRL's SFTTrainer, each in turn with a bare PyTorch loop.

    make emoji                  # the model and rows by default
    python -m benchmarks.real   # on a GPU: --device cuda

After each step of a trainer the bare loop takes one on the same batch, so that other load slows both. Its batches are
ready; a trainer makes its own. TRL trains plain Llava of the same weights, by chat format in both stages, and packs no
pictures. The peak is what a matrix product of the language model's shapes reaches. `--alone` leaves the loop out, and
then the memory is the trainer's.
"""

import os


os.environ |= {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}  # before torch is loaded

import argparse
import gc
import itertools
import json
import platform
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers.trainer
from torch.nn import functional as F
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoProcessor, LlavaForConditionalGeneration, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.trl_rows import trl_dataset
from conversations.tokens import IGNORED
from modeling_normllava import NormLlavaForConditionalGeneration
from training import sft


ROWS = {"align": "captions.json", "instruct": "train.json"}  # by stage, below --data
PACKED_LENGTH = 65536  # a step in one row
ARMS = ("ours, padded", "ours, packed", "TRL, padded")
COLUMNS = ("seconds", "ratio", "tokens_per_second", "share_of_peak", "bare_share", "padding_share", "memory_gib")


class BareLoop(TrainerCallback):
    """Takes a step of its own after each of a trainer's."""

    def __init__(self, folder: Path, attention: str, alone: bool) -> None:
        self.folder, self.attention, self.alone = folder, attention, alone
        self.losses: list[float] = []
        self.clocks: list[float] = []

    def tick(self) -> None:
        """Read the clock, once the device is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.clocks.append(perf_counter())

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Read the batches, and load a model of the same weights of which the same are trained."""
        loader, trained = parts["train_dataloader"], dict(parts["model"].named_parameters())
        self.args, self.batches = args, list(getattr(loader, "base_dataloader", loader))
        if not self.alone:
            self.model = NormLlavaForConditionalGeneration.from_pretrained(
                self.folder, dtype=torch.float32, attn_implementation={"text_config": self.attention}
            ).to(args.device)
            for name, parameter in self.model.train().named_parameters():
                if name in trained:  # TRL's model has no norm
                    parameter.requires_grad_(trained[name].requires_grad)
                    parameter.data = parameter.data.to(trained[name].dtype)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), args.learning_rate, weight_decay=0, fused=True)
        self.tick()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take a step. What the trainer does after it counts as part of the trainer's next one."""
        self.tick()
        if not self.alone:
            inputs = {name: value.to(args.device) if torch.is_tensor(value) else value
                      for name, value in self.batches[state.global_step - 1].items()}  # fmt: skip
            # The first step is not timed.
            with FlopCounterMode(display=False) if state.global_step == 1 else nullcontext() as counter:
                self.step(inputs)
            if counter is not None:
                self.flops_per_token = counter.get_total_flops() / inputs["input_ids"].numel()
        self.tick()

    def step(self, inputs: dict[str, Any]) -> None:
        """The same arithmetic: the head on supervised positions, the mean loss, clipping."""
        labels = inputs.pop("labels")[:, 1:]
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.args.bf16):
            states = self.model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
            logits = self.model.lm_head(states[labels != IGNORED])
        loss = F.cross_entropy(logits.float(), labels[labels != IGNORED])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Keep the mean loss and the peak of the device's memory: saving takes more."""
        self.loss = state.log_history[-1]["train_loss"]
        self.memory = torch.cuda.max_memory_allocated()  # 0 on a CPU


def peak(model: Any, num_tokens: int) -> float:
    """FLOP/s of a matrix product as in the language model's MLP, for the tokens of a step: the best of many."""
    config = model.config.text_config
    shapes = {"left": (num_tokens, config.hidden_size), "right": (config.hidden_size, config.intermediate_size)}
    factors = {name: torch.rand(shape) for name, shape in shapes.items()}
    timer = Timer("left @ right", globals=factors, num_threads=torch.get_num_threads())
    seconds = min(timer.blocked_autorange(min_run_time=2).times)
    return 2 * num_tokens * config.hidden_size * config.intermediate_size / seconds


def train_ours(stage: str, rows: Path, packed: bool, options: argparse.Namespace, common: Mapping[str, Any]) -> None:
    """Train by our command, in this process."""
    fields = {
        **common, "stage": stage, "model_name_or_path": options.model, "dataset_name": rows,
        "image_folder": options.data, "global_batch_size": options.batch_size,
        "per_device_train_batch_size": 1 if packed else options.batch_size, "vision_learning_rate": 1e-5,
        **({"packed_length": PACKED_LENGTH, "attn_implementation": options.attention} if packed else {}),
    }  # fmt: skip
    sft.main([part for name, value in fields.items() for part in (f"--{name}", str(value))])


def train_plain(
    stage: str, rows: Sequence[dict[str, Any]], options: argparse.Namespace, common: Mapping[str, Any]
) -> None:
    """Train plain Llava by TRL, as it documents it for pictures; TRL itself puts the pictures before the text."""
    model = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(options.model)
    if stage == "align":
        model.requires_grad_(False).model.multi_modal_projector.requires_grad_(True)
    args = SFTConfig(
        **common, max_length=None, remove_unused_columns=False, assistant_only_loss=True,
        per_device_train_batch_size=options.batch_size, train_sampling_strategy="sequential",
    )  # fmt: skip
    pictures = trl_dataset(rows, options.data, common["seed"])
    SFTTrainer(model, args, train_dataset=pictures, processing_class=processor).train()


def measure(options: argparse.Namespace, stage: str, arm: str) -> dict[str, Any]:
    """Medians over all steps but the first; of an arm that runs out of memory only that."""
    gc.collect()  # the trainer before refers to itself
    cuda, packed = options.device == "cuda", arm == "ours, packed"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows = json.loads((options.data / ROWS[stage]).read_text(encoding="utf-8"))
    rows = random.Random(42).sample(rows, options.steps * options.batch_size)
    bare = BareLoop(options.model, options.attention if packed else "sdpa", options.alone)
    with tempfile.TemporaryDirectory() as name:
        Path(name, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        common = {
            "output_dir": f"{name}/run", "max_steps": options.steps, "learning_rate": 1e-5, "max_grad_norm": 1.0,
            "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "bf16": cuda, "use_cpu": not cuda,
            "gradient_checkpointing": cuda, "report_to": "none", "save_strategy": "no",
            "disable_tqdm": True, "logging_steps": 1, "seed": 42,
        }  # fmt: skip
        transformers.trainer.DEFAULT_CALLBACKS.append(bare)  # our command makes its own trainer
        try:
            if arm == "TRL, padded":
                train_plain(stage, rows, options, common)
            else:
                train_ours(stage, Path(name, "rows.json"), packed, options, common)
        except torch.OutOfMemoryError as error:
            return {"stage": stage, "arm": arm, "out_of_memory": str(error).split(". ")[0]}
        finally:
            transformers.trainer.DEFAULT_CALLBACKS.remove(bare)
    clocks = torch.tensor(bare.clocks, dtype=torch.float64).diff().unflatten(0, (-1, 2))[1:]
    seconds, bare_seconds = clocks.quantile(0.5, dim=0).tolist()
    timed = bare.batches[len(bare.batches) // options.steps :]
    computed = sum(batch["input_ids"].numel() for batch in timed)
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in timed if "attention_mask" in batch)
    report = {
        "stage": stage, "arm": arm, "seconds": seconds, "loss": bare.loss,
        "tokens_per_second": (computed - padding) / len(clocks) / seconds, "padding_share": padding / computed,
        "memory_gib": bare.memory / 2**30, "steps": clocks.tolist(),
    }  # fmt: skip
    if not options.alone:
        num_tokens = computed // len(clocks)
        reached = peak(bare.model, num_tokens)
        at_peak = bare.flops_per_token * num_tokens / reached  # seconds
        report |= {
            "bare_seconds": bare_seconds, "ratio": (clocks[:, 0] / clocks[:, 1]).quantile(0.5).item(),
            "bare_loss": sum(bare.losses) / options.steps,
            "share_of_peak": at_peak / seconds, "bare_share": at_peak / bare_seconds,
        }  # fmt: skip
    return report


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The parser's options; exits where the model or its rows are missing."""
    parser.add_argument("--model", type=Path, default=Path("runs/emoji/aligned"), help="folder of a NormLlava")
    parser.add_argument("--data", type=Path, default=Path("runs/emoji/pictures"), help="folder of its rows")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run, the first not timed")
    parser.add_argument("--batch_size", type=int, default=16, help="rows of a step")
    parser.add_argument("--attention", default="varlen", help="of packed rows: varlen, sdpa, flash_attention_2, ...")
    options = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one GPU
    for path in (options.model / "config.json", *(options.data / name for name in ROWS.values())):
        if not path.exists():
            parser.error(f"{path} is missing: run `make emoji` first, or name others by --model and --data.")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare training speed with a bare loop and plain TRL.")
    parser.add_argument("--alone", action="store_true", help="without the bare loop")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file; benchmarks/results/real_<device>.json by default")
    options = parse(parser, argv)
    options.alone |= options.device == "cuda"  # two models would share its memory
    output = options.output or Path(f"benchmarks/results/real_{options.device}.json")
    results: dict[str, Any] = {
        "settings": {name: str(value) for name, value in vars(options).items()},
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(), "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")}, "arms": [],
    }  # fmt: skip
    sys.stdout.write(f"{'':24}" + "".join(f"{name:>18}" for name in COLUMNS) + "\n")
    for stage, arm in itertools.product(ROWS, ARMS):
        results["arms"].append(report := measure(options, stage, arm))
        cells = "".join(f"{report[name]:18.3f}" if name in report else f"{'':18}" for name in COLUMNS)
        sys.stdout.write(f"{f'{stage}: {arm}':24}{report.get('out_of_memory', cells)}\n")
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
