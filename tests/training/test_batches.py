"""Padded batches: every row once an epoch, whoever shares the work, and an upstream that keeps its names."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from training.arguments import RunArguments, TrainingConfig
from training.batches import Batches, PaddedBatches, deal_rows


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


def test_the_accumulation_steps_are_returned_and_nothing_is_changed() -> None:
    rows = Dataset.from_dict({"length": LENGTHS, "num_images": [1] * 30})
    args = TrainingConfig(output_dir="unused", use_cpu=True, bf16=False, per_device_train_batch_size=2)
    before = args.to_dict()
    for fields, expected in (({"global_batch_size": 6}, 3), ({"global_batch_size": 30, "packed_length": 200}, 2)):
        run_args = RunArguments(dataset_name="", stage="align", **fields)
        batches, steps = deal_rows(run_args, args, rows, blank=4)
        assert batches is not None
        assert steps == expected
        assert sorted(row for batch in batches for row in batch) == list(range(30))
    with pytest.raises(ValueError, match="global_batch_size 5 is not a multiple of per_device_train_batch_size 2"):
        deal_rows(RunArguments(dataset_name="", stage="align", global_batch_size=5), args, rows, blank=4)
    assert args.to_dict() == before
