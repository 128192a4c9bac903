"""Deals the rows of a run into padded or packed batches, so that every epoch has each row once.

In a pass, each process computes the gradient of one batch. An optimizer step adds up the gradients of
`accumulation_steps` passes.

A packed batch is one packed row, in which several rows of the data are joined without padding. The joined rows are
called samples. Packing doesn't change which samples an optimizer step trains on. The packed rows of a step have nearly
the same length, so that no process waits for another.
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

from normllava.conversations.checked_rows import integer_column, row_lengths
from normllava.errors import UserError
from training.options.arguments import RunArguments, TrainingConfig


# Model types of decoders whose attention mask doesn't depend on `position_ids`. They would read a packed row as one
# long sample.
DECODERS_WITHOUT_SAMPLE_MASKS = ("biogpt", "bloom", "falcon", "mpt", "xglm")


class Batches(Sampler[list[int]]):
    """A data loader's `batch_sampler`: the batches of one process in an epoch, each a list of row numbers.

    All processes get the same number of batches. A process for which no rows are left gets an empty batch.

    Args:
        deal: Takes the number of an epoch, and returns the epoch's batches for all processes: the first batch of every
            process, then the second batch of every process, and so on. Every epoch must have the same number of
            batches.
        args: The arguments of training, which tell the number of this process and the number of processes.
    """

    def __init__(self, deal: Callable[[int], list[list[int]]], args: TrainingConfig) -> None:
        self._deal = deal
        self._process_index = args.process_index
        self._num_processes = args.world_size
        self._num_passes = math.ceil(len(deal(0)) / args.world_size)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch whose batches come next; the first epoch is 0."""
        self._epoch = epoch

    @override
    def __iter__(self) -> Iterator[list[int]]:
        all_batches = self._deal(self._epoch)
        for pass_index in range(self._num_passes):
            index = pass_index * self._num_processes + self._process_index
            if index < len(all_batches):
                yield all_batches[index]
            else:
                yield []

    def __len__(self) -> int:
        return self._num_passes


def deal_rows(
    run_args: RunArguments, args: TrainingConfig, rows: Dataset | IterableDataset, num_blank_tokens: int
) -> tuple[Batches | None, int]:
    """Deal checked rows into batches.

    Args:
        run_args: The arguments of the run, which tell the global batch size and the packed length.
        args: The arguments of training, which tell the batch size of a process, the seed, and the numbers of epochs
            and processes.
        rows: The checked rows, or a stream of rows.
        num_blank_tokens: Number of tokens of the blank picture that a batch without pictures gets.

    Returns:
        This process's batches (`None` for a stream, which makes its own), and the number of accumulation steps.

    Raises:
        UserError: if `rows` can't be dealt into batches of these sizes.
    """
    if run_args.packed_length is not None:
        return deal_packed(run_args, args, rows, num_blank_tokens)

    accumulation_steps = args.gradient_accumulation_steps
    if run_args.global_batch_size is not None:
        accumulation_steps, rest = divmod(
            run_args.global_batch_size, args.per_device_train_batch_size * args.world_size
        )
        assert rest == 0  # check_arguments has refused another number
    if isinstance(rows, IterableDataset):
        return None, accumulation_steps

    seed = data_seed(args)
    num_rows = len(rows)

    def deal(epoch: int) -> list[list[int]]:
        return padded_batches(num_rows, args.per_device_train_batch_size, args.world_size, seed + epoch)

    return Batches(deal, args), accumulation_steps


def data_seed(args: TrainingConfig) -> int:
    """The seed of the order of rows in the first epoch."""
    return args.seed if args.data_seed is None else args.data_seed


def deal_packed(
    run_args: RunArguments, args: TrainingConfig, rows: Dataset | IterableDataset, num_blank_tokens: int
) -> tuple[Batches, int]:
    """Deal checked rows into packed batches, with the arguments and results of [`deal_rows`]."""
    samples_per_step = run_args.global_batch_size
    packed_length = run_args.packed_length
    assert samples_per_step is not None  # check_arguments has refused packing without a global batch size
    assert packed_length is not None

    num_epochs = math.ceil(args.num_train_epochs)
    if args.max_steps > 0:  # then Trainer ignores num_train_epochs
        steps_per_epoch = math.ceil(len(rows) / samples_per_step)
        num_epochs = math.ceil(args.max_steps / steps_per_epoch)

    seed = data_seed(args)
    accumulation_steps = plan_packing(
        rows,
        num_blank_tokens,
        samples_per_step=samples_per_step,
        num_processes=args.world_size,
        seeds=range(seed, seed + num_epochs),
        packed_length=packed_length,
    )
    lengths = row_lengths(rows)

    def deal(epoch: int) -> list[list[int]]:
        return packed_batches(
            lengths,
            samples_per_step=samples_per_step,
            num_processes=args.world_size,
            accumulation_steps=accumulation_steps,
            seed=seed + epoch,
        )

    return Batches(deal, args), accumulation_steps


