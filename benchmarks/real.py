"""Training speed of the real model on a CPU: our trainer and TRL's, each in turn with a bare PyTorch loop.

    python -m benchmarks.real --model runs/emoji/aligned --data runs/emoji/pictures --steps 6

After each step of a trainer the bare loop takes one on the same batch: other load slows both. Its batches are ready; a
trainer makes its own. TRL trains plain Llava of the same weights, and packs no pictures. FLOPs: training/flops.py.
"""

import os


os.environ |= {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}  # before torch is loaded

import argparse
import gc
import json
import random
import sys
import tempfile
import timeit
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration, PrinterCallback, TrainerCallback

from benchmarks.training import SEED, common_arguments, plain_trainer
from training import sft
from training.flops import step_flops
from training.stages import Stage
from training.trainer import supervised_positions


ROWS = {Stage.INSTRUCT: "train.json", Stage.ALIGN: "captions.json"}
ARMS = ("ours, padded", "ours, packed", "TRL, padded")
COLUMNS = ("seconds", "bare_seconds", "ratio", "cpu_ratio", "gigaflops", "peak_gigaflops", "share", "bare_share")


class BareLoop(TrainerCallback):
    """Takes a step of its own after each of a trainer's. Two clocks: time that passed, and that of all cores."""

    def __init__(self, model: Any, trainer: Any) -> None:
        self.model, self.batches = model.train(), list(trainer.get_train_dataloader())
        self.optimizer = torch.optim.AdamW(model.parameters(), trainer.args.learning_rate, weight_decay=0, fused=True)
        self.losses: list[float] = []
        self.clocks = [(perf_counter(), process_time())]

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        """Take a step. What the trainer does after it counts as part of the trainer's next one."""
        self.clocks.append((perf_counter(), process_time()))
        inputs = dict(self.batches[state.global_step - 1])
        scored, targets = supervised_positions(inputs.pop("labels"))
        states = self.model.model(**inputs, use_cache=False).last_hidden_state[scored]
        loss = torch.nn.functional.cross_entropy(self.model.lm_head(states), targets[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.clocks.append((perf_counter(), process_time()))


def make_trainer(options: argparse.Namespace, stage: Stage, arm: str, folder: str) -> tuple[Any, BareLoop]:
    """A trainer of rows drawn at random, ours as training/sft.py makes it, and the bare loop of a model like ours."""
    steps, size, packed = options.steps, options.batch_size, arm == "ours, packed"
    drawn = random.Random(SEED).sample(json.loads((options.data / ROWS[stage]).read_text()), steps * size)
    Path(folder, "rows.json").write_text(json.dumps(drawn))
    settings = common_arguments(cuda=False, gradient_checkpointing=False, optim="adamw_torch_fused") | {
        "output_dir": folder, "max_steps": steps, "lr_scheduler_type": "constant", "max_grad_norm": 1.0,
        "train_sampling_strategy": "random" if packed else "sequential",
    }  # fmt: skip
    fields = settings | {
        "stage": stage, "model_name_or_path": options.model, "dataset_name": f"{folder}/rows.json",
        "image_folder": options.data, "global_batch_size": size, "per_device_train_batch_size": 1 if packed else size,
        **({"vision_learning_rate": settings["learning_rate"]} if stage is Stage.INSTRUCT else {}),
        **({"packed_length": 4096 * size, "attn_implementation": "varlen"} if packed else {}),
    }  # fmt: skip
    argv = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    run_args, args = sft.parse_arguments(argv)
    processor = sft.AutoProcessor.from_pretrained(options.model)
    plain = sft.plain_template(processor.tokenizer, processor.image_token)
    tokenize = sft.RowTokenizer(processor, plain if stage is Stage.ALIGN else processor.chat_template)
    rows, data, _ = sft.read_rows(run_args, args, tokenize)
    model, groups = sft.prepare_model(sft.load_base(run_args, args), run_args, args)
    if arm == "TRL, padded":
        llava = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
        batches: Any = argparse.Namespace(rows_per_batch=size, samples_per_step=size)
        trainer = plain_trainer(llava, stage, batches, rows, tokenize, settings)
        trainer.remove_callback(PrinterCallback)
    else:
        run = sft.describe_run(run_args, args, data, sft.describe_environment("cpu", 1, resumed=False))
        sampler, args.gradient_accumulation_steps = sft.deal_rows(run_args, args, rows, tokenize.tokens_per_image)
        trainer = sft.NormLlavaTrainer(
            model, groups, run, sampler=sampler, args=args, train_dataset=rows,
            processing_class=processor, data_collator=sft.VisionLanguageCollator(tokenize, packed),
        )  # fmt: skip
        model, _ = sft.prepare_model(sft.load_base(run_args, args), run_args, args)
    trainer.add_callback(bare := BareLoop(model, trainer))
    return trainer, bare


def measure(options: argparse.Namespace, stage: Stage, arm: str) -> dict[str, Any]:
    """Medians over all steps but the first, and the peak: the best product of a batch with a weight of the MLP."""
    gc.collect()  # the trainer before refers to itself
    with tempfile.TemporaryDirectory() as folder:
        trainer, bare = make_trainer(options, stage, arm, folder)
        trainer.train()
    clocks = torch.tensor(bare.clocks, dtype=torch.float64).diff(dim=0).unflatten(0, (-1, 2))[1:]
    (seconds, _), (bare_seconds, _) = clocks.quantile(0.5, dim=0).tolist()
    ratio, cpu_ratio = (clocks[:, 0] / clocks[:, 1]).quantile(0.5, dim=0).tolist()
    timed, weight = bare.batches[1:], bare.model.model.language_model.layers[0].mlp.up_proj.weight.detach()
    lengths = [b["attention_mask"].sum(1) if "attention_mask" in b else b["cu_seq_lens_q"].diff() for b in timed]
    pictures = sum(len(batch.get("pixel_values", ())) for batch in timed)
    supervised = sum(supervised_positions(batch["labels"])[1].numel() for batch in timed)
    flops = sum(step_flops(bare.model, stage, torch.cat(lengths).tolist(), pictures, supervised).values()) / len(timed)
    states = torch.randn(timed[0]["input_ids"].numel(), weight.shape[1])
    peak = 2 * len(states) * weight.numel() / min(timeit.repeat(lambda: states @ weight.T, number=1, repeat=30))
    return {
        "stage": stage, "arm": arm, "seconds": seconds, "bare_seconds": bare_seconds, "ratio": ratio,
        "cpu_ratio": cpu_ratio, "gigaflops": flops / 1e9, "peak_gigaflops": peak / 1e9,
        "share": flops / seconds / peak, "bare_share": flops / bare_seconds / peak, "steps": clocks.tolist(),
        "loss": trainer.state.log_history[-1]["train_loss"], "bare_loss": sum(bare.losses) / options.steps,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare training speed with a bare loop and plain TRL.")
    parser.add_argument("--model", default="runs/emoji/aligned", help="folder of a NormLlava")
    parser.add_argument("--data", type=Path, default=Path("runs/emoji/pictures"), help="folder of both stages' rows")
    parser.add_argument("--steps", type=int, default=6, help="steps of each arm, the first not timed")
    parser.add_argument("--batch_size", type=int, default=16, help="rows of a step")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/real_cpu.json"))
    options = parser.parse_args(argv)
    results: dict[str, Any] = {
        "processor": Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0],
        "instructions": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0], "batch_size": options.batch_size, "steps": options.steps, "arms": [],
        "environment": asdict(sft.describe_environment("cpu", 1, resumed=False)),
    }  # fmt: skip
    sys.stdout.write(f"{json.dumps(results)}\n{'':24}" + "".join(f"{name:>15}" for name in COLUMNS) + "\n")
    for stage, arm in ((stage, arm) for stage in ROWS for arm in ARMS):
        results["arms"].append(report := measure(options, stage, arm))
        sys.stdout.write(f"{stage + ', ' + arm:24}" + "".join(f"{report[name]:15.3f}" for name in COLUMNS) + "\n")
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
