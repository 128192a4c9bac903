"""Runs training/sft.py on CPUs with what a test stages: little memory, or a loss that isn't finite on one process.

Environment variables say what: `STAGED_MEMORY` is the bytes of each process's device, such as "2000,1100", where each
pass takes 1000; `STAGED_NAN` is the number of the process whose second loss is NaN. `STAGED_FSDP` turns FSDP2 on.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from trl import SFTTrainer

from training import trainer


RANK = int(os.environ["RANK"])
training_step = SFTTrainer.training_step


def measure(run_pass: Callable[[], None], device: torch.device) -> int:
    """Run a pass, and say that it took 1000 bytes."""
    run_pass()
    return 1000


def step_with_one_nan(self: SFTTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Take a pass, whose loss in the second step is NaN."""
    loss = training_step(self, *args, **kwargs)
    return loss * torch.nan if self.state.global_step == 1 else loss


if "STAGED_MEMORY" in os.environ:
    limits = [int(number) for number in os.environ["STAGED_MEMORY"].split(",")]
    trainer.memory_limit = lambda device: limits[RANK]
    trainer.measure_peak = measure
if os.environ.get("STAGED_NAN") == str(RANK):
    SFTTrainer.training_step = step_with_one_nan  # type: ignore[method-assign]
if "STAGED_FSDP" in os.environ:
    import fsdp_cpu  # noqa: F401 - patches accelerate when it is imported

if __name__ == "__main__":
    from training.sft import main

    main()
