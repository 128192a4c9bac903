"""The study's file of records, `records.jsonl`: a line for each run, and a last one that says why the study ended."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple


RECORDS = Path(__file__).with_name("records.jsonl")

# A run's line.
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


class Study(NamedTuple):
    """What the file of records holds: the runs, and why the study ended when it did."""

    runs: list[Record]
    end: str


def read_study() -> Study:
    """Read the file of records."""
    *runs, last = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    return Study(runs, last["study_ended"])
