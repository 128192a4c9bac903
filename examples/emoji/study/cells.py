"""The plan of the study in docs/study.md: its blocks, their arms and seeds, and which runs are left.

A block asks a question. An arm is one way to make and train a model. A cell is one run: an arm of a block with a seed.
A processor is a kind of CPU or GPU.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


# The record of a run: one line of records.jsonl.
Record = dict[str, Any]
# Learning rate of the projector. Some arms give the projector's second layer another rate (`Arm.rate_power`).
PROJECTOR_RATE = 2e-4
# Learning rate of the norm behind the projector.
NORM_RATE = 1.2e-4


class Projector(StrEnum):
    """What an arm does with the shared projector, from which all arms of a seed start.

    T is the mean norm of text embeddings. A new projector gives image tokens with k times this norm. The shared
    projector has been scaled: its second layer was divided by k, so image tokens enter the decoder at T.
    """

    PLAIN = "plain"
    """Undo the scaling: multiply the second layer by k. Image tokens enter the decoder at k times T."""
    SCALED = "scaled"
    """Take the shared projector as it is. Image tokens enter the decoder at T."""
    NORM = "norm"
    """Undo the scaling, and add the paper's LayerNorm behind the projector. Image tokens enter the decoder at T."""


@dataclass(frozen=True)
class Arm:
    """One way to make and train a model."""

    name: str
    projector: Projector
    rate_power: int = 0
    """The learning rate of the projector's second layer is `PROJECTOR_RATE` times k to this power."""


@dataclass(frozen=True)
class Block:
    """A question with the runs that answer it: every arm with every seed."""

    number: int
    question: str
    arms: tuple[Arm, ...]
    steps: int
    """Number of training steps of each run."""
    seeds: Sequence[int]


@dataclass(frozen=True)
class Cell:
    """One run: an arm of a block with a seed."""

    block: Block
    arm: Arm
    seed: int


NOTHING = Arm("nothing", Projector.PLAIN)
SCALED = Arm("scaled once", Projector.SCALED)
LAYER_NORM = Arm("LayerNorm at T", Projector.NORM)
# Image tokens enter the decoder at T, as in `SCALED`. The second layer's weights and its learning rate are both 1/k of
# those in `NOTHING`. So relative to its weights, the layer learns as fast as in `NOTHING`.
SCALED_SLOWLY = Arm("scaled once, second layer at 1/k of the rate", Projector.SCALED, rate_power=-1)
# Image tokens enter the decoder at k times T, as in `NOTHING`. The second layer's weights and its learning rate are
# both k times those in `SCALED`. So relative to its weights, the layer learns as fast as in `SCALED`.
NOTHING_FAST = Arm("nothing, second layer at k times the rate", Projector.PLAIN, rate_power=1)

BLOCK_2 = Block(
    number=2,
    question="What to do: nothing, scale once, or a norm?",
    arms=(NOTHING, SCALED, LAYER_NORM),
    steps=293,  # as many as the recipe of the emoji example takes
    seeds=range(101, 109),
)
# Further seeds of block 2. They run only if the first seeds leave open whether `SCALED` or `LAYER_NORM` is better.
BLOCK_2_MORE_SEEDS = range(109, 117)
BLOCK_1 = Block(
    number=1,
    question="Is it the norm of image tokens, or the second layer's relative rate?",
    arms=(SCALED, SCALED_SLOWLY, NOTHING_FAST, NOTHING),
    steps=146,  # half of block 2's steps
    seeds=range(201, 209),
)
# The blocks in the order in which they run.
BLOCKS = (BLOCK_2, BLOCK_1)


def arms_done(block: Block, records: Sequence[Record]) -> dict[tuple[int, str], set[str]]:
    """The names of a block's arms that have a record, by seed and processor."""
    done: dict[tuple[int, str], set[str]] = defaultdict(set)
    for record in records:
        if record["block"] == block.number:
            done[record["seed"], record["processor"]].add(record["arm"])
    return done


def complete_seeds(block: Block, records: Sequence[Record]) -> dict[int, str]:
    """The complete seeds of a block, each with the name of the processor that completed it first.

    A seed is complete if one processor has run every arm with it.

    Args:
        block: The block.
        records: Records in the order in which the runs ended.
    """
    processor_by_seed: dict[int, str] = {}
    done: dict[tuple[int, str], set[str]] = defaultdict(set)
    for record in records:
        seed = record["seed"]
        processor = record["processor"]
        if record["block"] != block.number or seed not in block.seeds:
            continue
        done[seed, processor].add(record["arm"])
        is_complete = len(done[seed, processor]) == len(block.arms)
        if is_complete and seed not in processor_by_seed:
            processor_by_seed[seed] = processor
    return processor_by_seed


def records_that_count(block: Block, records: Sequence[Record]) -> list[Record]:
    """The records from which a block's results are computed: those of the seeds and processors in `complete_seeds`."""
    processor_by_seed = complete_seeds(block, records)
    chosen = []
    for record in records:
        processor = processor_by_seed.get(record["seed"])  # None if the seed isn't complete
        if record["block"] == block.number and record["processor"] == processor:
            chosen.append(record)
    return chosen


def cells_left(block: Block, records: Sequence[Record], processor: str) -> list[Cell]:
    """The runs of a block that this processor has to do, in order.

    All arms of a seed must run on one processor. So this processor first finishes the seeds that it has begun, and
    then takes the seeds that no processor has begun. The seeds that only another processor has begun come last. With
    such a seed, this processor runs all arms, even the arms that the other processor has run.
    """
    done = arms_done(block, records)
    begun_anywhere = {seed for seed, _ in done}
    complete = complete_seeds(block, records)
    incomplete = [seed for seed in block.seeds if seed not in complete]

    begun_here = [seed for seed in incomplete if (seed, processor) in done]
    begun_nowhere = [seed for seed in incomplete if seed not in begun_anywhere]
    begun_elsewhere = [seed for seed in incomplete if seed in begun_anywhere and seed not in begun_here]

    cells = []
    for seed in [*begun_here, *begun_nowhere, *begun_elsewhere]:
        arms_done_here = done.get((seed, processor), set())
        for arm in block.arms:
            if arm.name not in arms_done_here:
                cells.append(Cell(block, arm, seed))
    return cells
