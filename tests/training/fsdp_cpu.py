"""Runs training/sft.py with FSDP2 on CPUs.

FSDP2 works on CPUs, but accelerate uses DDP on CPUs, even if its config asks for FSDP2. So this script tells
accelerate that the processes run on GPUs.
"""

from typing import Any

from accelerate.state import DistributedType, PartialState


original_init = PartialState.__init__


def init_as_on_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
    """Initialize accelerate's state, with several GPUs in place of several CPUs."""
    original_init(self, *args, **kwargs)
    if self.distributed_type is DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = init_as_on_gpus  # type: ignore[method-assign]

if __name__ == "__main__":
    from training.sft import main

    main()