def deal_held_out(args: TrainingConfig, rows: Dataset, num_blank_tokens: int, packed_length: int | None) -> Batches:
    """This process's batches of held-out rows.

    The rows keep their order. Each batch has the same rows for any number of processes: at most
    `per_device_eval_batch_size`, and in a packed run at most as many as fit into a packed row.

    Args:
        args: The arguments of training.
        rows: The checked held-out rows.
        num_blank_tokens: Number of tokens of the blank picture that a packed row without pictures gets.
        packed_length: The most tokens that a packed row may have; `None` if rows are padded.

    Raises:
        UserError: if a row is too long for a packed row.
    """
    packed = PackedLengths(rows, num_blank_tokens)
    if packed_length is not None and packed.longest > packed_length:
        raise UserError(
            f"A held-out row has {packed.longest} tokens, more than packed_length {packed_length} (text alone gets a "
            f"blank picture of {num_blank_tokens}). Raise packed_length, or leave long rows out: max_length and "
            "bad_rows: skip."
        )

    batches: list[list[int]] = []
    for row in range(len(rows)):
        batch = [*batches[-1], row] if batches else [row]
        is_full = len(batch) > args.per_device_eval_batch_size
        if packed_length is not None and packed.length(batch) > packed_length:
            is_full = True
        if is_full or not batches:
            batches.append([row])
        else:
            batches[-1] = batch
    return Batches(lambda epoch: batches, args)


class PackedLengths:
    """How long packed rows are.

    Args:
        rows: The samples, with columns `length` (number of tokens) and `num_tiles`.
        num_blank_tokens: Number of tokens of the blank picture that a packed row without pictures gets.

    Attributes:
        longest: The number of tokens of the longest sample alone in a packed row.
    """

    def __init__(self, rows: Dataset, num_blank_tokens: int) -> None:
        self._lengths = row_lengths(rows)
        self._has_images = integer_column(rows, "num_tiles") > 0
        self._num_blank_tokens = num_blank_tokens
        self.longest = int(np.where(self._has_images, self._lengths, self._lengths + num_blank_tokens).max())

    def length(self, samples: list[int]) -> int:
        """The number of tokens of a packed row of these samples."""
        length = int(self._lengths[samples].sum())
        return length if self._has_images[samples].any() else length + self._num_blank_tokens


def padded_batches(num_rows: int, batch_size: int, num_processes: int, seed: int) -> list[list[int]]:
    """The padded batches of an epoch, as lists of row numbers, in the order that [`Batches`] takes.

    If the last rows are too few for a full batch in each process, they are split evenly over the processes.
    """
    order = random_order(num_rows, seed)
    rows_per_pass = batch_size * num_processes
    pass_borders = range(rows_per_pass, num_rows, rows_per_pass)

    batches = []
    for rows_of_pass in np.split(order, pass_borders):
        for rows in np.array_split(rows_of_pass, num_processes):
            batches.append(rows.tolist())
    return batches


def packed_batches(
    lengths: np.ndarray, samples_per_step: int, num_processes: int, accumulation_steps: int, seed: int
) -> list[list[int]]:
    """The packed rows of an epoch, each a list of sample numbers, in the order that [`Batches`] takes.

    Args:
        lengths: Number of tokens of each sample, integers `(num_samples,)`.
        samples_per_step: Number of samples in an optimizer step over all processes.
        num_processes: Number of processes.
        accumulation_steps: Number of packed rows of a process in an optimizer step; the last step may have fewer.
        seed: The seed of the order of samples in this epoch.
    """
    order = random_order(len(lengths), seed)
    step_borders = range(samples_per_step, len(order), samples_per_step)

    packed_rows = []
    for samples in np.split(order, step_borders):
        # In an incomplete last step, each pass has a sample for at least one process. In its last pass, some processes
        # may have none.
        num_passes = min(accumulation_steps, math.ceil(len(samples) / num_processes))

        lengths_of_step = lengths[samples].tolist()
        for indices in partition_samples(lengths_of_step, num_rows=num_passes * num_processes):
            packed_rows.append(samples[indices].tolist())
    return packed_rows


