"""Padded batches: every row once an epoch, whoever shares the work, and the order of torch's own sampler."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from training.arguments import RunArguments, TrainingConfig
from training.batches import Batches, deal_rows, padded_batches


@pytest.mark.parametrize("num_processes", [1, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("count", [30, 9, 2])
def test_every_row_is_seen_once(num_processes: int, batch_size: int, count: int) -> None:
    def deal(epoch: int) -> list[list[int]]:
        return padded_batches(count, batch_size, num_processes, 42 + epoch)

    samplers = []
    for rank in range(num_processes):
        process: Any = SimpleNamespace(world_size=num_processes, process_index=rank)
        samplers.append(Batches(deal, process))

    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        dealt = [list(sampler) for sampler in samplers]
        assert [len(batches) for batches in dealt] == [len(samplers[0])] * num_processes  # so that nobody waits
        for batches in zip(*dealt, strict=True):
            sizes = [len(batch) for batch in batches]
            assert max(sizes) <= batch_size
            assert max(sizes) - min(sizes) <= 1
        epochs.append([row for batches in zip(*dealt, strict=True) for batch in batches for row in batch])
        assert sorted(epochs[-1]) == list(range(count))
    assert epochs[0] != epochs[1] or count == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_takes_the_batches_of_an_epoch(num_workers: int) -> None:
    process: Any = SimpleNamespace(world_size=2, process_index=1)
    batches = Batches(lambda epoch: [[epoch], [1, 2], [3], []], process)
    loader = DataLoader(list(range(10)), batch_sampler=batches, num_workers=num_workers, collate_fn=list)
    assert len(loader) == 2
    assert list(loader) == [[1, 2], []]

    other: Any = SimpleNamespace(world_size=2, process_index=0)
    batches = Batches(lambda epoch: [[epoch], [1, 2], [3]], other)
    loader = DataLoader(list(range(10)), batch_sampler=batches, num_workers=num_workers, collate_fn=list)
    batches.set_epoch(7)
    assert list(loader) == [[7], [3]]


def test_one_process_gets_the_batches_of_torch() -> None:
    order = RandomSampler(range(30), generator=torch.Generator().manual_seed(45))
    assert padded_batches(30, 4, 1, 45) == list(BatchSampler(order, 4, drop_last=False))


def test_the_accumulation_steps_follow_from_the_global_batch() -> None:
    rows = Dataset.from_dict({"length": (37 * np.arange(30)) % 23 + 2, "num_images": [1] * 30})
    args = TrainingConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=2)
    padded = {"global_batch_size": 6}
    packed = {"global_batch_size": 30, "packed_length": 200}
    for fields, expected in ((padded, 3), (packed, 2)):
        batches, steps = deal_rows(RunArguments(dataset_name="", stage="align", **fields), args, rows, blank=4)
        assert batches is not None
        assert steps == expected
        assert sorted(row for batch in batches for row in batch) == list(range(30))
        first = list(batches)
        batches.set_epoch(1)
        args.data_seed = 7
        other, _ = deal_rows(RunArguments(dataset_name="", stage="align", **fields), args, rows, blank=4)
        assert first not in (list(batches), list(other))
        args.data_seed = None
    with pytest.raises(ValueError, match="global_batch_size 5 is not a multiple of per_device_train_batch_size 2"):
        deal_rows(RunArguments(dataset_name="", stage="align", global_batch_size=5), args, rows, blank=4)
