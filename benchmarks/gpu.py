"""Everything that only a GPU shows, in parts of a few minutes each.

    python -m benchmarks.gpu                    # all parts that have no figures yet
    python -m benchmarks.gpu --quick            # fewer steps and repeats, and only the smaller model
    python -m benchmarks.gpu --parts norm qlora-Qwen2.5-7B

Each part runs in a separate process and writes its figures at once to `<results>/<part>.json`, by default below
`benchmarks/results/<device>/`, or `<device>-quick/`. A part that has figures there is not run again. A part whose
packages are not installed is skipped with a message. Weights are random and rows synthetic (benchmarks/synthetic.py):
speed and memory are realistic, losses are not.
"""

import argparse
import importlib.util
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import set_seed
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks import norm as norm_benchmark
from benchmarks.plan_check import parse
from benchmarks.synthetic import SIZES, checked_rows, synthetic_config, synthetic_processor, write_model, write_rows
from benchmarks.training import SEED, Comparison, common_arguments, compare, out_of_memory, pack, run_arm, use_one_gpu
from conversations.files import write_whole
from diagnostics.model_report import spread_layers
from diagnostics.parts import decoder_layers
from diagnostics.probe import Probe
from diagnostics.tokens import classify_sample, token_ids
from modeling_normllava import NormLlavaForConditionalGeneration
from training.attention import varlen_attention_forward
from training.batches import Batches
from training.compiling import compile_layers
from training.environment import describe_environment
from training.memory import largest_batch
from training.plan import GIB, plan_step
from training.stages import LearningRates, Stage, prepare_stage


logger = logging.getLogger(__name__)

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
# Seconds that a part may take.
LIMIT = 480
MODELS = ("Llama-3.2-3B", "Qwen2.5-7B")


@dataclass(frozen=True)
class Scale:
    """Model sizes and run lengths of the parts."""

    device: str
    models: tuple[str, ...]
    steps: int
    repeats: int
    layers: int
    """Decoder layers, in parts where a whole model would show nothing more."""
    tokens: int
    """Tokens of a row, in parts without a recipe."""


FULL = Scale("cuda", MODELS, steps=8, repeats=3, layers=4, tokens=4096)
QUICK = Scale("cuda", MODELS[:1], steps=5, repeats=1, layers=4, tokens=4096)
REHEARSAL = Scale("cpu", ("tiny",), steps=3, repeats=1, layers=2, tokens=48)


def measure_norm(scale: Scale) -> dict[str, Any]:
    """The norm's time over nn.LayerNorm's, both compiled and both not, and its gradient's error."""
    tokens, repeats = (norm_benchmark.NUM_TOKENS, 60) if scale.device == "cuda" else (8, 2)
    ratios = {
        name: norm_benchmark.time_ratios(repeats, scale.device, tokens, compiled)
        for name, compiled in (("eager", False), ("compiled", True))
    }
    medians = {name: {"median": statistics.median(found), "all": found} for name, found in ratios.items()}
    return {"time_over_layernorm": medians, "gradient_relative_error_float64": norm_benchmark.gradient_error()}


