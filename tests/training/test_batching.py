"""Padded batches: every row once an epoch, whoever shares the work, and an upstream that keeps its names."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from training.batching import PaddedBatchSampler


LENGTHS = (37 * np.arange(30)) % 23 + 2


@pytest.mark.parametrize("strategy", ["random", "group_by_length", "sequential"])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("count", [30, 29, 25, 9, 2])
def test_every_row_is_seen_once(strategy: str, num_processes: int, batch_size: int, count: int) -> None:
    samplers = [
        PaddedBatchSampler(LENGTHS[:count], batch_size, num_processes, rank, 42, strategy)
        for rank in range(num_processes)
    ]
    epochs = []
    for epoch in range(2):
        dealt = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            dealt.append(list(sampler))
            assert len(dealt[-1]) == len(sampler)  # as many passes for each, so that nobody waits
        for batches in zip(*dealt, strict=True):
            sizes = [len(batch) for batch in batches]
            assert max(sizes) <= batch_size
            assert max(sizes) - min(sizes) <= 1
        seen = [row for batches in zip(*dealt, strict=True) for batch in batches for row in batch]
        assert sorted(seen) == list(range(count))
        epochs.append(seen)
    assert (epochs[0] == epochs[1]) == (strategy == "sequential" or count == 2)


def test_one_process_gets_the_batches_of_torch_and_transformers() -> None:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(42 + 3)

    orders = {
        "random": RandomSampler(LENGTHS, generator=seeded()),
        "group_by_length": LengthGroupedSampler(8, lengths=LENGTHS.tolist(), generator=seeded()),
        "sequential": SequentialSampler(LENGTHS),
    }
    for strategy, order in orders.items():
        sampler = PaddedBatchSampler(LENGTHS, 4, 1, 0, 42, strategy, accumulation_steps=2)
        sampler.set_epoch(3)
        assert list(sampler) == list(BatchSampler(order, 4, drop_last=False))
