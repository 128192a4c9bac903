"""Reads the rows of a run. Rows of files are checked here, rows of a stream only when they are trained on."""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, IterableDataset, concatenate_datasets

from normllava.conversations.checked_rows import RowCheck, integer_column, keep_good_rows, tokenize_rows
from normllava.conversations.loading import has_splits, load_rows, stream_fingerprint
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.conversations.sources import find_source
from normllava.errors import UserError
from training.folders.run import SourceRecord
from training.options.arguments import RunArguments, SourceArguments, TrainingConfig
from training.rows.batches import data_seed


logger = logging.getLogger(__name__)

# The file in `output_dir` that lists the bad rows left out of training.
BAD_ROWS_FILE = "bad_rows.jsonl"
# The file in `output_dir` that lists the bad rows left out of the held-out rows.
HELD_OUT_BAD_ROWS_FILE = "held_out_bad_rows.jsonl"


def read_rows(
    run_args: RunArguments, args: TrainingConfig, row_tokenizer: RowTokenizer
) -> tuple[Dataset | IterableDataset, str, list[SourceRecord]]:
    """The rows that a run trains on.

    Returns:
        The rows with their tokens, a fingerprint that must be the same when the run is resumed, and a record of each
        source. The rows of a stream are neither checked, tokenized nor counted.

    Raises:
        UserError: if the rows can't be loaded, or if a row is bad and `bad_rows` is `"error"`.
    """
    # Every start checks all rows, and writes the list of bad rows anew. Only a resumed stream keeps the list, because
    # a resumed stream doesn't read its earlier rows again.
    is_resumed_stream = run_args.dataset_streaming and args.resume_from_checkpoint
    if not is_resumed_stream:
        _delete_bad_rows_list(args, BAD_ROWS_FILE)

    # The recipe gives either `datasets` or the fields of a single source.
    entries = run_args.datasets
    if not entries:
        assert run_args.dataset_name is not None
        only_entry = SourceArguments(
            path=run_args.dataset_name,
            name=run_args.dataset_config,
            split=run_args.dataset_train_split,
            image_folder=run_args.image_folder,
        )
        entries = [only_entry]

    if run_args.dataset_streaming:
        (entry,) = entries  # check_arguments has refused `datasets` with a stream
        stream = load_rows(entry.path, entry.image_folder, entry.name, entry.split, streaming=True)
        fingerprint = stream_fingerprint(entry.path, entry.name, entry.split)
        return stream, fingerprint, [describe_source(entry, fingerprint)]

    mixture = []
    sources = []
    for index, entry in enumerate(entries):
        checked_rows = check_rows(run_args, args, row_tokenizer, entry, BAD_ROWS_FILE)
        # Each source has its own seed, for the random sample of its rows.
        drawn_rows = draw_rows(checked_rows.good_rows, entry, seed=data_seed(args) + index)
        counts = (checked_rows.num_rows, len(checked_rows.good_rows), len(drawn_rows))
        logger.info("%s: %d rows, %d good, %d an epoch", entry.path, *counts)
        mixture.append(drawn_rows)
        sources.append(describe_source(entry, checked_rows.fingerprint, *counts))
    return concatenate_datasets(mixture), mixture_fingerprint(sources), sources


def draw_rows(rows: Dataset, entry: SourceArguments, seed: int) -> Dataset:
    """The rows that every epoch takes from a source, by the source's weight.

    With a weight of 2.3, an epoch has each row twice, and a random sample of 30% of the rows a third time. The sample
    depends only on the seed, so it is the same in all epochs, processes and resumed starts.
    """
    num_repeats = math.floor(entry.weight)
    sampled_fraction = entry.weight - num_repeats
    num_sampled = round(sampled_fraction * len(rows))
    if num_repeats == 0 and num_sampled == 0:
        logger.warning("%s: %g of %d rows is less than one; one is taken", entry.path, entry.weight, len(rows))
        num_sampled = 1

    repeats = [rows] * num_repeats
    sample = rows.shuffle(seed=seed, keep_in_memory=True).select(range(num_sampled))
    return concatenate_datasets([*repeats, sample])


