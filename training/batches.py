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
from torch.utils.data import Sampler
from transformers import MODEL_MAPPING, PreTrainedConfig
from typing_extensions import override

from common.errors import UserError
from conversations.measured import row_lengths
from training.arguments import RunArguments, TrainingConfig


# Decoders whose mask doesn't depend on positions: a packed row is one sample to them.
MASKED_AS_ONE = ("biogpt", "bloom", "falcon", "mpt", "xglm")


class Batches(Sampler[list[int]]):
    """The batches of one process in an epoch, each a list of row numbers; an empty one if none are left for it.

    A data loader takes it as its `batch_sampler`.

    Args:
        deal: The batches of an epoch by its number, for all processes in turn; as many in every epoch.
        args: Name this process and how many there are.
    """

    def __init__(self, deal: Callable[[int], list[list[int]]], args: TrainingConfig) -> None:
        self._deal = deal
        self._process = args.process_index
        self._num_processes = args.world_size
        self._num_passes = math.ceil(len(deal(0)) / args.world_size)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, from 0."""
        self._epoch = epoch

    @override
    def __iter__(self) -> Iterator[list[int]]:
        batches = self._deal(self._epoch)
        for number_of_pass in range(self._num_passes):
            number = number_of_pass * self._num_processes + self._process
            yield batches[number] if number < len(batches) else []

    def __len__(self) -> int:
        return self._num_passes


def deal_rows(
    run_args: RunArguments, args: TrainingConfig, rows: Dataset | IterableDataset, blank: int
) -> tuple[Batches | None, int]:
    """Deal checked rows into batches.

    Args:
        run_args: Name the global batch and the packed length.
        args: Name the batch of a process, the seed, the epochs and the processes.
        rows: The rows, checked, or a stream of them.
        blank: Tokens of a blank picture.

    Returns:
        This process's batches, `None` for a stream, and the accumulation steps of an optimizer step.

    Raises:
        UserError: if the global batch can't be met.
    """
    if run_args.packed_length is not None:
        return deal_packed(run_args, args, rows, blank)

    accumulation_steps = args.gradient_accumulation_steps
    if run_args.global_batch_size is not None:
        accumulation_steps = count_passes(run_args.global_batch_size, args)
    if isinstance(rows, IterableDataset):
        return None, accumulation_steps

    seed = data_seed(args)
    num_rows = len(rows)

    def deal(epoch: int) -> list[list[int]]:
        return padded_batches(num_rows, args.per_device_train_batch_size, args.world_size, seed + epoch)

    return Batches(deal, args), accumulation_steps


def data_seed(args: TrainingConfig) -> int:
    """The seed of the first epoch's order."""
    return args.seed if args.data_seed is None else args.data_seed


def count_passes(global_batch_size: int, args: TrainingConfig) -> int:
    """The passes of each process that make a global batch of padded rows.

    Raises:
        UserError: if they don't.
    """
    per_pass = args.per_device_train_batch_size * args.world_size
    if global_batch_size % per_pass != 0:
        raise UserError(
            f"global_batch_size {global_batch_size} is not a multiple of per_device_train_batch_size "
            f"{args.per_device_train_batch_size} times {args.world_size} processes; change one of them."
        )
    return global_batch_size // per_pass


def deal_packed(
    run_args: RunArguments, args: TrainingConfig, rows: Dataset | IterableDataset, blank: int
) -> tuple[Batches, int]:
    """[`deal_rows`] of packed rows."""
    samples, packed_length = run_args.global_batch_size, run_args.packed_length
    assert samples is not None  # check_arguments
    assert packed_length is not None

    num_epochs = args.num_train_epochs
    if args.max_steps > 0:
        num_epochs = args.max_steps / math.ceil(len(rows) / samples)
    seed = data_seed(args)
    accumulation_steps = plan_packing(
        rows,
        blank,
        samples_per_step=samples,
        num_processes=args.world_size,
        seeds=range(seed, seed + math.ceil(num_epochs)),
        packed_length=packed_length,
    )
    lengths = row_lengths(rows)

    def deal(epoch: int) -> list[list[int]]:
        return packed_batches(
            lengths,
            samples_per_step=samples,
            num_processes=args.world_size,
            accumulation_steps=accumulation_steps,
            seed=seed + epoch,
        )

    return Batches(deal, args), accumulation_steps


