"""The plan of the study in docs/study.md: its arms, seeds and learning rates, and which runs are left.

An arm is one way to make a model. A cell is one run: an arm with a seed. A machine is a kind of CPU or GPU together
with the arithmetic that training takes on it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


# A run's line of records.jsonl.
Record = dict[str, Any]
# Training steps of each run: as many as the recipe of the emoji example takes.
NUM_STEPS = 293


class Arm(StrEnum):
    """What an arm does with the shared projector, from which all arms of a seed start.

    T is the mean norm of text embeddings. A new projector gives image tokens with k times this norm. The shared
    projector has been scaled: its second layer was divided by k, so image tokens enter the decoder at T.
    """

    NOTHING = "nothing"
    """Undo the scaling: multiply the second layer by k. Image tokens enter the decoder at k times T."""
    SCALED = "scaled once"
    """Take the shared projector as it is. Image tokens enter the decoder at T."""
    LAYER_NORM = "LayerNorm at T"
    """Undo the scaling, and add the paper's LayerNorm behind the projector. Image tokens enter the decoder at T."""


class Rates(NamedTuple):
    """Learning rates of the projector and of the LayerNorm behind it."""

    projector: float
    norm: float


# The rate of the first study's scaled arm, which was found by a search.
FAST = Rates(projector=2e-4, norm=1.2e-4)
# The rate of the recipe.
SLOW = Rates(projector=5e-5, norm=3e-5)
FAST_SEEDS = range(101, 109)
SLOW_SEEDS = range(109, 117)
# However the study ends, each rate must have at least this many whole seeds.
FEWEST_SEEDS = 4
# A seed leaves the study, with all its arms, once one of its runs has crashed this many times.
MOST_CRASHES = 2


class Machine(NamedTuple):
    """A kind of CPU or GPU, and the arithmetic that training takes on it: "bfloat16" or "float32"."""

    processor: str
    arithmetic: str


class Cell(NamedTuple):
    """One run: an arm with a seed."""

    arm: Arm
    seed: int


@dataclass(frozen=True)
class Log:
    """What the file of records holds.

    Attributes:
        runs: The records of runs, in the order in which they ended.
        crashes: The lines of runs that crashed.
        end: Why the study ended before all seeds were whole; `None` if it hasn't.
    """

    runs: list[Record]
    crashes: list[Record]
    end: str | None


def all_seeds() -> list[int]:
    """The seeds in the order in which they run: 101, 109, 102, 110 and so on, so that both rates advance together."""
    seeds: list[int] = []
    for pair in zip(FAST_SEEDS, SLOW_SEEDS, strict=True):
        seeds += pair
    return seeds


def rates_of(seed: int) -> Rates:
    """The learning rates of a seed."""
    return FAST if seed in FAST_SEEDS else SLOW


def machine_of(line: Record) -> Machine:
    """The machine that a line of the file is from."""
    return Machine(line["processor"], line["arithmetic"])


def arms_done(runs: Sequence[Record]) -> dict[tuple[int, Machine], set[str]]:
    """The names of the arms that have a record, by seed and machine."""
    done: dict[tuple[int, Machine], set[str]] = defaultdict(set)
    for run in runs:
        done[run["seed"], machine_of(run)].add(run["arm"])
    return done


def whole_seeds(runs: Sequence[Record]) -> dict[int, Machine]:
    """The whole seeds, each with the machine that completed it first. A whole seed has every arm on one machine.

    Args:
        runs: Records in the order in which the runs ended.
    """
    machine_by_seed: dict[int, Machine] = {}
    done: dict[tuple[int, Machine], set[str]] = defaultdict(set)
    for run in runs:
        seed = run["seed"]
        machine = machine_of(run)
        done[seed, machine].add(run["arm"])
        if len(done[seed, machine]) == len(Arm) and seed not in machine_by_seed:
            machine_by_seed[seed] = machine
    return machine_by_seed


def dropped_seeds(log: Log) -> list[int]:
    """The seeds that have left the study, because one of their runs crashed `MOST_CRASHES` times."""
    crashes: dict[Cell, int] = defaultdict(int)
    for crash in log.crashes:
        crashes[Cell(Arm(crash["arm"]), crash["seed"])] += 1
    whole = whole_seeds(log.runs)
    dropped = {cell.seed for cell, number in crashes.items() if number >= MOST_CRASHES and cell.seed not in whole}
    return sorted(dropped)


def runs_that_count(runs: Sequence[Record]) -> list[Record]:
    """The records from which the results are computed: those of the seeds and machines in `whole_seeds`."""
    machine_by_seed = whole_seeds(runs)
    return [run for run in runs if machine_by_seed.get(run["seed"]) == machine_of(run)]


def seeds_left(log: Log) -> list[int]:
    """The seeds that are neither whole nor dropped, in the order in which they run."""
    done_with = {*whole_seeds(log.runs), *dropped_seeds(log)}
    return [seed for seed in all_seeds() if seed not in done_with]


def has_ended(log: Log) -> bool:
    """Whether results may be shown: no seed is left, or a line of the file says that the study ended, and why."""
    return log.end is not None or not seeds_left(log)


def cells_left(log: Log, machine: Machine) -> list[Cell]:
    """The runs that a machine has to do, in order.

    All arms of a seed must run on one machine. So this machine first finishes the seeds that it has begun, and then
    takes the seeds that no machine has begun. The seeds that only another machine has begun come last. With such a
    seed, this machine runs all arms, even the arms that the other machine has run.
    """
    done = arms_done(log.runs)
    begun_anywhere = {seed for seed, _ in done}
    left = seeds_left(log)

    begun_here = [seed for seed in left if (seed, machine) in done]
    begun_nowhere = [seed for seed in left if seed not in begun_anywhere]
    begun_elsewhere = [seed for seed in left if seed in begun_anywhere and seed not in begun_here]

    cells = []
    for seed in [*begun_here, *begun_nowhere, *begun_elsewhere]:
        arms_done_here = done.get((seed, machine), set())
        for arm in Arm:
            if arm not in arms_done_here:
                cells.append(Cell(arm, seed))
    return cells