def read_held_out(run_args: RunArguments, args: TrainingConfig, row_tokenizer: RowTokenizer) -> Dataset | None:
    """The held-out rows with their tokens; `None` if the run names no held-out rows.

    Raises:
        UserError: if the rows can't be loaded, or if a row is bad and `bad_rows` is `"error"`.
    """
    _delete_bad_rows_list(args, HELD_OUT_BAD_ROWS_FILE)
    path = run_args.eval_dataset_name
    if path is None:
        return None

    # `dataset_config` names a config of the training dataset, so it applies only if the held-out rows come from the
    # same dataset.
    config_name = None
    if path == run_args.dataset_name:
        config_name = run_args.dataset_config
    split = "train"  # the only split of files
    if has_splits(path):  # a Hub id, or a folder, even one of loose parquet files
        split = str(run_args.dataset_test_split)

    entry = SourceArguments(path=path, name=config_name, split=split, image_folder=run_args.eval_image_folder)
    return check_rows(run_args, args, row_tokenizer, entry, HELD_OUT_BAD_ROWS_FILE, keeps_turns=True).good_rows


@dataclass(frozen=True)
class CheckedRows:
    """A source's rows after the check."""

    num_rows: int
    """The number of rows in the source, good and bad."""
    good_rows: Dataset
    """The good rows with their tokens."""
    fingerprint: str
    """The fingerprint of the good rows' content."""


def check_rows(
    run_args: RunArguments,
    args: TrainingConfig,
    row_tokenizer: RowTokenizer,
    entry: SourceArguments,
    bad_rows_file: str,
    keeps_turns: bool = False,
) -> CheckedRows:
    """Read and check a source's rows.

    Bad rows that are left out are added to the list in the file `bad_rows_file` of `output_dir`. `keeps_turns` is as
    in [`keep_good_rows`].

    Raises:
        UserError: if the rows can't be loaded, or if a row is bad and `bad_rows` is `"error"`.
    """
    # The main process reads and checks the rows. The other processes then find the results in datasets' cache.
    with args.main_process_first(desc="reading and checking the rows"):
        rows = load_rows(entry.path, entry.image_folder, entry.name, entry.split)
        assert isinstance(rows, Dataset)
        tokens = tokenize_rows(rows, RowCheck(row_tokenizer, run_args.open_pictures), args.dataset_num_proc)

    list_path = None  # only the main process writes the list
    if args.process_index == 0:
        list_path = Path(args.output_dir, bad_rows_file)
    good_rows, fingerprint = keep_good_rows(rows, tokens, run_args.bad_rows, list_path, keeps_turns)
    return CheckedRows(num_rows=len(rows), good_rows=good_rows, fingerprint=fingerprint)


def describe_source(
    entry: SourceArguments,
    fingerprint: str,
    num_rows: int | None = None,
    num_good: int | None = None,
    num_drawn: int | None = None,
) -> SourceRecord:
    """The record of a source. Its rows, those that are good, and those of an epoch aren't counted for a stream."""
    return SourceRecord(
        path=entry.path,
        name=entry.name,
        split=entry.split,
        is_local=find_source(entry.path).is_local,
        rows=num_rows,
        good_rows=num_good,
        weight=entry.weight,
        drawn=num_drawn,
        fingerprint=fingerprint,
    )


def mixture_fingerprint(sources: list[SourceRecord]) -> str:
    """The fingerprint of all rows of a run, a hash of each source's fingerprint and weight."""
    # JSON writes 1 and 1.0 differently, and both are the same weight.
    fingerprints_and_weights = [[source.fingerprint, float(source.weight)] for source in sources]
    content = json.dumps(fingerprints_and_weights)
    return hashlib.sha256(content.encode()).hexdigest()


def require_pictures(rows: Dataset | IterableDataset) -> None:
    """Refuse rows without any picture, from which stage 'align' would learn nothing. A stream isn't checked.

    Raises:
        UserError: if no row has a picture.
    """
    if isinstance(rows, IterableDataset):
        return
    if not integer_column(rows, "num_tiles").any():
        raise UserError("Stage 'align' trains the projector alone, and no row has a picture.")


def _delete_bad_rows_list(args: TrainingConfig, file_name: str) -> None:
    """Delete the list of bad rows that an earlier start of the run wrote."""
    if args.process_index == 0:
        Path(args.output_dir, file_name).unlink(missing_ok=True)
