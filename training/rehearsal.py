"""A run begins with a rehearsal of its largest batches, so that what doesn't fit into memory fails before step 1."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from transformers.trainer_pt_utils import BatchRebalanceSampler

from common.errors import UserError


def largest_batch(sampler: BatchRebalanceSampler, sizes: np.ndarray, padded: bool) -> list[int]:
    """The rows of a sampler's largest batch in its epoch, by the rows' `sizes`, which padding makes equal."""
    return max(sampler, key=lambda batch: len(batch) * sizes[batch].max(initial=0) if padded else sizes[batch].sum())


@contextmanager
def rehearsal(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """A block for a forward and backward pass, in which the optimizer's states are allocated. It leaves no trace:
    states and gradients are dropped and the random state is restored, and the step that allocates has a rate of 0 and
    gradients of 0, which change no weight. Raises `MemoryError` if the device has too little memory."""
    rates = [group["lr"] for group in optimizer.param_groups]
    # A resumed run has its states; what other optimizers do in such a step is not known, and pages are never freed.
    is_known = type(optimizer).__module__.startswith(("torch.optim", "bitsandbytes"))
    allocates = is_known and not optimizer.state and not getattr(optimizer, "is_paged", False)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if allocates:
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
                    for parameter in group["params"]:
                        parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                optimizer.zero_grad()
            yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The largest batch does not fit into memory: lower packed_length or per_device_train_batch_size, or set "
            f"gradient_checkpointing ({error})"
        ) from error
    model.zero_grad()
    if allocates:
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
