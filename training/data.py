"""The data of a run: the checked rows of one or several sources, or a stream that is checked as it is read."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.measured import RowCheck, keep_good_rows, tokenize_rows
from conversations.tokens import RowTokenizer
from training.arguments import RunArguments, SourceArguments, TrainingConfig
from training.run import Source


logger = logging.getLogger(__name__)

# Lists the bad rows that were skipped.
BAD_ROWS_FILE = "bad_rows.jsonl"
# Number of rows, the good ones with their tokens, and a fingerprint of their content.
Checked = tuple[int, Dataset, str]


def read_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset | IterableDataset, str, list[Source]]:
    """The rows with their tokens, a fingerprint that must be the same when a run is resumed, and what was taken from
    each source. For a stream the last is empty, and rows are checked when they are read.

    Raises:
        ValueError: as `load_rows` does, or if there is a bad row that is not to be left out; it names the entry.
    """
    sources, report_file = run_args.sources, Path(args.output_dir) / BAD_ROWS_FILE
    if args.process_index == 0 and not (run_args.dataset_streaming and args.resume_from_checkpoint):
        report_file.unlink(missing_ok=True)  # that of an earlier start: bad rows are listed again
    if run_args.dataset_streaming:
        (source,) = sources
        stream = load_rows(source.path, source.image_folder, source.name, source.split, streaming=True)
        return stream, stream_fingerprint(source.path, source.name, source.split), []
    checked = []
    for number, source in enumerate(sources, 1):
        with _naming("dataset_name" if run_args.datasets is None else f"datasets, entry {number}"):
            checked.append(_check(run_args, args, tokenize, report_file, source))
    seed = args.seed if args.data_seed is None else args.data_seed
    rows, fingerprint, drawn = mix(sources, checked, seed)
    if run_args.datasets is not None:
        for found in drawn:
            logger.info("%s: %d rows, %d good, %d drawn", found.path, found.rows, found.good_rows, found.drawn)
        logger.info("%d rows an epoch, drawn with seed %d", len(rows), seed)
    return rows, fingerprint, drawn


def read_held_out(run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer) -> Dataset | None:
    """The held-out rows with their tokens, if a run names some. Raises `ValueError` as `read_rows` does."""
    name, split = run_args.eval_dataset_name, run_args.dataset_test_split
    if name is None:
        return None
    if split == RunArguments.dataset_test_split and not has_splits(name):
        split = "train"
    config = run_args.dataset_config if name == run_args.dataset_name else None
    report_file = Path(args.output_dir) / "bad_eval_rows.jsonl"
    if args.process_index == 0:
        report_file.unlink(missing_ok=True)
    with _naming("eval_dataset_name"):
        source = SourceArguments(name, config, split, run_args.eval_image_folder)
        return _check(run_args, args, tokenize, report_file, source)[1]


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """A `with` block whose errors name a field."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{field}: {error}") from error


def _check(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer, report_file: Path, source: SourceArguments
) -> Checked:
    """The first process reads and checks the rows, the others take what it leaves in datasets' cache."""
    with args.main_process_first(desc="reading and checking the rows"):
        rows = load_rows(source.path, source.image_folder, source.name, source.split)
        assert isinstance(rows, Dataset)
        tokens = tokenize_rows(rows, RowCheck(tokenize, run_args.open_pictures), args.dataset_num_proc)
    writes = report_file if args.process_index == 0 else None
    return len(rows), *keep_good_rows(rows, tokens, run_args.bad_rows, writes)


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
    entries: Sequence[SourceArguments], checked: Sequence[Checked], seed: int
) -> tuple[Dataset, str, list[Source]]:
    """The rows of an epoch, a fingerprint of their content, and what was taken from each source.

    Raises:
        ValueError: if no row of a source is drawn.
    """
    parts, sources = [], []
    for place, (entry, (count, rows, fingerprint)) in enumerate(zip(entries, checked, strict=True)):
        drawn = draw(len(rows), entry.weight, (seed, place))
        if not len(drawn):
            raise ValueError(
                f"datasets, entry {place + 1} ({entry.path}): a weight of {entry.weight:g} draws none of its "
                f"{len(rows)} rows; raise it, or leave the entry out."
            )
        parts.append(rows if entry.weight == 1 else rows.select(drawn))
        sources.append(
            Source(entry.path, entry.name, entry.split, os.path.exists(entry.path), count, len(rows), entry.weight,
                   len(drawn), fingerprint)
        )  # fmt: skip
    if [entry.weight for entry in entries] == [1]:
        return parts[0], sources[0].fingerprint, sources
    fingerprint = hashlib.sha256(json.dumps([[s.fingerprint, s.weight] for s in sources]).encode()).hexdigest()
    return concatenate_datasets(parts), fingerprint, sources
