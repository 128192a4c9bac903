"""Runs training/sft.py with FSDP2 on CPUs: accelerate falls back to DDP there, as if a CPU could not shard."""

from typing import Any

from accelerate.state import DistributedType, PartialState


find_out = PartialState.__init__


def find_out_as_on_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
    find_out(self, *args, **kwargs)
    if self.distributed_type is DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = find_out_as_on_gpus  # type: ignore[method-assign]

if __name__ == "__main__":
    from training.sft import main

    main()
