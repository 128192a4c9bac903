"""Runs training/sft.py on CPUs, and stages what a test asks for in environment variables:

- `STAGED_MEMORY`: The bytes that the device of each process has, such as "2000,1100". Each pass takes 1000.
- `STAGED_NAN`: The number of the process whose loss in the second step is NaN.
- `STAGED_FSDP`: If it is set, training uses FSDP2.
- `STAGED_SHARDED`: If it is set, a pass fails if it leaves a gradient that isn't sharded, or isn't in float32.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from trl import SFTTrainer

from training.loop import checkpointing


RANK = int(os.environ["RANK"])
original_training_step = SFTTrainer.training_step


def say_1000_bytes(run_pass: Callable[[], None], device: torch.device) -> int:
    """Run a pass, and say that it took 1000 bytes."""
    run_pass()
    return 1000


def training_step_with_nan(self: SFTTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a forward and backward pass, and return the loss, or in the second step NaN."""
    loss = original_training_step(self, *args, **kwargs)
    completed_steps = self.state.global_step
    if completed_steps == 1:
        return loss * torch.nan
    return loss


def training_step_with_shards(self: SFTTrainer, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a forward and backward pass, and check the gradients that it leaves."""
    loss = original_training_step(self, model, *args, **kwargs)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter.grad, DTensor), name
            assert parameter.grad.dtype == torch.float32, name
    return loss


if "STAGED_MEMORY" in os.environ:
    limits = [int(number) for number in os.environ["STAGED_MEMORY"].split(",")]
    checkpointing.memory_limit = lambda device: limits[RANK]
    checkpointing.measure_peak = say_1000_bytes
if os.environ.get("STAGED_NAN") == str(RANK):
    SFTTrainer.training_step = training_step_with_nan  # type: ignore[method-assign]
if "STAGED_SHARDED" in os.environ:
    SFTTrainer.training_step = training_step_with_shards  # type: ignore[method-assign]
if "STAGED_FSDP" in os.environ:
    import fsdp_cpu  # noqa: F401 - patches accelerate when it is imported

if __name__ == "__main__":
    from training.sft import main

    main()
