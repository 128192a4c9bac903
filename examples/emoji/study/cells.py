"""The plan of the study in docs/study.md: its arms, seeds and learning rates, and which seeds are left.

An arm is one way to make a model, and a run is an arm with a seed. A machine is a kind of CPU or GPU together with the
arithmetic that training takes on it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


# A run's line of records.jsonl.
Record = dict[str, Any]


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
    crashes = Counter((crash["seed"], crash["arm"]) for crash in log.crashes)
    whole = whole_seeds(log.runs)
    dropped = {seed for (seed, _), number in crashes.items() if number >= MOST_CRASHES and seed not in whole}
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
