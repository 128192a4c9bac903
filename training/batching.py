"""Batches of padded rows, distributed to the processes so that every row is seen once per epoch."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler, get_length_grouped_indices
from typing_extensions import override


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of `range(count)`, the one of accelerate's own sampler for this seed: int64 [count]."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()


# Trainer leaves this class of sampler unwrapped, since it distributes batches to processes itself. accelerate would
# repeat rows when there are too few left for all processes.
class PaddedBatchSampler(BatchRebalanceSampler):
    """Yields the batches of one process, each a list of sample indices, empty if none are left for it.

    Args:
        lengths: Tokens of each sample, integers [samples].
        batch_size: Samples per batch; the last batch of a process may have fewer.
        num_processes, process_index: Number of processes, and this one's index.
        seed: Seed of the order; the epoch is added to it.
        strategy: `train_sampling_strategy`: `"random"`, `"group_by_length"` or `"sequential"`.
        accumulation_steps: Batches per process in an optimizer step; `"group_by_length"` uses it.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        num_processes: int,
        process_index: int,
        seed: int,
        strategy: str = "random",
        accumulation_steps: int = 1,
    ) -> None:
        super().__init__(
            [], batch_size * num_processes * accumulation_steps, num_processes, accumulation_steps,
            seed=seed, rank=process_index, drop_last=False,
        )  # fmt: skip
        self.lengths = lengths  # kept as an array: a list of a million takes 36 MB per process
        # Not named `batch_size`: accelerate would use it to fill up the last batch.
        self.rows_per_batch, self.strategy = batch_size, strategy

    def order(self) -> np.ndarray:
        """All samples in the order of the epoch, the same on every process: int64 [samples]."""
        if self.strategy == "sequential":
            return np.arange(len(self.lengths))
        if self.strategy == "random":
            return shuffled(len(self.lengths), self.seed + self.epoch)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        batch = self.rows_per_batch * self.grad_accum
        return np.array(get_length_grouped_indices(self.lengths.tolist(), batch, generator=generator))

    @override
    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        per_pass = self.rows_per_batch * self.dp_size
        for start in range(0, len(order), per_pass):
            samples = order[start : start + per_pass].tolist()
            # An incomplete last pass is split evenly.
            size, longer = divmod(len(samples), self.dp_size)
            begin = self.rank * size + min(self.rank, longer)
            yield samples[begin : begin + size + (self.rank < longer)]

    @override
    def __len__(self) -> int:
        return -(-len(self.lengths) // (self.rows_per_batch * self.dp_size))


class FixedBatchSampler(BatchRebalanceSampler):
    """Yields one process's share of the given batches; an empty one if none are left for it.

    Every process gets the same number of batches, since all must run a sharded model equally often.
    """

    def __init__(self, batches: Sequence[list[int]], num_processes: int, process_index: int) -> None:
        super().__init__([], num_processes, num_processes, 1, rank=process_index, drop_last=False)
        self.batches = batches

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.rank, len(self) * self.dp_size, self.dp_size):
            yield self.batches[number] if number < len(self.batches) else []

    @override
    def __len__(self) -> int:
        return -(-len(self.batches) // self.dp_size)
