"""A run begins with a rehearsal of its largest batches, so that what doesn't fit into memory fails before step 1."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from common.errors import UserError
from training.batches import Batches


@contextmanager
def rehearsal(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """A block for forward and backward passes, in which the optimizer's states are allocated. It leaves no trace.

    Raises:
        UserError: if the device has too little memory.
    """
    # A resumed run has its states already. What other optimizers do in such a step is not known, and paged states are
    # never freed.
    is_known = type(optimizer).__module__.startswith(("torch.optim", "bitsandbytes"))
    is_paged = getattr(optimizer, "is_paged", False)
    allocates = is_known and not is_paged and not optimizer.state

    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if allocates:
                allocate_states(optimizer)
            yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The largest batch does not fit into memory: lower packed_length or per_device_train_batch_size, or set "
            f"gradient_checkpointing ({error})"
        ) from error

    model.zero_grad()
    if allocates:
        optimizer.state.clear()


def allocate_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer take a step that allocates its states, with rates and gradients of 0: no weight changes."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)

    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def largest_batch(batches: Batches, sizes: np.ndarray, is_padded: bool) -> list[int]:
    """The rows of the largest batch of an epoch.

    Args:
        batches: Those of the epoch.
        sizes: Size of each row, such as its number of tokens, integers `(num_rows,)`.
        is_padded: Whether the rows of a batch are padded to the longest.
    """

    def size(rows: list[int]) -> int:
        if is_padded:
            return len(rows) * sizes[rows].max(initial=0)
        return sizes[rows].sum()

    return max(batches, key=size)
