"""Batches of an epoch: how rows are dealt to processes, how a data loader reads batches, and how many make a step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from training.options.arguments import RunArguments, TrainingConfig
from training.rows.batches import Batches, deal_rows, padded_batches


def process_args(rank: int, num_processes: int) -> Any:
    """Stands for the `TrainingConfig` of a process, with the fields that `Batches` reads."""
    return SimpleNamespace(world_size=num_processes, process_index=rank)


@pytest.mark.parametrize("num_processes", [1, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("num_rows", [30, 9, 2])
def test_every_row_is_seen_once_in_an_epoch(num_processes: int, batch_size: int, num_rows: int) -> None:
    def deal_epoch(epoch: int) -> list[list[int]]:
        return padded_batches(num_rows, batch_size, num_processes, seed=42 + epoch)

    samplers = [Batches(deal_epoch, process_args(rank, num_processes)) for rank in range(num_processes)]

    orders = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches_of_processes = [list(sampler) for sampler in samplers]

        # zip is strict, because the other processes would wait for a process that has fewer batches.
        order = []
        for batches_at_once in zip(*batches_of_processes, strict=True):
            sizes = [len(batch) for batch in batches_at_once]
            assert max(sizes) <= batch_size
            assert max(sizes) - min(sizes) <= 1
            for batch in batches_at_once:
                order += batch
        assert sorted(order) == list(range(num_rows))
        orders.append(order)

    if num_rows > 2:  # two rows can come in the same order in both epochs
        assert orders[0] != orders[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_takes_the_batches_of_its_process_and_epoch(num_workers: int) -> None:
    def make_loader(batches: Batches) -> DataLoader:
        rows = list(range(10))  # each row is its own number
        return DataLoader(rows, batch_sampler=batches, num_workers=num_workers, collate_fn=list)

    # Batches go to two processes in turn. The first batch of an epoch has one row, whose number is the epoch's.
    second_process = process_args(rank=1, num_processes=2)
    batches = Batches(lambda epoch: [[epoch], [1, 2], [3], []], second_process)
    loader = make_loader(batches)
    assert len(loader) == 2
    assert list(loader) == [[1, 2], []]

    first_process = process_args(rank=0, num_processes=2)
    batches = Batches(lambda epoch: [[epoch], [1, 2], [3]], first_process)
    loader = make_loader(batches)
    batches.set_epoch(7)
    assert list(loader) == [[7], [3]]


def test_one_process_gets_the_batches_of_torchs_samplers() -> None:
    seed = 45
    sampler = RandomSampler(range(30), generator=torch.Generator().manual_seed(seed))
    expected = list(BatchSampler(sampler, batch_size=4, drop_last=False))
    assert padded_batches(num_rows=30, batch_size=4, num_processes=1, seed=seed) == expected


@pytest.mark.parametrize(
    ("fields", "expected_steps"),
    [
        # Three batches of 2 rows make a global batch of 6 rows.
        pytest.param({"global_batch_size": 6}, 3, id="padded"),
        # All 30 rows are one global batch. Their 377 tokens go into two packed rows of 200. A packed row is a batch.
        pytest.param({"global_batch_size": 30, "packed_length": 200}, 2, id="packed"),
    ],
)
def test_the_accumulation_steps_follow_from_the_global_batch(fields: dict[str, Any], expected_steps: int) -> None:
    lengths = (37 * np.arange(30)) % 23 + 2  # mixed lengths from 2 to 24 tokens, 377 in all
    rows = Dataset.from_dict({"length": lengths, "num_tiles": [1] * 30})
    args = TrainingConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=2)
    run_args = RunArguments(dataset_name="", stage="align", **fields)
    batches, accumulation_steps = deal_rows(run_args, args, rows, num_blank_tokens=4)  # a blank picture has 4 tokens
    assert accumulation_steps == expected_steps
    first_epoch = list(batches)
    row_numbers = [number for batch in first_epoch for number in batch]
    assert sorted(row_numbers) == list(range(30))

    # Another epoch and another seed give other batches.
    batches.set_epoch(1)
    assert list(batches) != first_epoch
    args.data_seed = 7
    other_batches, _ = deal_rows(run_args, args, rows, num_blank_tokens=4)
    assert list(other_batches) != first_epoch
