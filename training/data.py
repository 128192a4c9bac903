"""The data of a run: the checked rows of one or several sources, or a stream that is checked as it is read."""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, IterableDataset, concatenate_datasets

from common.errors import UserError
from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.measured import RowCheck, keep_good_rows, row_lengths, tokenize_rows
from conversations.sources import find_source
from conversations.tokens import RowTokenizer
from training.arguments import RunArguments, SourceArguments, TrainingConfig
from training.run import Source


logger = logging.getLogger(__name__)

# They list the bad rows that were skipped, of training and of evaluation, below `output_dir`.
BAD_ROWS_FILE = "bad_rows.jsonl"
HELD_OUT_BAD_ROWS_FILE = "held_out_bad_rows.jsonl"


def read_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset | IterableDataset, str, list[Source]]:
    """The rows that a run trains on.

    Returns:
        The rows with their tokens, a fingerprint that must be the same when the run is resumed, and what an epoch
        takes from each source. A stream's rows are unchecked, and what it takes isn't known: the list is empty.

    Raises:
        UserError: as `load_rows` does, or if there is a bad row that is not to be left out.
    """
    # Rows are checked and bad ones listed at every start; a stream that is resumed goes on with its list.
    if not (run_args.dataset_streaming and args.resume_from_checkpoint):
        _forget_bad_rows(args, BAD_ROWS_FILE)

    single = SourceArguments(
        path=str(run_args.dataset_name),
        name=run_args.dataset_config,
        split=str(run_args.dataset_train_split),
        image_folder=run_args.image_folder,
    )
    if run_args.dataset_streaming:
        stream = load_rows(single.path, single.image_folder, single.name, single.split, streaming=True)
        return stream, stream_fingerprint(single.path, single.name, single.split), []

    seed = args.seed if args.data_seed is None else args.data_seed
    drawn_rows = []
    sources = []
    for number, entry in enumerate(run_args.datasets or [single]):
        checked = check_rows(run_args, args, tokenize, entry, BAD_ROWS_FILE)
        drawn = draw_rows(checked.good_rows, entry, seed + number)
        logger.info(
            "%s: %d rows, %d good, %d an epoch", entry.path, checked.num_rows, len(checked.good_rows), len(drawn)
        )
        drawn_rows.append(drawn)
        sources.append(describe_source(entry, checked, len(drawn)))
    return concatenate_datasets(drawn_rows), mixture_fingerprint(sources), sources


def draw_rows(rows: Dataset, entry: SourceArguments, seed: int) -> Dataset:
    """What an epoch takes from a source's rows: all as often as the weight's whole part says, and some once more.

    These are drawn once, by the seed, so that all epochs, processes and resumed starts have the same.
    """
    times = math.floor(entry.weight)
    num_more = round((entry.weight - times) * len(rows))
    if times == 0 and num_more == 0:
        logger.warning("%s: %g of %d rows is less than one; one is taken", entry.path, entry.weight, len(rows))
        num_more = 1

    shuffled = rows.shuffle(seed=seed, keep_in_memory=True)
    return concatenate_datasets([*[rows] * times, shuffled.select(range(num_more))])


def read_held_out(run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer) -> Dataset | None:
    """The held-out rows with their tokens, if a run names some.

    Raises:
        UserError: as `read_rows` does.
    """
    _forget_bad_rows(args, HELD_OUT_BAD_ROWS_FILE)
    name = run_args.eval_dataset_name
    if name is None:
        return None

    entry = SourceArguments(
        path=name,
        name=run_args.dataset_config if name == run_args.dataset_name else None,
        split=str(run_args.dataset_test_split) if has_splits(name) else "train",
        image_folder=run_args.eval_image_folder,
    )
    return check_rows(run_args, args, tokenize, entry, HELD_OUT_BAD_ROWS_FILE).good_rows


@dataclass(frozen=True)
class CheckedRows:
    """A source's rows after the check."""

    num_rows: int
    """Bad ones included."""
    good_rows: Dataset
    """With their tokens."""
    fingerprint: str
    """Of the good rows' content."""


def check_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer, entry: SourceArguments, bad_rows_file: str
) -> CheckedRows:
    """Read and check a source's rows. Bad rows that are left out are listed in `bad_rows_file`, below `output_dir`.

    Raises:
        UserError: as `load_rows` does, or if there is a bad row that is not to be left out.
    """
    # The first process reads and checks them; the others take what it leaves in datasets' cache.
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
    """One fingerprint of several sources, from theirs and their weights."""
    content = json.dumps([[source.fingerprint, float(source.weight)] for source in sources])
    return hashlib.sha256(content.encode()).hexdigest()


def require_pictures(rows: Dataset | IterableDataset) -> None:
    """Refuse rows from which stage 'align' would learn nothing; a stream's rows aren't known yet.

    Raises:
        UserError: if no row has a picture.
    """
    if isinstance(rows, Dataset) and not row_lengths(rows, "num_images").any():
        raise UserError("Stage 'align' trains the projector alone, and no row has a picture.")


def _forget_bad_rows(args: TrainingConfig, file_name: str) -> None:
    """Delete the list of bad rows of an earlier start."""
    if args.process_index == 0:
        Path(args.output_dir, file_name).unlink(missing_ok=True)
