"""The arms with the emoji example's model of 135 million weights: TRL's trainer, our command, and a bare loop.

Our command is measured with TRL's defaults, then with more and more options for speed. By itself it would choose
workers and checkpointing by the machine. An arm takes 20 steps of 64 rows. With so small a model, a large GPU mostly
waits for pictures and for kernels to start.
"""

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.models import small_config, write_folder
from benchmarks.gpu.results import Arm
from benchmarks.gpu.rows import EMOJI_LENGTHS, TINY_LENGTHS, write_rows
from benchmarks.gpu.trainers import Training, Workplace, training_arm


NUM_STEPS = 20
PACKED_LENGTH = 16384  # tokens; all rows of a step fit into one packed row


def arms(device: torch.device, folder: Path) -> list[Arm]:
    """Write what the arms read, and return the arms: stage 2 ("instruct"), then stage 1 ("align")."""
    on_gpu = device.type == "cuda"
    workplace = make_workplace(device, folder)

    num_steps = NUM_STEPS if on_gpu else 3
    warmup = 3 if on_gpu else 1
    trl = Training(trainer="TRL", stage="instruct", steps=num_steps, warmup=warmup)
    trl_with_our_options = replace(trl, cudnn=False, workers=True, checkpointing=False)
    ours = replace(trl, trainer="ours", attention="varlen")
    without_cudnn = replace(ours, cudnn=False)
    with_workers = replace(without_cudnn, workers=True)
    padded = replace(with_workers, checkpointing=False)
    padded_compiled = replace(padded, compiled=True)
    trl_compiled = replace(trl_with_our_options, compiled=True)
    packed = replace(padded, packed_length=PACKED_LENGTH)
    packed_by_mask = replace(packed, attention="sdpa")
    packed_compiled = replace(packed, compiled=True)
    bare = replace(packed_compiled, trainer="bare")

    # Each tuple has the name of an arm, its training, and the name of the arm that it is compared with. In names, "as
    # it is" means with TRL's default options, and "+" means options added to those of an earlier arm. What is least
    # known comes first.
    trl_name = "TRL, workers, no cuDNN, no checkpointing"
    named_trainings = [
        (f"stage 2: {trl_name}", trl_with_our_options, "stage 2: TRL as it is"),
        ("stage 2: TRL, compiled layers", trl_compiled, f"stage 2: {trl_name}"),
        ("stage 2: + no checkpointing", padded, f"stage 2: {trl_name}"),
        ("stage 2: padded, compiled", padded_compiled, "stage 2: TRL, compiled layers"),
        (f"stage 1: {trl_name}", replace(trl_with_our_options, stage="align"), None),
        ("stage 1: TRL, compiled layers", replace(trl_compiled, stage="align"), f"stage 1: {trl_name}"),
        ("stage 1: ours, padded", replace(padded, stage="align"), f"stage 1: {trl_name}"),
        ("stage 1: padded, compiled", replace(padded_compiled, stage="align"), "stage 1: TRL, compiled layers"),
        ("stage 1: + packed, varlen", replace(packed, stage="align"), "stage 1: ours, padded"),
        ("stage 1: + packed, varlen, compiled", replace(packed_compiled, stage="align"), "stage 1: padded, compiled"),
        ("stage 1: bare loop, compiled", replace(bare, stage="align"), "stage 1: + packed, varlen, compiled"),
        ("stage 2: + packed, varlen", packed, "stage 2: + no checkpointing"),
        ("stage 2: + packed, varlen, compiled", packed_compiled, "stage 2: padded, compiled"),
        ("stage 2: bare loop, compiled", bare, "stage 2: + packed, varlen, compiled"),
        ("stage 2: TRL as it is", trl, None),
        ("stage 2: ours, no workers, checkpointing", ours, "stage 2: TRL as it is"),
        ("stage 2: + no cuDNN", without_cudnn, "stage 2: ours, no workers, checkpointing"),
        ("stage 2: + workers", with_workers, "stage 2: + no cuDNN"),
        ("stage 2: packed by sdpa's mask", packed_by_mask, "stage 2: + no checkpointing"),
    ]
    return [
        training_arm(name, training, workplace, compared_with) for name, training, compared_with in named_trainings
    ]


def make_workplace(device: torch.device, folder: Path) -> Workplace:
    """Make the workplace that all arms share, and write the rows, the config and the processor into its folder."""
    on_gpu = device.type == "cuda"
    config = small_config(tiny=not on_gpu)
    workplace = Workplace(
        folder=folder,
        config=config,
        device=device,
        rows_per_step=64 if on_gpu else 4,
        rows_per_pass=64 if on_gpu else 4,
        num_workers=8 if on_gpu else 1,
        compile_backend="inductor" if on_gpu else "aot_eager",
    )
    write_folder(config, folder / "model")
    num_rows = (NUM_STEPS + 1) * workplace.rows_per_step  # a step more is profiled
    lengths = EMOJI_LENGTHS if on_gpu else TINY_LENGTHS
    write_rows(folder, num_rows, config.vision_config.image_size, lengths)
    return workplace
