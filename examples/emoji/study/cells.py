"""What the study runs: its blocks, their arms and seeds, and which runs are left."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


Record = dict[str, Any]
# Learning rate of the projector in every arm. An arm with a `rate_power` has another rate for the second layer.
PROJECTOR_RATE = 2e-4
# Learning rate of the norm behind the projector.
NORM_RATE = 1.2e-4


class Projector(StrEnum):
    """How an arm turns the seed's shared projector into its own.

    The shared projector is scaled, so that image tokens enter the decoder at the text's norm T. `k` is the number that
    this scale divided the second layer by.
    """

    PLAIN = "plain"
    """The second layer is multiplied by k, as in a plain Llava: image tokens enter at k times the text's norm."""
    SCALED = "scaled"
    """The shared projector as it is: image tokens enter at the text's norm."""
    NORM = "norm"
    """The plain projector with a LayerNorm with GWC behind it, whose gain starts at the text's norm."""


@dataclass(frozen=True)
class Arm:
    """One way of starting and training a model."""

    name: str
    projector: Projector
    rate_power: int = 0
    """The second layer's learning rate is `PROJECTOR_RATE` times k to this power."""


@dataclass(frozen=True)
class Block:
    """A question with the runs that answer it."""

    number: int
    question: str
    arms: tuple[Arm, ...]
    steps: int
    seeds: Sequence[int]


@dataclass(frozen=True)
class Cell:
    """One run of the study: an arm of a block with a seed."""

    block: Block
    arm: Arm
    seed: int


NOTHING = Arm("nothing", Projector.PLAIN)
SCALED = Arm("scaled once", Projector.SCALED)
LAYER_NORM = Arm("LayerNorm at T", Projector.NORM)
# Image tokens enter at the text's norm, as in `SCALED`. Relative to its weights, the second layer learns as fast as in
# `NOTHING`.
SCALED_SLOWLY = Arm("scaled once, second layer at 1/k of the rate", Projector.SCALED, rate_power=-1)
# Image tokens enter at k times the text's norm, as in `NOTHING`. Relative to its weights, the second layer learns as
# fast as in `SCALED`.
NOTHING_FAST = Arm("nothing, second layer at k times the rate", Projector.PLAIN, rate_power=1)

BLOCK_2 = Block(
    number=2,
    question="What to do: nothing, scale once, or a norm?",
    arms=(NOTHING, SCALED, LAYER_NORM),
    steps=293,
    seeds=range(101, 109),
)
# Block 2's seeds for a second look. They run only if the first look leaves open whether `SCALED` or `LAYER_NORM` is
# better.
BLOCK_2_MORE_SEEDS = range(109, 117)
BLOCK_1 = Block(
    number=1,
    question="Is it the norm of image tokens, or the second layer's relative rate?",
    arms=(SCALED, SCALED_SLOWLY, NOTHING_FAST, NOTHING),
    steps=146,
    seeds=range(201, 209),
)
# The blocks in the order in which they run.
BLOCKS = (BLOCK_2, BLOCK_1)


def arms_done(block: Block, records: Sequence[Record]) -> dict[tuple[int, str], set[str]]:
    """For each seed and processor of a block: the names of the arms that have a record."""
    done: dict[tuple[int, str], set[str]] = defaultdict(set)
    for record in records:
        if record["block"] == block.number:
            done[record["seed"], record["processor"]].add(record["arm"])
    return done


def complete_seeds(block: Block, records: Sequence[Record]) -> dict[int, str]:
    """The seeds of a block that have run every arm on one processor, and that processor by seed.

    A seed may have run every arm on two processors. Then the processor that finished first is returned.

    Args:
        block: The block.
        records: Records in the order in which the runs ended.
    """
    complete: dict[int, str] = {}
    done: dict[tuple[int, str], set[str]] = defaultdict(set)
    for record in records:
        if record["block"] != block.number or record["seed"] not in block.seeds:
            continue
        arms = done[record["seed"], record["processor"]]
        arms.add(record["arm"])
        if len(arms) == len(block.arms):
            complete.setdefault(record["seed"], record["processor"])
    return complete


def records_that_count(block: Block, records: Sequence[Record]) -> list[Record]:
    """The records of a block that its results are computed from.

    These are the records of `complete_seeds`, each from the processor that ran every arm of its seed.
    """
    processor_by_seed = complete_seeds(block, records)
    chosen = []
    for record in records:
        if record["block"] == block.number and record["processor"] == processor_by_seed.get(record["seed"]):
            chosen.append(record)
    return chosen


def cells_left(block: Block, records: Sequence[Record], processor: str) -> list[Cell]:
    """The runs of a block that this processor has to do, in order.

    All arms of a seed must run on one processor. So this processor first finishes the seeds that it began, then runs
    the seeds that no processor has begun. Last come the seeds that another processor began: here all of their arms
    run again.
    """
    done = arms_done(block, records)
    begun_anywhere = {seed for seed, _ in done}
    complete = complete_seeds(block, records)
    unfinished = [seed for seed in block.seeds if seed not in complete]

    begun_here = [seed for seed in unfinished if (seed, processor) in done]
    untouched = [seed for seed in unfinished if seed not in begun_anywhere]
    begun_elsewhere = [seed for seed in unfinished if seed in begun_anywhere and seed not in begun_here]

    cells = []
    for seed in [*begun_here, *untouched, *begun_elsewhere]:
        arms_done_here = done.get((seed, processor), set())
        for arm in block.arms:
            if arm.name not in arms_done_here:
                cells.append(Cell(block, arm, seed))
    return cells