def measure_attention(scale: Scale) -> dict[str, Any]:
    """ "varlen" forward and backward in bfloat16: its error against float64, compared with sdpa sample by sample, and
    its time over that of sdpa with a mask for the whole row."""
    config = synthetic_config(SIZES[scale.models[-1]], synthetic_processor(SIZES[scale.models[-1]]), True).text_config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    lengths = [scale.tokens // 2, scale.tokens // 4, scale.tokens // 8, scale.tokens // 8]
    generator = torch.Generator().manual_seed(SEED)
    exact = [
        torch.randn(1, count, sum(lengths), head_dim, generator=generator, dtype=torch.float64).to(scale.device)
        for count in (heads, groups, groups)
    ]
    gradient = torch.randn(1, sum(lengths), heads, head_dim, generator=generator, dtype=torch.float64)
    gradient = gradient.to(scale.device)
    boundaries = torch.tensor([0, *lengths], device=scale.device).cumsum(0).to(torch.int32)
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=scale.device), boundaries.diff())
    mask = (sample[:, None] == sample) & torch.ones(len(sample), len(sample), device=scale.device).tril().bool()
    module = nn.Module()
    module.num_key_value_groups = heads // groups
    module.is_causal = True  # type: ignore[assignment]

    def varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return varlen_attention_forward(
            module, query, key, value, None, cu_seq_lens_q=boundaries, max_length_q=max(lengths)
        )[0]

    def by_sample(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        parts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
        return torch.cat([sdpa_attention_forward(module, *part, None, is_causal=True)[0] for part in parts], dim=1)

    def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa_attention_forward(module, query, key, value, mask[None, None])[0]

    def run(attend: Callable[..., torch.Tensor], *states: torch.Tensor) -> list[torch.Tensor]:
        output = attend(*states[:3])
        return [output.detach(), *torch.autograd.grad(output, states[:3], states[3])]

    def given(dtype: torch.dtype) -> list[torch.Tensor]:
        return [*(tensor.to(dtype).requires_grad_() for tensor in exact), gradient.to(dtype)]

    reference, half = run(by_sample, *given(torch.float64)), given(torch.bfloat16)
    report: dict[str, Any] = {"lengths": lengths, "relative_error": {}}
    for name, attend in (("varlen", varlen), ("sdpa", by_sample)):
        errors = [
            ((found.double() - true).norm() / true.norm()).item()
            for found, true in zip(run(attend, *half), reference, strict=True)
        ]
        report["relative_error"][name] = dict(zip(("output", "query", "key", "value"), errors, strict=True))
    seconds = {name: _seconds(partial(run, attend, *half), scale) for name, attend in
               (("varlen", varlen), ("masked sdpa", masked))}  # fmt: skip
    return report | {"seconds": seconds, "speed_ratio": seconds["masked sdpa"] / seconds["varlen"]}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(run: Callable[[], object], scale: Scale) -> float:
    """The median time of several runs, after two warm-up runs."""
    times = []
    for number in range(2 + 3 * scale.repeats):
        _synchronise()
        started = time.perf_counter()
        run()
        _synchronise()
        if number > 1:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_training(scale: Scale, model: str, stage: Stage, optim: str = "adamw_torch_fused") -> dict[str, Any]:
    """Ours against TRL's plain trainer on the same rows, at the sizes of benchmarks/synthetic.py: tokens/s, MFU, and
    memory beside what was planned, also where it runs out."""
    started = time.monotonic()
    common = common_arguments(scale.device == "cuda", gradient_checkpointing=True, optim=optim)
    planned = {"settings": common, "planned_memory_gib": plan_memory(model, stage, scale.steps, common)}
    left = 0.9 * LIMIT - (time.monotonic() - started)
    return {**planned, **compare(stage, Comparison(model, scale.steps, scale.repeats, left), common)}


def plan_memory(model: str, stage: Stage, steps: int, common: dict[str, Any]) -> float:
    """Peak memory of ours as planned by training/plan.py, in GiB."""
    size, processor = SIZES[model], synthetic_processor(SIZES[model])
    fields = {
        "stage": stage.value, "packed_length": size.packed_length[stage], "attn_implementation": "varlen",
        "per_device_train_batch_size": 1, "global_batch_size": size.samples_per_step,
        **{name: common[name] for name in ("bf16", "gradient_checkpointing", "optim", "learning_rate")},
    } | ({"vision_learning_rate": 2e-6} if stage is Stage.INSTRUCT else {})  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        run_args, args = parse(fields, Path(name))
        rows, tokenize = checked_rows(Path(name), stage, size, steps * size.samples_per_step, processor)
        deal = pack(rows, stage, size, tokenize.tokens_per_image)
        samples = largest_batch(rows, Batches(deal, 1, 0), packed=True)
    config: Any = synthetic_config(size, processor, ours=True)
    planned = plan_step(
        config, run_args, args, samples, accumulation_steps=deal.accumulation_steps, cuda=common["bf16"]
    )
    return planned.total / GIB


def measure_optimizer(scale: Scale, model: str, optim: str) -> dict[str, Any]:
    """Stage 2 of ours with an optimizer: speed and peak memory."""
    common = common_arguments(scale.device == "cuda", gradient_checkpointing=True, optim=optim)
    return run_arm("ours", Stage.INSTRUCT, model, scale.steps, common)


def recipe_arguments(scale: Scale, name: str, recipe: str, folder: Path, *changes: str) -> list[str]:
    """The training script's arguments to train `folder/model` on rows in `folder` by one of the model's recipes."""
    recipes = ROOT / "training" / "recipes" / {"tiny": "Qwen2.5-7B-Instruct"}.get(name, f"{name}-Instruct")
    size = SIZES[name]
    given = {
        "model_name_or_path": folder / "model", "dataset_name": folder / "rows.json", "output_dir": folder / "out",
        "global_batch_size": size.samples_per_step, "max_steps": scale.steps, "logging_steps": 1,
        "dataset_num_proc": 1,
    }  # fmt: skip
    if name == "tiny":
        given |= {"packed_length": size.packed_length[Stage.INSTRUCT], "dataloader_num_workers": 0}
    arguments = ["--config", str(recipes / recipe)]
    for field, value in given.items():
        arguments += [f"--{field}", str(value)]
    if scale.device == "cpu":
        arguments += ["--use_cpu", "true", "--bf16", "false"]
    return [*arguments, *changes]


def measure_qlora(scale: Scale, model: str) -> dict[str, Any]:
    """The recipe qlora.yaml with fewer samples a step, run by the training script: peak memory, and tokens/s from its
    own log, start of the kernels included."""
    from training import sft
    from training.run import Run

    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), SIZES[model]
        write_model(folder / "model", size, scale.device)
        write_rows(folder, Stage.INSTRUCT, size, scale.steps * size.samples_per_step)
        if scale.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        sft.main(recipe_arguments(scale, model, "qlora.yaml", folder, "--save_strategy", "no"))
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        arguments = Run.read(folder / "out").arguments
    memory = torch.cuda.max_memory_allocated() / 2**30 if scale.device == "cuda" else None
    losses = [line["loss"] for line in lines if "loss" in line]
    tokens = max(line.get("num_tokens", 0) for line in lines)
    return {
        "settings": {name: arguments[name] for name in ("packed_length", "global_batch_size")},
        "peak_memory_gib": memory,
        "seconds": time.perf_counter() - started,
        "tokens": tokens,
        "tokens_per_second": tokens / lines[-1]["train_runtime"],
        "losses": losses,
    }


