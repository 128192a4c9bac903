"""Which rows make a batch, padded or packed: every row once an epoch, and packing changes speed, not training.

Every optimizer step sees the rows that it would see unpacked, `samples_per_step` of them in a shuffled order. They are
packed into one row per process and accumulation step, all of nearly the same length, so that no process waits for
another and there is no padding.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers.trainer_pt_utils import BatchRebalanceSampler
from typing_extensions import override

from common.errors import UserError
from conversations.measured import row_lengths
from training.arguments import RunArguments, TrainingConfig


# Decoders whose mask doesn't depend on positions: a packed row is one sample to them.
MASKED_AS_ONE = ("biogpt", "bloom", "falcon", "mpt", "xglm")


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of `range(count)`, accelerate's own for this seed: int64 [count]."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()


# Trainer leaves this class of sampler unwrapped, since it deals batches to processes itself; accelerate would repeat
# rows when there are too few left for all processes.
class Batches(BatchRebalanceSampler):
    """Yields the batches of one process, each a list of row numbers; an empty one if none are left for it.

    Args:
        deal: The batches of an epoch, for all processes in turn; as many in every epoch.
        args: Name this process and how many there are.
    """

    def __init__(self, deal: Callable[[int], list[list[int]]], args: TrainingConfig) -> None:
        super().__init__([], args.world_size, args.world_size, 1, rank=args.process_index, drop_last=False)
        self.deal = deal
        self._num_passes = -(-len(deal(0)) // args.world_size)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        batches = self.deal(self.epoch)
        for number in range(self.rank, self._num_passes * self.dp_size, self.dp_size):
            yield batches[number] if number < len(batches) else []

    @override
    def __len__(self) -> int:
        return self._num_passes


def padded_batches(num_rows: int, batch_size: int, num_processes: int, seed: int) -> list[list[int]]:
    """The padded batches of an epoch, for all processes in turn. An incomplete last pass is split evenly."""
    per_pass = batch_size * num_processes
    passes = np.split(shuffled(num_rows, seed), range(per_pass, num_rows, per_pass))
    return [part.tolist() for rows in passes for part in np.array_split(rows, num_processes)]


def partition(lengths: list[int], num_rows: int) -> list[list[int]]:
    """Deal samples into rows: the longest sample first and always to the shortest row.

    Returns:
        The sample numbers of each row in rising order, the longest row first.
    """
    rows: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(num_rows)]
    for sample in sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample)):
        total, number, members = heapq.heappop(rows)
        members.append(sample)
        heapq.heappush(rows, (total + lengths[sample], number, members))
    return [sorted(members) for _, _, members in sorted(rows, key=lambda row: (-row[0], row[1]))]


def require_separate_samples(config: PreTrainedConfig) -> None:
    """Raises `UserError` for a decoder that mixes a packed row's samples, as convolutions and state spaces do."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others or MODEL_MAPPING[type(config)]._is_stateful or config.model_type in MASKED_AS_ONE:
        raise UserError(
            f"packed_length: the decoder ({config.model_type}) mixes the samples of a packed row, in layers that are "
            "not attention or by its mask. Remove packed_length, and give per_device_train_batch_size."
        )


def packed_batches(
    lengths: np.ndarray, samples_per_step: int, num_processes: int, accumulation_steps: int, seed: int
) -> list[list[int]]:
    """The packed rows of an epoch, for all processes in turn: those of an accumulation step are adjacent.

    Args:
        lengths: Tokens of each row, integers [rows].
        samples_per_step: Rows of an optimizer step over all processes.
        num_processes: Processes that share them.
        accumulation_steps: Packed rows of a process in an optimizer step; the last step may have fewer.
        seed: The epoch's.
    """
    batches, order = [], shuffled(len(lengths), seed)
    for step in np.split(order, range(samples_per_step, len(order), samples_per_step)):
        passes = max(min(accumulation_steps, len(step) // num_processes), 1)
        batches += [step[row].tolist() for row in partition(lengths[step].tolist(), passes * num_processes)]
    return batches


def plan_packing(
    rows: Dataset, blank: int, samples_per_step: int, num_processes: int, seeds: Sequence[int], packed_length: int
) -> int:
    """The fewest accumulation steps for which no packed row is longer than `packed_length` in epochs with these seeds,
    counting the `blank` picture's tokens of text alone. Raises `UserError` if there are none."""
    lengths, num_images = row_lengths(rows), row_lengths(rows, "num_images")

    def fits(row: list[int]) -> bool:
        return lengths[row].sum() + blank * (not num_images[row].any()) <= packed_length

    longest = int((lengths + blank * (num_images == 0)).max())
    most = samples_per_step // num_processes if longest <= packed_length else 0
    for steps in range(1, most + 1):
        epochs = (packed_batches(lengths, samples_per_step, num_processes, steps, seed) for seed in seeds)
        if all(fits(row) for epoch in epochs for row in epoch):
            return steps
    raise UserError(
        f"The {samples_per_step} samples of a step can't be packed into rows of {packed_length} tokens on "
        f"{num_processes} processes; the longest has {longest} (text alone gets a blank picture of {blank}). Raise "
        "packed_length, change global_batch_size, or leave long rows out with max_length and bad_rows: skip."
    )


def deal_rows(
    run_args: RunArguments, args: TrainingConfig, rows: Dataset | IterableDataset, blank: int
) -> tuple[Batches | None, int]:
    """This process's batches of checked rows, `None` for a stream, and the accumulation steps of an optimizer step.
    `blank` is the number of tokens of a blank picture. Raises `UserError` if the global batch can't be met."""
    seed = args.seed if args.data_seed is None else args.data_seed
    samples, size, count = run_args.global_batch_size, args.per_device_train_batch_size, args.world_size
    if run_args.packed_length is not None:
        assert samples is not None  # check_arguments
        epochs = args.max_steps / math.ceil(len(rows) / samples) if args.max_steps > 0 else args.num_train_epochs
        seeds = range(seed, seed + math.ceil(epochs))
        steps = plan_packing(rows, blank, samples, count, seeds, run_args.packed_length)
        lengths = row_lengths(rows)
        return Batches(lambda epoch: packed_batches(lengths, samples, count, steps, seed + epoch), args), steps
    steps = args.gradient_accumulation_steps if samples is None else samples // (size * count)
    if samples is not None and samples != steps * size * count:
        raise UserError(
            f"global_batch_size {samples} is not a multiple of per_device_train_batch_size {size} times {count} "
            "processes; change one of them."
        )
    if isinstance(rows, IterableDataset):
        return None, steps
    return Batches(lambda epoch: padded_batches(len(rows), size, count, seed + epoch), args), steps


def deal_held_out(args: TrainingConfig, num_rows: int) -> Batches:
    """This process's batches of held-out rows in their order: the same ones for any number of processes."""
    size = args.per_device_eval_batch_size
    batches = [list(range(start, min(start + size, num_rows))) for start in range(0, num_rows, size)]
    return Batches(lambda epoch: batches, args)
