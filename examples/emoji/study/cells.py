"""What the study runs: its blocks, their arms and seeds, and which runs are left."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


Record = dict[str, Any]
# Learning rate of the projector in every arm. Its second layer has another where an arm says so.
PROJECTOR_RATE = 2e-4
NORM_RATE = 1.2e-4


class Projector(StrEnum):
    """How an arm turns the seed's shared projector into its own."""

    PLAIN = "plain"
    """As a plain Llava's: image tokens enter with k times the text's norm."""
    SCALED = "scaled"
    """The second layer is divided by k once, so that image tokens enter at the text's norm."""
    NORM = "norm"
    """The plain projector with a LayerNorm behind it, its gain started at the text's norm, with GWC."""


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
    """One run."""

    block: Block
    arm: Arm
    seed: int


NOTHING = Arm("nothing", Projector.PLAIN)
SCALED = Arm("scaled once", Projector.SCALED)
LAYER_NORM = Arm("LayerNorm at T", Projector.NORM)
# Image tokens enter at the text's norm in both, and relative to its weights the second layer learns as fast as when
# nothing is done.
SCALED_SLOWLY = Arm("scaled once, second layer at 1/k of the rate", Projector.SCALED, rate_power=-1)
# Image tokens enter as when nothing is done, and the second layer learns as fast as when it is scaled once.
NOTHING_FAST = Arm("nothing, second layer at k times the rate", Projector.PLAIN, rate_power=1)

WHAT_TO_DO = Block(
    number=2,
    question="What to do: nothing, scale once, or a norm?",
    arms=(NOTHING, SCALED, LAYER_NORM),
    steps=293,
    seeds=range(101, 109),
)
# Run only if the first look at block 2 leaves "scaled once" less "LayerNorm at T" unclear.
MORE_SEEDS = range(109, 117)
NORM_OR_RATE = Block(
    number=1,
    question="Is it the norm of image tokens, or the second layer's relative rate?",
    arms=(SCALED, SCALED_SLOWLY, NOTHING_FAST, NOTHING),
    steps=146,
    seeds=range(201, 209),
)
# In the order in which they are run.
BLOCKS = (WHAT_TO_DO, NORM_OR_RATE)


def arms_done(block: Block, records: Sequence[Record]) -> dict[tuple[int, str], set[str]]:
    """Names of a block's arms that have a record, by seed and processor."""
    done: dict[tuple[int, str], set[str]] = defaultdict(set)
    for record in records:
        if record["block"] == block.number:
            done[record["seed"], record["processor"]].add(record["arm"])
    return done


def complete_seeds(block: Block, records: Sequence[Record]) -> dict[int, str]:
    """The processor by seed of a block's seeds whose arms have all run on it; of several, the one that was done first.

    `records` are in the order in which runs were done.
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


def counted(block: Block, records: Sequence[Record]) -> list[Record]:
    """A block's records that count: those of seeds whose arms have all run, on the processor on which they have."""
    complete = complete_seeds(block, records)
    return [
        record
        for record in records
        if record["block"] == block.number and complete.get(record["seed"]) == record["processor"]
    ]


def cells_left(block: Block, records: Sequence[Record], processor: str) -> list[Cell]:
    """A block's runs that are missing, in order, if they are run on this processor.

    All arms of a seed run on one processor. So seeds that were begun on this one come first, then those that nobody
    has begun, and last those that were begun on another, which begin anew here.
    """
    done = arms_done(block, records)
    begun = {seed for seed, _ in done}
    missing = [seed for seed in block.seeds if seed not in complete_seeds(block, records)]

    begun_here = [seed for seed in missing if (seed, processor) in done]
    untouched = [seed for seed in missing if seed not in begun]
    begun_elsewhere = [seed for seed in missing if seed in begun and seed not in begun_here]

    cells = []
    for seed in [*begun_here, *untouched, *begun_elsewhere]:
        for arm in block.arms:
            if arm.name not in done.get((seed, processor), set()):
                cells.append(Cell(block, arm, seed))
    return cells
