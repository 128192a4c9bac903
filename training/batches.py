"""Which rows make a batch, padded or packed: every row once an epoch, and packing changes speed, not training.

Every optimizer step sees the rows that it would see unpacked, `samples_per_step` of them in a shuffled order. They are
packed into one row per process and accumulation step, all of nearly the same length, so that no process waits for
another and there is no padding.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers.trainer_pt_utils import BatchRebalanceSampler, get_length_grouped_indices
from typing_extensions import override

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
        num_processes, process_index: Number of processes, and this one's index.
    """

    def __init__(self, deal: Callable[[int], list[list[int]]], num_processes: int, process_index: int) -> None:
        super().__init__([], num_processes, num_processes, 1, rank=process_index, drop_last=False)
        self.deal = deal
        self._num_passes = -(-len(deal(0)) // num_processes)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        batches = self.deal(self.epoch)
        for number in range(self.rank, self._num_passes * self.dp_size, self.dp_size):
            yield batches[number] if number < len(batches) else []

    @override
    def __len__(self) -> int:
        return self._num_passes


@dataclass(frozen=True)
class PaddedBatches:
    """Deals the rows of an epoch into padded batches; to the seed the epoch is added.

    `strategy` is `train_sampling_strategy`: `"random"`, `"group_by_length"` or `"sequential"`.
    """

    lengths: np.ndarray
    """Tokens of each row, integers [rows]."""
    batch_size: int
    num_processes: int
    seed: int
    strategy: str = "random"
    accumulation_steps: int = 1

    def order(self, epoch: int) -> np.ndarray:
        """All rows in the order of an epoch, the same on every process: int64 [rows]."""
        if self.strategy == "sequential":
            return np.arange(len(self.lengths))
        if self.strategy == "random":
            return shuffled(len(self.lengths), self.seed + epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        batch = self.batch_size * self.accumulation_steps
        return np.array(get_length_grouped_indices(self.lengths.tolist(), batch, generator=generator))

    def __call__(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, for all processes in turn. An incomplete last pass is split evenly."""
        order, batches = self.order(epoch), []
        per_pass = self.batch_size * self.num_processes
        for start in range(0, len(order), per_pass):
            batches += [part.tolist() for part in np.array_split(order[start : start + per_pass], self.num_processes)]
        return batches


@dataclass(frozen=True)
class RowSizes:
    """Tokens and pictures of each row, integers [rows]: what they take in a packed row."""

    lengths: np.ndarray
    num_images: np.ndarray
    blank: int
    """Tokens of the blank picture that a packed row without pictures gets."""

    @classmethod
    def of(cls, rows: Dataset, blank: int) -> "RowSizes":
        """The sizes of checked rows."""
        return cls(row_lengths(rows), row_lengths(rows, "num_images"), blank)

    def packed(self, members: Sequence[int] | np.ndarray) -> int:
        """Tokens of a packed row."""
        return int(self.lengths[members].sum()) + self.blank * (not self.num_images[members].any())

    def check_longest(self, packed_length: int, name: str) -> None:
        """Raises `ValueError`, with what the rows are called, if one alone is longer than a packed row."""
        longest = int((self.lengths + self.blank * (self.num_images == 0)).max())
        if longest > packed_length:
            raise ValueError(
                f"The longest {name} has {longest} tokens, a packed row {packed_length}: raise it, or set "
                "max_length and leave longer ones out with bad_rows: skip. (Text alone gets a blank picture of "
                f"{self.blank} tokens.)"
            )


def partition(lengths: list[int], num_rows: int) -> list[list[int]]:
    """Deal samples, at least `num_rows`, into rows: the longest sample first and always to the shortest row.

    Returns:
        The sample numbers of each row in rising order, the longest row first; none is empty.
    """
    rows: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(num_rows)]
    for sample in sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample)):
        total, number, members = heapq.heappop(rows)
        members.append(sample)
        heapq.heappush(rows, (total + lengths[sample], number, members))
    return [sorted(members) for _, _, members in sorted(rows, key=lambda row: (-row[0], row[1]))]


def fill(sizes: RowSizes, packed_length: int) -> list[list[int]]:
    """Rows in their order, as many in a packed row as fit. Raises `ValueError` if one alone doesn't."""
    sizes.check_longest(packed_length, "row of eval_dataset_name")
    packs: list[list[int]] = [[]]
    for row in range(len(sizes.lengths)):
        if sizes.packed([*packs[-1], row]) > packed_length:
            packs.append([])
        packs[-1].append(row)
    return packs


def require_separate_samples(config: PreTrainedConfig) -> None:
    """Raises `ValueError` for a decoder that mixes a packed row's samples, as convolutions and state spaces do."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others or MODEL_MAPPING[type(config)]._is_stateful or config.model_type in MASKED_AS_ONE:
        raise ValueError(
            f"packed_length: the decoder ({config.model_type}) mixes the samples of a packed row, in layers that are "
            "not attention or by its mask. Remove packed_length, and give per_device_train_batch_size."
        )


@dataclass(frozen=True)
class PackedBatches:
    """Deals the rows of an epoch into packed rows; to the seed the epoch is added."""

    sizes: RowSizes
    samples_per_step: int
    """Rows of an optimizer step over all processes."""
    num_processes: int
    accumulation_steps: int
    """Packed rows of a process in an optimizer step."""
    seed: int

    def steps(self, epoch: int) -> list[np.ndarray]:
        """The rows of each step of an epoch. A last step with fewer rows than processes is merged into the one
        before."""
        order = shuffled(len(self.sizes.lengths), self.seed + epoch)
        steps = [order[start : start + self.samples_per_step] for start in range(0, len(order), self.samples_per_step)]
        if len(steps) > 1 and len(steps[-1]) < self.num_processes:
            steps[-2:] = [np.concatenate(steps[-2:])]
        return steps

    def __call__(self, epoch: int) -> list[list[int]]:
        """The packed rows of an epoch, for all processes in turn: those of an accumulation step are adjacent."""
        batches = []
        for step in self.steps(epoch):
            passes = min(self.accumulation_steps, len(step) // self.num_processes)
            rows = partition(self.sizes.lengths[step].tolist(), passes * self.num_processes)
            batches += [step[row].tolist() for row in rows]
        return batches


def plan_packing(
    sizes: RowSizes, samples_per_step: int, num_processes: int, seed: int, num_epochs: int, packed_length: int
) -> PackedBatches:
    """The packing with the fewest accumulation steps for which no row is longer than `packed_length`.

    Raises:
        ValueError: if there are too few rows, or one alone is longer.
    """
    count = min(samples_per_step, len(sizes.lengths))
    if count < num_processes:
        raise ValueError(f"{count} samples a step can't be shared by {num_processes} processes.")
    sizes.check_longest(packed_length, "sample")
    for steps in range(1, samples_per_step // num_processes + 1):
        deal = PackedBatches(sizes, samples_per_step, num_processes, steps, seed)
        if all(sizes.packed(row) <= packed_length for epoch in range(num_epochs) for row in deal(epoch)):
            return deal
    raise ValueError(
        f"No number of accumulation steps fits the last samples of an epoch into rows of {packed_length} tokens: "
        "raise packed_length or change global_batch_size."
    )


def deal_rows(
    run_args: RunArguments, args: TrainingConfig, rows: Dataset | IterableDataset, blank: int
) -> tuple[Batches | None, int]:
    """This process's batches, `None` for a stream, and the accumulation steps of an optimizer step.

    Args:
        run_args, args: The arguments.
        rows: Checked rows, or a stream.
        blank: Tokens of a blank picture.

    Raises:
        ValueError: if the global batch can't be met.
    """
    seed = args.seed if args.data_seed is None else args.data_seed
    samples, size, count = run_args.global_batch_size, args.per_device_train_batch_size, args.world_size
    if run_args.packed_length is not None and isinstance(rows, Dataset):
        assert samples is not None  # check_arguments
        epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:
            epochs = math.ceil(args.max_steps / max(len(rows) // samples, 1))
        packed = plan_packing(RowSizes.of(rows, blank), samples, count, seed, epochs, run_args.packed_length)
        return Batches(packed, count, args.process_index), packed.accumulation_steps
    if samples is not None and samples % (size * count):
        raise ValueError(
            f"global_batch_size {samples} is not a multiple of per_device_train_batch_size {size} times {count} "
            "processes; change one of them."
        )
    steps = args.gradient_accumulation_steps if samples is None else samples // (size * count)
    if isinstance(rows, IterableDataset):
        return None, steps
    padded = PaddedBatches(row_lengths(rows), size, count, seed, args.train_sampling_strategy, steps)
    return Batches(padded, count, args.process_index), steps


def deal_held_out(run_args: RunArguments, args: TrainingConfig, rows: Dataset, blank: int) -> Batches:
    """This process's batches of held-out rows, packed if the run packs: the same ones for any number of processes."""
    size, count = args.per_device_eval_batch_size, len(rows)
    if run_args.packed_length is None:
        batches = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    else:
        batches = fill(RowSizes.of(rows, blank), run_args.packed_length)
    return Batches(lambda epoch: batches, args.world_size, args.process_index)
