"""The arms with the shapes of Qwen2.5-7B and SigLIP-SO400M-patch14-384.

They are stage 1 ("align"), LoRA and QLoRA ("adapt"), and full training ("instruct") with half as many decoder layers.
A step takes 16 samples, around 15,000 tokens. The samples are packed into two rows of up to 8192 tokens, or padded to
equal length in two passes of 8 samples.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.models import large_config, write_folder
from benchmarks.gpu.results import Arm
from benchmarks.gpu.rows import LLAVA_LENGTHS, TINY_LENGTHS, write_rows
from benchmarks.gpu.trainers import Training, Workplace, training_arm


PACKED_LENGTH = 8192
# Number of measured steps, after the warm-up. Slow arms measure fewer.
MEASURED_STEPS = 5
SLOW_MEASURED_STEPS = 3
# Number of steps of the warm-up. With compiled layers an H200 compiled a second graph in the third step.
WARMUP = 2
COMPILED_WARMUP = 3


def packed_arms(device: torch.device, folder: Path) -> list[Arm]:
    """The arms of stage 1 and of LoRA, with all decoder layers."""
    workplace = make_workplace(device, folder, num_layers=28)

    varlen = packed_training(device, "adapt")
    compiled = with_compiled_layers(varlen)
    packed_by_mask = replace(varlen, attention="sdpa", cudnn=True)  # torch chooses sdpa's kernel, perhaps cuDNN's
    if device.type == "cuda":
        packed_by_mask = replace(packed_by_mask, steps=packed_by_mask.warmup + SLOW_MEASURED_STEPS)
    padded = replace(varlen, packed_length=None)
    padded_compiled = with_compiled_layers(padded)
    trl = replace(padded, trainer="TRL", attention="sdpa")
    trl_compiled = with_compiled_layers(trl)
    bare = replace(compiled, trainer="bare")

    # Each tuple has the name of an arm, its training, and the name of the arm that it is compared with. What is least
    # known comes first.
    named_trainings = [
        ("LoRA: TRL, padded", trl, None),
        ("LoRA: TRL, padded, compiled layers", trl_compiled, "LoRA: TRL, padded"),
        ("LoRA: packed, varlen, compiled", compiled, "LoRA: TRL, padded, compiled layers"),
        (
            "LoRA: TRL, padded, compiled layers, no checkpointing",
            replace(trl_compiled, checkpointing=False),
            "LoRA: TRL, padded, compiled layers",
        ),
        (
            "LoRA: packed, varlen, compiled, no checkpointing",
            replace(compiled, checkpointing=False),
            "LoRA: TRL, padded, compiled layers, no checkpointing",
        ),
        ("LoRA: TRL, padded, no checkpointing", replace(trl, checkpointing=False), "LoRA: TRL, padded"),
        ("LoRA: packed, varlen", varlen, "LoRA: TRL, padded"),
        ("LoRA: ours, padded", padded, "LoRA: TRL, padded"),
        ("LoRA: ours, padded, compiled", padded_compiled, "LoRA: TRL, padded, compiled layers"),
        (
            "stage 1: packed, varlen, compiled, no checkpointing",
            replace(compiled, stage="align", checkpointing=False),
            "stage 1: packed, varlen, compiled",
        ),
        ("stage 1: packed, varlen, compiled", replace(compiled, stage="align"), "stage 1: packed, varlen"),
        ("stage 1: packed, varlen", replace(varlen, stage="align"), "stage 1: packed by sdpa's mask"),
        ("LoRA: bare loop, compiled", bare, "LoRA: packed, varlen, compiled"),
        ("LoRA: packed by sdpa's mask", packed_by_mask, "LoRA: packed, varlen"),
        ("stage 1: packed by sdpa's mask", replace(packed_by_mask, stage="align"), None),
    ]
    return [
        training_arm(name, training, workplace, compared_with) for name, training, compared_with in named_trainings
    ]


def full_arms(device: torch.device, folder: Path) -> list[Arm]:
    """The arms of stage 2 in full, with 8-bit Adam and 14 layers. 28 layers don't fit on a card of 80 GB."""
    workplace = make_workplace(device, folder, num_layers=14)
    varlen = replace(packed_training(device, "instruct"), optimizer="adamw_bnb_8bit")
    compiled = with_compiled_layers(varlen)

    name = "full, 14 layers: packed, varlen"
    return [
        training_arm(name, varlen, workplace),
        training_arm(f"{name}, compiled", compiled, workplace, compared_with=name),
    ]


def quantized_arms(device: torch.device, folder: Path) -> list[Arm]:
    """The arms of QLoRA, with options of the recipe qlora.yaml and packed rows of up to 4096 tokens."""
    workplace = make_workplace(device, folder, num_layers=28)
    varlen = replace(
        packed_training(device, "adapt"),
        packed_length=4096,
        fields={"load_in_4bit": True, "clip_by_module": True, "norm_learning_rate": 1e-5},
    )
    if device.type == "cuda":
        varlen = replace(varlen, steps=varlen.warmup + SLOW_MEASURED_STEPS)
    compiled = with_compiled_layers(varlen)

    # With 4-bit weights compiling takes minutes, so the compiled arm comes last.
    name = "QLoRA: packed 4096, varlen"
    return [
        training_arm(name, varlen, workplace),
        training_arm(f"{name}, compiled", compiled, workplace, compared_with=name),
    ]


def packed_training(device: torch.device, stage: Literal["align", "instruct", "adapt"]) -> Training:
    """Training by our command with all its options for speed, except compiled layers.

    Samples are packed, attention is computed by sample, and workers of the data loader read the samples.
    """
    measured_steps = MEASURED_STEPS if device.type == "cuda" else 1
    return Training(
        trainer="ours",
        stage=stage,
        steps=WARMUP + measured_steps,
        warmup=WARMUP,
        packed_length=PACKED_LENGTH,
        attention="varlen",
        workers=True,
        cudnn=False,
    )


def with_compiled_layers(training: Training) -> Training:
    """The same training with compiled layers and a longer warm-up. It measures as many steps."""
    measured_steps = training.steps - training.warmup
    return replace(training, compiled=True, steps=COMPILED_WARMUP + measured_steps, warmup=COMPILED_WARMUP)


def make_workplace(device: torch.device, folder: Path, num_layers: int) -> Workplace:
    """Make the workplace that all arms share, and write the rows, the config and the processor into its folder."""
    on_gpu = device.type == "cuda"
    config = large_config(tiny=not on_gpu, num_layers=num_layers)
    workplace = Workplace(
        folder=folder,
        config=config,
        device=device,
        rows_per_step=16 if on_gpu else 4,
        rows_per_pass=8 if on_gpu else 2,
        num_workers=8 if on_gpu else 1,
        compile_backend="inductor" if on_gpu else "aot_eager",
    )
    write_folder(config, folder / "model")
    most_steps = COMPILED_WARMUP + MEASURED_STEPS + 1  # one is profiled
    num_rows = most_steps * workplace.rows_per_step
    lengths = LLAVA_LENGTHS if on_gpu else TINY_LENGTHS
    write_rows(folder, num_rows, config.vision_config.image_size, lengths)
    return workplace
