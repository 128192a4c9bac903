"""Rehearses the largest batches of the first epoch, so that a run that needs too much memory fails early."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from normllava.conversations.checked_rows import integer_column, row_lengths
from normllava.errors import UserError
from training.rows.batches import Batches


@contextmanager
def rehearsal(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """A block for forward and backward passes that take as much memory as in training, and change no weight.

    If the optimizer has no states yet, they are allocated before the block, where possible, and freed after the block.
    Then all gradients are freed too, and the random state is restored.

    Raises:
        UserError: if the device has too little memory.
    """
    has_states = bool(optimizer.state)  # as in a resumed run
    # bitsandbytes' paged states, which move between GPU and CPU, would not be freed after the block.
    is_paged = getattr(optimizer, "is_paged", False)
    # With the optimizers of these libraries, a step at a learning rate of 0 keeps the weights. The states of other
    # optimizers are left out of the rehearsal.
    is_known = type(optimizer).__module__.startswith(("torch.optim", "bitsandbytes"))
    allocates = is_known and not is_paged and not has_states

    if allocates:
        try:
            allocate_states(optimizer)
        except torch.OutOfMemoryError as error:
            raise UserError(
                "The weights, their gradients and the optimizer's states do not fit into memory, whatever the batch: "
                "take optim: adamw_bnb_8bit on one GPU, several GPUs with training/accelerate/fsdp2.yaml, or stage "
                f"adapt ({error})"
            ) from error

    cuda_devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda_devices):
            yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The largest batch does not fit into memory: lower packed_length or per_device_train_batch_size, or set "
            f"gradient_checkpointing: true ({error})"
        ) from error

    model.zero_grad()
    if allocates:
        optimizer.state.clear()


def allocate_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer allocate its states by a step that changes no weight: learning rates and gradients are 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)

    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def largest_batches(batches: Batches, rows: Dataset, is_padded: bool) -> list[list[int]]:
    """The row numbers of two batches of an epoch: the batch with the most tokens, and the batch with the most tiles.

    Args:
        batches: The batches of the epoch.
        rows: The measured rows.
        is_padded: Whether each row of a batch is padded to the length of the batch's longest row.
    """
    most_tokens = largest_batch(batches, row_lengths(rows), is_padded)
    most_tiles = largest_batch(batches, integer_column(rows, "num_tiles"), is_padded=False)
    return [most_tokens, most_tiles]


def largest_batch(batches: Batches, sizes: np.ndarray, is_padded: bool) -> list[int]:
    """The row numbers of the largest batch of an epoch.

    Args:
        batches: The batches of the epoch.
        sizes: The size of each row, such as its number of tokens, integers `(num_rows,)`.
        is_padded: Whether each row of a batch is padded to the size of the batch's largest row.
    """

    def size_of_batch(rows: list[int]) -> int:
        if is_padded:
            largest_row = sizes[rows].max(initial=0)  # 0 for a batch without rows
            return len(rows) * largest_row
        return sizes[rows].sum()

    return max(batches, key=size_of_batch)