class HandLoop:
    """Trains a decoder of a few layers at a model's width without Trainer, to compare ways of computing."""

    def __init__(self, scale: Scale) -> None:
        self.scale, self.size = scale, SIZES[scale.models[-1]]
        processor = synthetic_processor(self.size)
        config = synthetic_config(self.size, processor, ours=True)
        config.text_config.num_hidden_layers = scale.layers
        if hasattr(config.text_config, "layer_types"):
            config.text_config.layer_types = config.text_config.layer_types[: scale.layers]
        with torch.device(scale.device):
            self.model = NormLlavaForConditionalGeneration._from_config(
                config, attn_implementation={"text_config": "varlen", "vision_config": "sdpa"}, dtype=torch.float32
            )
        prepare_stage(self.model, Stage.INSTRUCT, LearningRates(1e-5, 2e-6, 1e-5))
        self.model.train()

    def batch(self, number: int) -> dict[str, Any]:
        """A packed row of samples with a picture each; its length changes from step to step, as in packing."""
        config, side = self.model.config, self.size.vision["image_size"]
        per_picture = (side // self.size.vision["patch_size"]) ** 2
        generator = torch.Generator().manual_seed(number)
        length = per_picture + (self.scale.tokens // 4 - per_picture) * (16 - number % 4) // 16
        ids = torch.randint(3, 1000, (4, length), generator=generator)
        ids[:, :per_picture] = config.image_token_id
        boundaries = torch.arange(5, dtype=torch.int32) * length
        inputs: dict[str, Any] = {
            "input_ids": ids.view(1, -1),
            "labels": ids.where(ids != config.image_token_id, -100).view(1, -1),
            "position_ids": torch.arange(length).repeat(4)[None],
            "pixel_values": torch.randn(4, 3, side, side, generator=generator),
            "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries,
        }  # fmt: skip
        inputs = {key: tensor.to(self.scale.device) for key, tensor in inputs.items()}
        return inputs | {"max_length_q": length, "max_length_k": length}

    def steps(self, step: Callable[[dict[str, Any]], torch.Tensor]) -> dict[str, Any]:
        """Losses of several steps, their median time after the first two, and peak memory."""
        losses, times = [], []
        for number in range(self.scale.steps):
            batch = self.batch(number)
            _synchronise()
            started = time.perf_counter()
            losses.append(step(batch).item())
            _synchronise()
            times.append(time.perf_counter() - started)
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.scale.device == "cuda" else None
        return {"losses": losses, "first_seconds": times[0], "seconds": statistics.median(times[2:]),
                "peak_memory_gib": memory}  # fmt: skip


def measure_precision(scale: Scale, way: str) -> dict[str, Any]:
    """A step of stage 2 in bfloat16 with float32 master weights: by autocast; by FSDP2's cast of whole layers, on one
    device; or by a bfloat16 model whose master weights are in the optimizer."""
    with one_process(scale):
        return _measure_precision(scale, way)


def _measure_precision(scale: Scale, way: str) -> dict[str, Any]:
    loop = HandLoop(scale)
    masters = parameters = [parameter for parameter in loop.model.parameters() if parameter.requires_grad]
    if way == "fsdp2":
        mesh = init_device_mesh(scale.device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in decoder_layers(loop.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(loop.model, mesh=mesh, mp_policy=policy)
        masters = parameters = [parameter for parameter in loop.model.parameters() if parameter.requires_grad]
    elif way == "masters in the optimizer":
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        for parameter in loop.model.parameters():  # unread ones too; buffers stay float32, as in the other ways
            parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, weight_decay=0.0, fused=scale.device == "cuda")

    def step(batch: dict[str, Any]) -> torch.Tensor:
        if way == "masters in the optimizer":
            batch["pixel_values"] = batch["pixel_values"].to(torch.bfloat16)
        with torch.autocast(scale.device, torch.bfloat16, enabled=way == "autocast"):
            loss = loop.model(**batch, use_cache=False).loss
        loss.backward()
        if masters is not parameters:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if masters is not parameters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        return loss.detach()

    return loop.steps(step)


@contextmanager
def one_process(scale: Scale) -> Iterator[None]:
    """A process group of only this process."""
    backend = "nccl" if scale.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def measure_compile(scale: Scale, compiled: bool) -> dict[str, Any]:
    """A step under autocast, with or without compiling each decoder layer separately."""
    loop = HandLoop(scale)
    if compiled:
        compile_layers(decoder_layers(loop.model))
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-5, weight_decay=0.0, fused=scale.device == "cuda")

    def step(batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(scale.device, torch.bfloat16):
            loss = loop.model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return loop.steps(step)


def measure_waits(scale: Scale) -> dict[str, Any]:
    """How often a run of ours, start included, waits for the device, by Python line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if scale.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        common = common_arguments(scale.device == "cuda", gradient_checkpointing=True, optim="adamw_torch")
        run_arm("ours", Stage.INSTRUCT, scale.models[0], scale.steps, common)
    places = Counter(
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    )
    return {"steps": scale.steps, "waits": dict(places.most_common())}


@torch.no_grad()
def measure_probe(scale: Scale) -> dict[str, Any]:
    """A pass with the diagnostics' hooks against one without: time, and memory on top of the weights."""
    name = scale.models[-1]
    size, processor = SIZES[name], synthetic_processor(SIZES[name])
    with torch.device(scale.device):
        model = NormLlavaForConditionalGeneration._from_config(
            synthetic_config(size, processor, ours=True), attn_implementation="sdpa", dtype=torch.bfloat16
        ).eval()
    config, side = model.config, size.vision["image_size"]
    per_picture = (side // size.vision["patch_size"]) ** 2
    ids = torch.randint(3, 1000, (1, per_picture + scale.tokens // 8))
    ids[:, 4 : 4 + per_picture] = config.image_token_id
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids),
              "pixel_values": torch.rand(1, 3, side, side, dtype=torch.bfloat16)}  # fmt: skip
    sample = {key: tensor.to(scale.device) for key, tensor in sample.items()}
    tokens = classify_sample(sample, token_ids(model))
    layers = spread_layers(config.text_config.num_hidden_layers)
    positions = torch.linspace(0, ids.shape[1] - 1, min(64, ids.shape[1])).long()

    def probed() -> None:
        with Probe(model, sample, tokens, layers=layers, key_positions=positions) as probe:
            model.base_model(**sample)
        probe.record()

    report: dict[str, Any] = {}
    for arm, run in (("plain", lambda: model.base_model(**sample)), ("probed", probed)):
        if scale.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if scale.device == "cuda" else 0
        seconds = _seconds(run, scale)
        taken = torch.cuda.max_memory_allocated() - before if scale.device == "cuda" else 0
        report[arm] = {"seconds": seconds, "memory_gib": taken / 2**30}
    return report | {"ratio": report["probed"]["seconds"] / report["plain"]["seconds"]}


def measure_resume(scale: Scale) -> dict[str, Any]:
    """A run that is killed after its first checkpoint, and resumed: how far its weights are from those of two
    uninterrupted runs. CUDA's own sums may differ from run to run."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", SIZES["tiny"], scale.device)
        write_rows(folder, Stage.INSTRUCT, SIZES["tiny"], 6 * SIZES["tiny"].samples_per_step)
        runs = {"one": False, "another": False, "killed": True}
        for run, killed in runs.items():
            arguments = recipe_arguments(scale, "tiny", "stage2.yaml", folder, "--output_dir", str(folder / run))
            arguments += ["--save_steps", "2", "--max_steps", "6", "--learning_rate", "1e-3"]
            command = [sys.executable, str(ROOT / "training" / "sft.py"), *arguments]
            with subprocess.Popen(command, cwd=ROOT) as process:
                while killed and process.poll() is None and not (folder / run / "checkpoint-2").exists():
                    time.sleep(0.01)
                if killed:
                    process.kill()
            if not killed and process.returncode:
                raise RuntimeError(f"the run {run!r} failed with status {process.returncode}")
            if killed:
                subprocess.run([*command, "--resume_from_checkpoint", "true"], cwd=ROOT, check=True)
        weights = {run: load_file(folder / run / "model.safetensors") for run in runs}
    return {
        f"largest difference, {run}": max(
            (weights[run][key] - tensor).abs().max().item() for key, tensor in weights["one"].items()
        )
        for run in ("another", "killed")
    }


@dataclass(frozen=True)
class Part:
    """A part: the function that measures it, and the packages that it needs besides this project's own."""

    measure: Callable[[Scale], dict[str, Any]]
    needs: tuple[str, ...] = ()


def parts(scale: Scale) -> dict[str, Part]:
    """All parts by name, the most informative first."""
    found = {"norm": Part(measure_norm), "attention": Part(measure_attention)}
    for model in scale.models:
        found[f"training-{model}-align"] = Part(partial(measure_training, model=model, stage=Stage.ALIGN))
        # One card can't hold float32 states of the largest model.
        optim = "adamw_bnb_8bit" if model == MODELS[-1] else "adamw_torch_fused"
        found[f"training-{model}-instruct"] = Part(
            partial(measure_training, model=model, stage=Stage.INSTRUCT, optim=optim),
            ("bitsandbytes",) if "bnb" in optim else (),
        )
        found[f"qlora-{model}"] = Part(partial(measure_qlora, model=model), ("bitsandbytes", "peft"))
    found["waits"] = Part(measure_waits)
    for way in ("autocast", "fsdp2", "masters in the optimizer"):
        found[f"precision-{way.replace(' ', '_')}"] = Part(partial(measure_precision, way=way))
    for name, compiled in (("eager", False), ("compiled", True)):
        found[f"compile-{name}"] = Part(partial(measure_compile, compiled=compiled))
    found["adamw_bnb_8bit"] = Part(
        partial(measure_optimizer, model=scale.models[0], optim="adamw_bnb_8bit"), ("bitsandbytes",)
    )
    return found | {"probe": Part(measure_probe), "resume": Part(measure_resume)}


def run_part(name: str, scale: Scale, results: Path) -> None:
    """Measure a part and write its figures; running out of memory is recorded as a figure too."""
    started = time.perf_counter()
    set_seed(SEED)
    try:
        figures = parts(scale)[name].measure(scale)
    except torch.OutOfMemoryError as error:
        figures = out_of_memory(str(error))
    environment = vars(describe_environment(scale.device, 1, resumed=False))
    record = {"part": name, "seconds": time.perf_counter() - started, "environment": environment, **figures}
    results.mkdir(parents=True, exist_ok=True)
    write_whole(results / f"{name}.json", json.dumps(record, indent=2) + "\n")


def missing(part: Part) -> list[str]:
    """Packages that a part needs but are not installed."""
    return [package for package in part.needs if importlib.util.find_spec(package) is None]


def run_all(names: list[str], scale: Scale, results: Path, options: list[str]) -> Iterator[str]:
    """Run parts one by one, each in a separate process; yields those that failed."""
    for name in names:
        needed = missing(parts(scale)[name])
        if (results / f"{name}.json").exists():
            logger.info("%-36s has figures in %s", name, results)
        elif needed:
            logger.info("%-36s skipped: needs %s", name, ", ".join(needed))
        else:
            started = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--results", str(results), *options]
            why = run_process(command, results / f"{name}.log")
            logger.info("%-36s %s, %.0f s", name, f"FAILED: {why}" if why else "done", time.perf_counter() - started)
            if why:
                yield name


def run_process(command: list[str], log: Path) -> str:
    """Run a command, for `LIMIT` seconds at most; it is killed with its children after that. Returns why it failed, or
    "". If it failed, its output stays in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            status = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return f"took more than {LIMIT} s, see {log}"
        finally:
            if process.poll() is None:  # after Ctrl-C too, which does not reach its group
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        return f"{(log.read_text(errors='replace').strip().splitlines() or ['no output'])[-1]}, see {log}"
    log.unlink()
    return ""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats, and only the smaller model")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these parts")
    parser.add_argument("--results", type=Path, help="folder of the figures")
    parser.add_argument("--rehearsal", action="store_true", help="on the CPU, at a tiny size, only to find mistakes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    use_one_gpu()
    scale = REHEARSAL if args.rehearsal else QUICK if args.quick else FULL
    if scale.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --rehearsal runs every part on the CPU, at a tiny size")
    if args.results is not None:
        results = args.results.resolve()
    elif args.rehearsal:  # anew each time
        results = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    else:
        device = torch.cuda.get_device_name() + (" quick" if args.quick else "")
        results = RESULTS / re.sub(r"\W+", "-", device)
    if args.part is not None:
        run_part(args.part, scale, results)
        return
    names = args.parts or list(parts(scale))
    unknown = [name for name in names if name not in parts(scale)]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(parts(scale))}")
    options = [f"--{option}" for option in ("quick", "rehearsal") if getattr(args, option)]
    failed = list(run_all(names, scale, results, options))
    if failed:
        raise SystemExit(f"{len(failed)} of {len(names)} parts failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