def random_order(count: int, seed: int) -> np.ndarray:
    """The permutation of `range(count)` that torch draws with this seed, int64 `(count,)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator).numpy()


def partition_samples(lengths: list[int], num_rows: int) -> list[list[int]]:
    """Deal the samples of a step into `num_rows` packed rows of nearly the same length.

    The longest sample is dealt first. Each sample goes to the row that is the shortest at that moment.

    Args:
        lengths: Number of tokens of each sample.
        num_rows: Number of packed rows.

    Returns:
        The indices into `lengths` of each row's samples, in rising order. The longest row comes first.
    """
    packed_rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0, row) for row in range(num_rows)]  # pairs of a row's length and number, the shortest row first
    longest_first = sorted(range(len(lengths)), key=lambda sample: lengths[sample], reverse=True)
    for sample in longest_first:
        length, row = heapq.heappop(heap)
        packed_rows[row].append(sample)
        heapq.heappush(heap, (length + lengths[sample], row))

    def total_length(samples: list[int]) -> int:
        return sum(lengths[sample] for sample in samples)

    packed_rows.sort(key=total_length, reverse=True)
    return [sorted(samples) for samples in packed_rows]


def plan_packing(
    rows: Dataset,
    num_blank_tokens: int,
    samples_per_step: int,
    num_processes: int,
    seeds: Sequence[int],
    packed_length: int,
) -> int:
    """The smallest number of accumulation steps with which no packed row of a run is too long.

    Args:
        rows: The samples, with columns `length` (number of tokens) and `num_tiles`.
        num_blank_tokens: Number of tokens of the blank picture that a packed row without pictures gets.
        samples_per_step: Number of samples in an optimizer step over all processes.
        num_processes: Number of processes.
        seeds: The seed of each epoch of the run.
        packed_length: The most tokens that a packed row may have.

    Raises:
        UserError: if with any number of accumulation steps a packed row is too long.
    """
    lengths = row_lengths(rows)
    packed = PackedLengths(rows, num_blank_tokens)

    def all_rows_fit(accumulation_steps: int) -> bool:
        for seed in seeds:
            packed_rows = packed_batches(lengths, samples_per_step, num_processes, accumulation_steps, seed)
            if not all(packed.length(samples) <= packed_length for samples in packed_rows):
                return False
        return True

    if packed.longest <= packed_length:
        most_steps = samples_per_step // num_processes  # each packed row needs at least one sample
        # With fewer, the rows of an epoch couldn't hold all of its tokens.
        num_steps = math.ceil(len(lengths) / samples_per_step)
        least_steps = math.ceil(lengths.sum() / (num_steps * num_processes * packed_length))
        for accumulation_steps in range(least_steps, most_steps + 1):
            if all_rows_fit(accumulation_steps):
                return accumulation_steps
    raise UserError(
        f"The {samples_per_step} samples of a step can't be packed into rows of {packed_length} tokens on "
        f"{num_processes} processes; the longest has {packed.longest} (text alone gets a blank picture of "
        f"{num_blank_tokens}). Raise packed_length, change global_batch_size, or leave long rows out with max_length "
        "and bad_rows: skip."
    )


def mixes_samples(config: PreTrainedConfig) -> bool:
    """Whether a sample of a packed row influences other samples of the row in a decoder with this config.

    Convolutions and state spaces mix samples, and so does attention whose mask doesn't depend on `position_ids`.
    """
    layer_types = set(getattr(config, "layer_types", None) or ())  # older decoders don't list their layers
    other_layer_types = layer_types - {"full_attention", "sliding_attention"}
    has_state = MODEL_MAPPING[type(config)]._is_stateful
    lacks_sample_masks = config.model_type in DECODERS_WITHOUT_SAMPLE_MASKS
    return bool(other_layer_types) or has_state or lacks_sample_masks


def require_separate_samples(config: PreTrainedConfig) -> None:
    """Raises `UserError` if a decoder with this config can't have packed rows."""
    if mixes_samples(config):
        raise UserError(
            f"packed_length: the decoder ({config.model_type}) mixes the samples of a packed row, in layers that are "
            "not attention or by its mask. Remove packed_length, and give per_device_train_batch_size."
        )
