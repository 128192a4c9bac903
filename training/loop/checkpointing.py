"""Finds out whether a run has enough memory to train without gradient checkpointing.

With gradient checkpointing, a layer keeps only its input for the backward pass, and computes its other tensors again,
which takes time.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn


logger = logging.getLogger(__name__)

GIB = 2**30
# The largest share of the memory that a pass may take. The rest is for fragmentation.
USABLE_SHARE = 0.9


def choose_checkpointing(
    model: nn.Module,
    passes: Sequence[Callable[[], None]],
    device: torch.device,
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Let no layer be checkpointed if all processes have enough memory without. Every process must call this.

    Args:
        model: The model, whose layers are checkpointed.
        passes: Run a forward and backward pass over each of the largest batches.
        device: This process's device.
        reduce: Sums a tensor over all processes.

    Returns:
        Whether layers are checkpointed from here on.
    """
    limit = memory_limit(device)
    if limit is None:
        return True

    peaks = []
    for run_pass in passes:
        measure = partial(measure_peak, run_pass, device)
        peaks.append(peak_without_checkpointing(model, measure))
    peak = max(peaks)

    is_too_large = torch.tensor(peak > USABLE_SHARE * limit, dtype=torch.long)
    num_too_large = reduce(is_too_large)
    keeps_checkpointing = bool(num_too_large > 0)
    if not keeps_checkpointing:
        stop_checkpointing(model)
    logger.info(
        "gradient checkpointing: %s; without it a step would take %.1f GiB of this device's %.1f",
        keeps_checkpointing,
        peak / GIB,
        limit / GIB,
    )
    return keeps_checkpointing


def memory_limit(device: torch.device) -> int | None:
    """The bytes that this process can have on the device; `None` if that isn't known, as on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    held_by_this_process = torch.cuda.memory_reserved(device)
    return free + held_by_this_process


def measure_peak(run_pass: Callable[[], None], device: torch.device) -> int:
    """The most bytes that tensors take on a GPU while a pass runs, weights included."""
    run_pass()  # the first pass may compile layers, which takes memory of its own
    torch.cuda.reset_peak_memory_stats(device)
    run_pass()
    return torch.cuda.max_memory_allocated(device)


def peak_without_checkpointing(model: nn.Module, measure: Callable[[], int]) -> int:
    """The peak of a pass without checkpointing, extrapolated from passes in which almost all layers are checkpointed.

    For each stack of layers (the encoder's and the decoder's), a pass runs in which only the first layer isn't
    checkpointed. The first layer's backward pass comes last, so what the layer keeps is still in memory at the peak,
    and the peak grows by as much. Each layer of the stack is taken to add the same. The result is too high by one
    layer, since all tensors of the layer at the peak are in memory with checkpointing too.

    Args:
        model: The model, whose layers are checkpointed.
        measure: Runs a pass, and returns its peak in bytes.
    """
    peak_with = measure()
    peak_without = peak_with
    for layers in checkpointed_stacks(model):
        first_layer = layers[0]
        first_layer.gradient_checkpointing = False
        growth = measure() - peak_with
        first_layer.gradient_checkpointing = True
        peak_without += len(layers) * max(growth, 0)
    return peak_without


def checkpointed_stacks(model: nn.Module) -> list[list[Any]]:
    """The checkpointed layers of each stack, the encoder's and the decoder's, in the order in which they run."""
    stacks = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        layers = [layer for layer in module if getattr(layer, "gradient_checkpointing", False)]
        if layers:
            stacks.append(layers)
    return stacks


def stop_checkpointing(model: nn.Module) -> None:
    """Let no layer be checkpointed any more."""
    for layers in checkpointed_stacks(model):
        for layer in layers:
            layer.gradient_checkpointing = False
