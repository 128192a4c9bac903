"""Which samples share a packed row, planned from their lengths: packing changes speed, not training.

Every optimizer step sees the samples that it would see unpacked: `samples_per_step` of them, in a shuffled order. They
are packed into one row per process and accumulation step, all of nearly the same length, so that no process waits for
another and there is no padding.
"""

import heapq
from collections.abc import Iterator

import numpy as np
from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers.trainer_pt_utils import BatchRebalanceSampler
from typing_extensions import override

from conversations.rows import Row
from training.batching import shuffled


# Decoders whose mask doesn't depend on positions: a packed row is one sample to them.
MASKED_AS_ONE = ("biogpt", "bloom", "falcon", "mpt", "xglm")


def partition(lengths: list[int], num_rows: int) -> list[list[int]]:
    """Deal samples into `num_rows` rows, the longest sample first and always to the shortest row.

    Args:
        lengths: Tokens of each sample; at least `num_rows` of them.
        num_rows: Number of rows; none stays empty.

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
    """Raises `ValueError` for a decoder that mixes the samples of a packed row, as convolutions and state spaces do.

    Args:
        config: The decoder's.
    """
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others or MODEL_MAPPING[type(config)]._is_stateful or config.model_type in MASKED_AS_ONE:
        raise ValueError(
            f"packed_length: the decoder ({config.model_type}) mixes the samples of a packed row, in layers that are "
            "not attention or by its mask. Remove packed_length, and give per_device_train_batch_size."
        )


def check_longest(lengths: list[int] | np.ndarray, packed_length: int, name: str) -> None:
    """Raises `ValueError`, with what the samples are called, if one is longer than a packed row."""
    if max(lengths) > packed_length:
        raise ValueError(
            f"The longest {name} has {max(lengths)} tokens, a packed row {packed_length}: raise packed_length, or set "
            "max_length to it and leave longer ones out with --bad_rows skip."
        )


def partition_fitting(lengths: list[int], packed_length: int) -> list[list[int]]:
    """Deal samples of at most `packed_length` tokens into the fewest rows of that length that `partition` finds."""
    for num_rows in range(-(-sum(lengths) // packed_length), len(lengths)):
        rows = partition(lengths, num_rows)
        if sum(lengths[member] for member in rows[0]) <= packed_length:
            return rows
    return partition(lengths, len(lengths))


# Trainer leaves this class of sampler unwrapped, since it distributes batches to processes itself.
class PackedBatchSampler(BatchRebalanceSampler):
    """Yields the packed rows of one process, each a list of sample indices.

    Args:
        lengths: Tokens of each sample, integers [samples].
        samples_per_step: Samples of an optimizer step over all processes.
        num_processes, process_index: Number of processes, and this one's index.
        accumulation_steps: Rows of a process in an optimizer step.
        seed: Seed of the shuffled order; the epoch is added to it.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        samples_per_step: int,
        num_processes: int,
        process_index: int,
        accumulation_steps: int,
        seed: int,
    ) -> None:
        super().__init__(
            [],
            samples_per_step,
            num_processes,
            accumulation_steps,
            seed=seed,
            rank=process_index,
            drop_last=False,
        )
        self.lengths = lengths
        self.samples_per_step = samples_per_step

    def steps(self) -> list[np.ndarray]:
        """The samples of each step of the epoch. A last step with fewer samples than processes is merged into the one
        before."""
        order = shuffled(len(self.lengths), self.seed + self.epoch)
        steps = [order[start : start + self.samples_per_step] for start in range(0, len(order), self.samples_per_step)]
        if len(steps) > 1 and len(steps[-1]) < self.dp_size:
            steps[-2:] = [np.concatenate(steps[-2:])]
        return steps

    def rows(self, step: np.ndarray) -> list[list[int]]:
        """The rows of a step for all processes: those of an accumulation step are adjacent."""
        accumulation_steps = min(self.grad_accum, len(step) // self.dp_size)
        rows = partition(self.lengths[step].tolist(), accumulation_steps * self.dp_size)
        return [step[row].tolist() for row in rows]

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps():
            yield from self.rows(step)[self.rank :: self.dp_size]

    @override
    def __len__(self) -> int:
        full, rest = divmod(len(self.lengths), self.samples_per_step)
        return full * self.grad_accum + min(self.grad_accum, rest // self.dp_size)

    def fits(self, packed_length: int) -> bool:
        """Whether no row of the epoch has more than `packed_length` tokens."""
        return all(self.lengths[self.rows(step)[0]].sum() <= packed_length for step in self.steps())


def plan_accumulation(
    lengths: np.ndarray, samples_per_step: int, num_processes: int, seed: int, num_epochs: int, packed_length: int
) -> int:
    """The fewest accumulation steps with which no row of the run is longer than `packed_length`.

    Raises:
        ValueError: if there are too few samples, or one is longer than a row.
    """
    if samples_per_step < num_processes or len(lengths) < num_processes:
        raise ValueError(
            f"{min(samples_per_step, len(lengths))} samples a step can't be shared by {num_processes} processes."
        )
    check_longest(lengths, packed_length, "sample")
    for accumulation_steps in range(1, samples_per_step // num_processes + 1):
        sampler = PackedBatchSampler(lengths, samples_per_step, num_processes, 0, accumulation_steps, seed)
        if all(sampler.set_epoch(epoch) or sampler.fits(packed_length) for epoch in range(num_epochs)):
            return accumulation_steps
    raise ValueError(
        f"No number of accumulation steps fits the last samples of an epoch into rows of {packed_length} tokens: "
        "raise packed_length or change global_batch_size."
    )


def pack_window(rows: list[Row], packed_length: int) -> list[list[Row]]:
    """Pack rows of a stream, with their `length`, into as few packed rows as hold them.

    Raises:
        ValueError: if one is longer than a packed row.
    """
    lengths = [row["length"] for row in rows]
    if max(lengths) > packed_length:
        longest = max(rows, key=lambda row: row["length"])
        raise ValueError(
            f"{longest['source']}: {longest['length']} tokens, more than packed_length {packed_length}; raise it, or "
            "set max_length to it and leave longer samples out with --bad_rows skip."
        )
    return [[rows[member] for member in pack] for pack in partition_fitting(lengths, packed_length)]
