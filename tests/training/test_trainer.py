"""While a batch is copied to the device, Python goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from training.loop.trainer import NormLlavaTrainer


DEVICE = torch.device("meta")  # a device other than the CPU that every machine has


class CopyRecorder(TorchDispatchMode):
    """Records for each copy to another device whether Python waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default:
            self.waits.append(not kwargs.get("non_blocking", False))
        return function(*args, **kwargs)


@pytest.fixture
def trainer() -> NormLlavaTrainer:
    """A trainer that has a device and nothing else."""
    trainer = NormLlavaTrainer.__new__(NormLlavaTrainer)
    trainer.args = SimpleNamespace(device=DEVICE)
    trainer.accelerator = SimpleNamespace(num_processes=1)
    return trainer


def test_a_batch_is_copied_without_waiting(trainer: NormLlavaTrainer) -> None:
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "pixel_values": torch.zeros(2, 3, 4, 4)}
    with CopyRecorder() as copies:
        copied = trainer._prepare_input(batch)
    assert copies.waits == [False, False]
    assert all(tensor.device == DEVICE for tensor in copied.values())


def test_the_number_of_supervised_tokens_is_copied_without_waiting(trainer: NormLlavaTrainer) -> None:
    batches = [{"labels": torch.zeros(2, 8, dtype=torch.long)}] * 3
    with CopyRecorder() as copies:
        num_supervised = trainer._get_num_items_in_batch(batches, DEVICE)
    assert copies.waits == [False]
    assert num_supervised.device == DEVICE
