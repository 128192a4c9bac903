"""Reads the data of a run: checked rows from one or several sources, or a stream, whose rows are checked later."""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, IterableDataset, concatenate_datasets

from common.errors import UserError
from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.measured import RowCheck, integer_column, keep_good_rows, tokenize_rows
from conversations.sources import find_source
from conversations.tokens import RowTokenizer
from training.arguments import RunArguments, SourceArguments, TrainingConfig
from training.run import Source


logger = logging.getLogger(__name__)

# Files in `output_dir` that list the bad rows left out of training, and those left out of evaluation.
BAD_ROWS_FILE = "bad_rows.jsonl"
HELD_OUT_BAD_ROWS_FILE = "held_out_bad_rows.jsonl"


def read_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset | IterableDataset, str, list[Source]]:
    """The rows that a run trains on.

    Returns:
        The rows with their tokens, a fingerprint that must be the same when the run is resumed, and what an epoch
        takes from each source. The rows of a stream are neither checked nor tokenized, and its list of sources is
        empty.

    Raises:
        UserError: as `load_rows` does, or if a row is bad and `bad_rows` is `"error"`.
    """
    # Every start checks all rows, and writes the list of bad rows anew. Only a resumed stream keeps the list, because
    # it doesn't read the rows before its place again.
    is_resumed_stream = run_args.dataset_streaming and args.resume_from_checkpoint
    if not is_resumed_stream:
        _delete_bad_rows_list(args, BAD_ROWS_FILE)

    # The recipe gives either `datasets` or the fields of a single source.
    entries = run_args.datasets
    if not entries:
        entry = SourceArguments(
            path=str(run_args.dataset_name),
            name=run_args.dataset_config,
            split=str(run_args.dataset_train_split),
            image_folder=run_args.image_folder,
        )
        entries = [entry]

    if run_args.dataset_streaming:
        (entry,) = entries  # `check_stream` refuses `datasets`
        stream = load_rows(entry.path, entry.image_folder, entry.name, entry.split, streaming=True)
        return stream, stream_fingerprint(entry.path, entry.name, entry.split), []

    drawn_rows = []
    sources = []
    # Each source has a seed of its own, for the random sample of its rows.
    first_seed = args.seed if args.data_seed is None else args.data_seed
    for index, entry in enumerate(entries):
        checked = check_rows(run_args, args, tokenize, entry, BAD_ROWS_FILE)
        drawn = draw_rows(checked.good_rows, entry, seed=first_seed + index)
        logger.info(
            "%s: %d rows, %d good, %d an epoch", entry.path, checked.num_rows, len(checked.good_rows), len(drawn)
        )
        drawn_rows.append(drawn)
        sources.append(describe_source(entry, checked, len(drawn)))
    return concatenate_datasets(drawn_rows), mixture_fingerprint(sources), sources


def draw_rows(rows: Dataset, entry: SourceArguments, seed: int) -> Dataset:
    """The rows that an epoch takes from a source, by the source's weight.

    With a weight of 2.3, an epoch has each row twice, and a random sample of 30% of the rows once more. The sample
    depends on the seed alone, so that all epochs, processes and resumed starts have the same sample.
    """
    num_repeats = math.floor(entry.weight)
    num_sampled = round((entry.weight - num_repeats) * len(rows))
    if num_repeats == 0 and num_sampled == 0:
        logger.warning("%s: %g of %d rows is less than one; one is taken", entry.path, entry.weight, len(rows))
        num_sampled = 1

    whole_part = [rows] * num_repeats
    sample = rows.shuffle(seed=seed, keep_in_memory=True).select(range(num_sampled))
    return concatenate_datasets([*whole_part, sample])


def read_held_out(run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer) -> Dataset | None:
    """The held-out rows with their tokens; `None` if the run names no held-out rows.

    Raises:
        UserError: as `read_rows` does.
    """
    _delete_bad_rows_list(args, HELD_OUT_BAD_ROWS_FILE)
    path = run_args.eval_dataset_name
    if path is None:
        return None

    # `dataset_config` names a config of the training dataset, so it applies only if the held-out rows come from the
    # same dataset.
    config_name = run_args.dataset_config if path == run_args.dataset_name else None
    # Files and folders without splits have only "train".
    split = str(run_args.dataset_test_split) if has_splits(path) else "train"
    entry = SourceArguments(path, config_name, split, image_folder=run_args.eval_image_folder)
    return check_rows(run_args, args, tokenize, entry, HELD_OUT_BAD_ROWS_FILE).good_rows


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
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer, entry: SourceArguments, bad_rows_file: str
) -> CheckedRows:
    """Read and check a source's rows. Bad rows that are left out are listed in `bad_rows_file`, in `output_dir`.

    Raises:
        UserError: as `load_rows` does, or if a row is bad and `bad_rows` is `"error"`.
    """
    # The main process reads and checks the rows. The other processes then find the results in datasets' cache.
    with args.main_process_first(desc="reading and checking the rows"):
        rows = load_rows(entry.path, entry.image_folder, entry.name, entry.split)
        assert isinstance(rows, Dataset)
        tokens = tokenize_rows(rows, RowCheck(tokenize, run_args.open_pictures), args.dataset_num_proc)

    report_file = Path(args.output_dir, bad_rows_file) if args.process_index == 0 else None
    good_rows, fingerprint = keep_good_rows(rows, tokens, run_args.bad_rows, report_file)
    return CheckedRows(len(rows), good_rows, fingerprint)


def describe_source(entry: SourceArguments, checked: CheckedRows, num_drawn: int) -> Source:
    """The record of what an epoch takes from a source."""
    return Source(
        path=entry.path,
        name=entry.name,
        split=entry.split,
        is_local=find_source(entry.path).is_local,
        rows=checked.num_rows,
        good_rows=len(checked.good_rows),
        weight=entry.weight,
        drawn=num_drawn,
        fingerprint=checked.fingerprint,
    )


def mixture_fingerprint(sources: list[Source]) -> str:
    """The fingerprint of all rows of a run, made of each source's fingerprint and weight."""
    content = json.dumps([[source.fingerprint, float(source.weight)] for source in sources])
    return hashlib.sha256(content.encode()).hexdigest()


def require_pictures(rows: Dataset | IterableDataset) -> None:
    """Check that rows have a picture, without which stage 'align' would learn nothing. A stream isn't checked.

    Raises:
        UserError: if no row has a picture.
    """
    if isinstance(rows, IterableDataset):
        return
    if not integer_column(rows, "num_images").any():
        raise UserError("Stage 'align' trains the projector alone, and no row has a picture.")


def _delete_bad_rows_list(args: TrainingConfig, file_name: str) -> None:
    """Delete the list of bad rows that an earlier start of the run wrote."""
    if args.process_index == 0:
        Path(args.output_dir, file_name).unlink(missing_ok=True)
