"""The data of a run: the checked rows of one or several sources, or a stream that is checked as it is read."""

import hashlib
import json
import logging
import math
import os
from pathlib import Path

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.measured import RowCheck, keep_good_rows, tokenize_rows
from conversations.tokens import RowTokenizer
from training.arguments import RunArguments, SourceArguments, TrainingConfig
from training.run import Source


logger = logging.getLogger(__name__)

# Lists the bad rows that were skipped, below `output_dir`.
BAD_ROWS_FILE = "bad_rows.jsonl"


def read_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset | IterableDataset, str, list[Source]]:
    """The rows with their tokens, a fingerprint that must be the same when a run is resumed, and what an epoch takes
    from each source. For a stream the last is empty, and rows are checked when they are read.

    Raises `ValueError` as `load_rows` does, or if there is a bad row that is not to be left out.
    """
    if args.process_index == 0 and not (run_args.dataset_streaming and args.resume_from_checkpoint):
        Path(args.output_dir, BAD_ROWS_FILE).unlink(missing_ok=True)  # bad rows are listed again
    if run_args.dataset_streaming:
        (entry,) = run_args.sources
        stream = load_rows(entry.path, entry.image_folder, entry.name, entry.split, streaming=True)
        return stream, stream_fingerprint(entry.path, entry.name, entry.split), []
    seed = args.seed if args.data_seed is None else args.data_seed
    parts, sources = [], []
    for place, entry in enumerate(run_args.sources):
        count, rows, fingerprint = check_rows(run_args, args, tokenize, entry)
        drawn = draw(len(rows), entry.weight, (seed, place))
        parts.append(rows if entry.weight == 1 else rows.select(drawn))
        sources.append(
            Source(entry.path, entry.name, entry.split, os.path.exists(entry.path), count, len(rows), entry.weight,
                   len(drawn), fingerprint)
        )  # fmt: skip
        logger.info("%s: %d rows, %d good, %d an epoch", entry.path, count, len(rows), len(drawn))
    content = json.dumps([[source.fingerprint, source.weight] for source in sources])
    return concatenate_datasets(parts), hashlib.sha256(content.encode()).hexdigest(), sources


def read_held_out(run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer) -> Dataset | None:
    """The held-out rows with their tokens, if a run names some. Raises `ValueError` as `read_rows` does."""
    name = run_args.eval_dataset_name
    if name is None:
        return None
    config = run_args.dataset_config if name == run_args.dataset_name else None
    split = str(run_args.dataset_test_split) if has_splits(name) else "train"
    return check_rows(run_args, args, tokenize, SourceArguments(name, config, split, run_args.image_folder))[1]


def check_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer, entry: SourceArguments
) -> tuple[int, Dataset, str]:
    """The number of a source's rows, the good ones with their tokens, and a fingerprint of their content. The first
    process reads and checks them, the others take what it leaves in datasets' cache."""
    with args.main_process_first(desc="reading and checking the rows"):
        rows = load_rows(entry.path, entry.image_folder, entry.name, entry.split)
        assert isinstance(rows, Dataset)
        tokens = tokenize_rows(rows, RowCheck(tokenize, run_args.open_pictures), args.dataset_num_proc)
    report_file = Path(args.output_dir, BAD_ROWS_FILE) if args.process_index == 0 else None
    return len(rows), *keep_good_rows(rows, tokens, run_args.bad_rows, report_file)


def draw(count: int, weight: float, seed: tuple[int, int]) -> np.ndarray:
    """The rows that an epoch takes from a source with `count` rows: int64 [drawn].

    Each row is repeated as often as the integer part of the weight says. For the fraction, rows are drawn without
    replacement by the seed, so that all epochs, processes and resumed starts have the same rows.
    """
    times = math.floor(weight)
    share = np.random.default_rng(seed).choice(count, round((weight - times) * count), replace=False)
    return np.concatenate([np.tile(np.arange(count), times), np.sort(share)])