def deal_held_out(args: TrainingConfig, num_rows: int) -> Batches:
    """This process's batches of held-out rows in their order: the same ones for any number of processes."""
    size = args.per_device_eval_batch_size
    batches = [list(range(start, min(start + size, num_rows))) for start in range(0, num_rows, size)]
    return Batches(lambda epoch: batches, args)


def padded_batches(num_rows: int, batch_size: int, num_processes: int, seed: int) -> list[list[int]]:
    """The padded batches of an epoch, for all processes in turn. An incomplete last pass is split evenly."""
    order = shuffled(num_rows, seed)
    per_pass = batch_size * num_processes
    batches = []
    for rows_of_pass in np.split(order, range(per_pass, num_rows, per_pass)):
        for rows in np.array_split(rows_of_pass, num_processes):
            batches.append(rows.tolist())
    return batches


def packed_batches(
    lengths: np.ndarray, samples_per_step: int, num_processes: int, accumulation_steps: int, seed: int
) -> list[list[int]]:
    """The packed rows of an epoch, for all processes in turn: those of an accumulation step are adjacent.

    Args:
        lengths: Tokens of each sample, integers `(num_samples,)`.
        samples_per_step: Samples of an optimizer step over all processes.
        num_processes: Processes that share them.
        accumulation_steps: Packed rows of a process in an optimizer step; the last step may have fewer.
        seed: The epoch's.
    """
    order = shuffled(len(lengths), seed)
    batches = []
    for samples in np.split(order, range(samples_per_step, len(order), samples_per_step)):
        num_passes = max(min(accumulation_steps, len(samples) // num_processes), 1)
        for row in partition(lengths[samples].tolist(), num_passes * num_processes):
            batches.append(samples[row].tolist())
    return batches


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of `range(count)`, torch's own for this seed: int64 `(count,)`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()


def partition(lengths: list[int], num_rows: int) -> list[list[int]]:
    """Deal samples into rows: the longest sample first and always to the shortest row.

    Returns:
        The sample numbers of each row in rising order, the longest row first.
    """
    longest_first = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
    rows: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(num_rows)]
    for sample in longest_first:
        length, number, members = heapq.heappop(rows)
        members.append(sample)
        heapq.heappush(rows, (length + lengths[sample], number, members))

    rows.sort(key=lambda row: (-row[0], row[1]))
    return [sorted(members) for _, _, members in rows]


def plan_packing(
    rows: Dataset, blank: int, samples_per_step: int, num_processes: int, seeds: Sequence[int], packed_length: int
) -> int:
    """The fewest accumulation steps for which no packed row is too long.

    Args:
        rows: The samples, with columns `length` and `num_images`.
        blank: Tokens of the blank picture that a packed row of text alone gets.
        samples_per_step: Samples of an optimizer step over all processes.
        num_processes: Processes that share them.
        seeds: Those of the run's epochs.
        packed_length: Tokens of a packed row at most.

    Raises:
        UserError: if there are none.
    """
    lengths = row_lengths(rows)
    has_images = row_lengths(rows, "num_images") > 0

    def length_of_row(samples: list[int]) -> int:
        length = lengths[samples].sum()
        if not has_images[samples].any():
            length += blank
        return length

    longest = int(np.where(has_images, lengths, lengths + blank).max())
    most_steps = samples_per_step // num_processes
    if longest > packed_length:
        most_steps = 0

    for steps in range(1, most_steps + 1):
        epochs = (packed_batches(lengths, samples_per_step, num_processes, steps, seed) for seed in seeds)
        if all(length_of_row(row) <= packed_length for epoch in epochs for row in epoch):
            return steps
    raise UserError(
        f"The {samples_per_step} samples of a step can't be packed into rows of {packed_length} tokens on "
        f"{num_processes} processes; the longest has {longest} (text alone gets a blank picture of {blank}). Raise "
        "packed_length, change global_batch_size, or leave long rows out with max_length and bad_rows: skip."
    )


def require_separate_samples(config: PreTrainedConfig) -> None:
    """Refuse a decoder that mixes the samples of a packed row, as convolutions and state spaces do.

    Raises:
        UserError: if it does.
    """
    layer_types = set(getattr(config, "layer_types", None) or ())
    other_layers = layer_types - {"full_attention", "sliding_attention"}
    has_state = MODEL_MAPPING[type(config)]._is_stateful
    if other_layers or has_state or config.model_type in MASKED_AS_ONE:
        raise UserError(
            f"packed_length: the decoder ({config.model_type}) mixes the samples of a packed row, in layers that are "
            "not attention or by its mask. Remove packed_length, and give per_device_train_batch_size."
        )
