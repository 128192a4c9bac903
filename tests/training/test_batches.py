"""Padded batches: an epoch has every row once, for any number of processes, in the order of torch's sampler."""

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
@pytest.mark.parametrize("num_rows", [30, 9, 2])
def test_every_row_is_seen_once(num_processes: int, batch_size: int, num_rows: int) -> None:
    def deal(epoch: int) -> list[list[int]]:
        return padded_batches(num_rows, batch_size, num_processes, 42 + epoch)

    samplers = []
    for rank in range(num_processes):
        process: Any = SimpleNamespace(world_size=num_processes, process_index=rank)
        samplers.append(Batches(deal, process))

    orders = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches_of_processes = [list(sampler) for sampler in samplers]
        for batches in batches_of_processes:
            assert len(batches) == len(samplers[0])  # so that no process waits for another

        order = []
        for batches_of_pass in zip(*batches_of_processes, strict=True):
            sizes = [len(batch) for batch in batches_of_pass]
            assert max(sizes) <= batch_size
            assert max(sizes) - min(sizes) <= 1
            for batch in batches_of_pass:
                order += batch
        assert sorted(order) == list(range(num_rows))
        orders.append(order)

    if num_rows > 2:  # two rows can have the same order in two epochs
        assert orders[0] != orders[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_takes_the_batches_of_an_epoch(num_workers: int) -> None:
    def load(batches: Batches) -> DataLoader:
        return DataLoader(list(range(10)), batch_sampler=batches, num_workers=num_workers, collate_fn=list)

    second_process: Any = SimpleNamespace(world_size=2, process_index=1)
    batches = Batches(lambda epoch: [[epoch], [1, 2], [3], []], second_process)
    loader = load(batches)
    assert len(loader) == 2
    assert list(loader) == [[1, 2], []]

    first_process: Any = SimpleNamespace(world_size=2, process_index=0)
    batches = Batches(lambda epoch: [[epoch], [1, 2], [3]], first_process)
    loader = load(batches)
    batches.set_epoch(7)
    assert list(loader) == [[7], [3]]


def test_one_process_gets_the_batches_of_torch() -> None:
    order = RandomSampler(range(30), generator=torch.Generator().manual_seed(45))
    expected = list(BatchSampler(order, 4, drop_last=False))
    assert padded_batches(30, 4, 1, 45) == expected


def test_the_accumulation_steps_follow_from_the_global_batch() -> None:
    lengths = (37 * np.arange(30)) % 23 + 2  # 377 tokens in all, which fill two packed rows of 200
    rows = Dataset.from_dict({"length": lengths, "num_tiles": [1] * 30})
    args = TrainingConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=2)
    padded = {"global_batch_size": 6}
    packed = {"global_batch_size": 30, "packed_length": 200}
    for fields, expected in ((padded, 3), (packed, 2)):
        run_args = RunArguments(dataset_name="", stage="align", **fields)
        args.data_seed = None
        batches, accumulation_steps = deal_rows(run_args, args, rows, blank=4)
        assert batches is not None
        assert accumulation_steps == expected
        first_epoch = list(batches)
        assert sorted(row for batch in first_epoch for row in batch) == list(range(30))

        # Another epoch and another seed give other batches.
        batches.set_epoch(1)
        assert list(batches) != first_epoch
        args.data_seed = 7
        other_batches, _ = deal_rows(run_args, args, rows, blank=4)
        assert other_batches is not None
        assert list(other_batches) != first_epoch
    with pytest.raises(ValueError, match="global_batch_size 5 is not a multiple of per_device_train_batch_size 2"):
        deal_rows(RunArguments(dataset_name="", stage="align", global_batch_size=5), args, rows, blank=4)
