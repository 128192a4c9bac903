"""Padded batches: every row once an epoch, whoever shares the work, and an upstream that keeps its names."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from typing_extensions import override

from training.batches import Batches, PaddedBatches
from training.overrides import checks_overrides


LENGTHS = (37 * np.arange(30)) % 23 + 2


@pytest.mark.parametrize("strategy", ["random", "group_by_length", "sequential"])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("count", [30, 25, 9, 2])
def test_every_row_is_seen_once(strategy: str, num_processes: int, batch_size: int, count: int) -> None:
    deal = PaddedBatches(LENGTHS[:count], batch_size, num_processes, 42, strategy)
    samplers = [Batches(deal, num_processes, rank) for rank in range(num_processes)]
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
        deal = PaddedBatches(LENGTHS, 4, 1, 42, strategy, accumulation_steps=2)
        assert deal(3) == list(BatchSampler(order, 4, drop_last=False))


def test_a_method_that_upstream_has_renamed_is_noticed() -> None:
    with pytest.raises(ImportError, match=r"Watcher.on_step_over replaces a method that .*TrainerCallback no longer"):

        @checks_overrides
        class Watcher(TrainerCallback):
            @override
            def on_step_over(self) -> None: ...
