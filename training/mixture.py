"""Rows from several sources: how often an epoch sees those of each, and a record of what was drawn."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, concatenate_datasets

from training.run import Source


@dataclass(frozen=True)
class SourceArguments:
    """An entry of the recipe's `datasets`; `path`, `name` and `split` are named as in TRL's `DatasetConfig`.

    Attributes:
        path: A file or dataset, as for `dataset_name`.
        name: Its configuration, as for `dataset_config`.
        split: Its split.
        image_folder: Prefix of its image paths.
        weight: How often an epoch sees each of its rows: 2 is twice, 0.1 a tenth of them, 2.5 all twice and half of
            them once more.
    """

    path: str
    name: str | None = None
    split: str = "train"
    image_folder: str | None = None
    weight: float = 1.0


def draw(count: int, weight: float, seed: Sequence[int]) -> np.ndarray:
    """The rows that an epoch takes from a source with `count` rows: int64 [drawn].

    Each row is repeated as often as the integer part of the weight says. For the fraction, rows are drawn without
    replacement by the seed, so that all epochs, processes and resumed starts have the same rows.
    """
    times = math.floor(weight)
    share = round((weight - times) * count)
    drawn = np.sort(np.random.default_rng(seed).choice(count, share, replace=False))
    return np.concatenate([np.tile(np.arange(count), times), drawn])


def mix(
    entries: Sequence[SourceArguments],
    counts: Sequence[int],
    checked: Sequence[tuple[Dataset, str]],
    seed: int,
) -> tuple[Dataset, str, list[Source]]:
    """The rows of an epoch, a fingerprint of their content, and what was taken from each source.

    Args:
        entries: The sources.
        counts: Rows of each, bad ones included.
        checked: Good rows of each with their tokens, and a fingerprint of them.
        seed: Seed of the draw.

    Raises:
        ValueError: if no row of a source is drawn.
    """
    parts, sources = [], []
    for place, (entry, count, (rows, fingerprint)) in enumerate(zip(entries, counts, checked, strict=True)):
        drawn = draw(len(rows), entry.weight, (seed, place))
        if not len(drawn):
            raise ValueError(
                f"datasets, entry {place + 1} ({entry.path}): a weight of {entry.weight:g} draws none of its "
                f"{len(rows)} rows; raise it, or leave the entry out."
            )
        parts.append(rows if entry.weight == 1 else rows.select(drawn))
        is_local = os.path.exists(entry.path)
        sources.append(
            Source(entry.path, entry.name, entry.split, is_local, count, len(rows), entry.weight, len(drawn),
                   fingerprint)
        )  # fmt: skip
    if [entry.weight for entry in entries] == [1]:
        return *checked[0], sources
    fingerprint = hashlib.sha256(json.dumps([[s.fingerprint, s.weight] for s in sources]).encode()).hexdigest()
    return concatenate_datasets(parts), fingerprint, sources


def describe_sources(sources: Sequence[Source], seed: int) -> str:
    """The table that training prints of what is drawn."""
    lines = [f"{'rows':>12}{'good':>12}{'weight':>9}{'drawn':>12}  {'content':12}  datasets"]
    for source in sources:
        name = " ".join(filter(None, [source.path, source.name, source.split if source.split != "train" else None]))
        lines.append(
            f"{source.rows:>12,}{source.good_rows:>12,}{source.weight:>9g}{source.drawn:>12,}  "
            f"{source.fingerprint[:12]}  {name}"
        )
    return "\n".join([*lines, f"{sum(source.drawn for source in sources):,} rows an epoch, drawn with seed {seed}"])
