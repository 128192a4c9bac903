"""The data of a run: the checked rows of one or several sources, or a stream that is checked as it is read."""

import hashlib
import json
import logging
import math
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
    """The rows with their tokens, a fingerprint that must be the same when a run is resumed, and what an epoch takes
    from each source. For a stream the last is empty, and rows are checked when they are read.

    Raises `UserError` as `load_rows` does, or if there is a bad row that is not to be left out.
    """
    if args.process_index == 0 and not (run_args.dataset_streaming and args.resume_from_checkpoint):
        Path(args.output_dir, BAD_ROWS_FILE).unlink(missing_ok=True)  # bad rows are listed again
    alone = SourceArguments(
        str(run_args.dataset_name), run_args.dataset_config, str(run_args.dataset_train_split), run_args.image_folder
    )
    if run_args.dataset_streaming:
        stream = load_rows(alone.path, alone.image_folder, alone.name, alone.split, streaming=True)
        return stream, stream_fingerprint(alone.path, alone.name, alone.split), []
    seed = args.seed if args.data_seed is None else args.data_seed
    parts, sources = [], []
    for place, entry in enumerate(run_args.datasets or [alone]):
        count, rows, fingerprint = check_rows(run_args, args, tokenize, entry, BAD_ROWS_FILE)
        # Repeated, and for the weight's fraction drawn once: all epochs, processes and resumed starts have the same.
        times = math.floor(entry.weight)
        order = rows.shuffle(seed=seed + place, keep_in_memory=True)
        fraction = round((entry.weight - times) * len(rows))
        if times == 0 and fraction == 0:
            logger.warning("%s: %g of %d rows is less than one; one is taken", entry.path, entry.weight, len(rows))
            fraction = 1
        drawn = [rows] * times + [order.select(range(fraction))]
        parts += drawn
        sources.append(
            Source(
                path=entry.path,
                name=entry.name,
                split=entry.split,
                is_local=find_source(entry.path).is_local,
                rows=count,
                good_rows=len(rows),
                weight=entry.weight,
                drawn=sum(map(len, drawn)),
                fingerprint=fingerprint,
            )
        )
        logger.info("%s: %d rows, %d good, %d an epoch", entry.path, count, len(rows), sources[-1].drawn)
    content = json.dumps([[source.fingerprint, float(source.weight)] for source in sources])
    return concatenate_datasets(parts), hashlib.sha256(content.encode()).hexdigest(), sources


def require_pictures(rows: Dataset | IterableDataset) -> None:
    """Refuse rows from which stage 'align' would learn nothing.

    Raises:
        UserError: if no row has a picture; a stream's rows aren't known yet.
    """
    if isinstance(rows, Dataset) and not row_lengths(rows, "num_images").any():
        raise UserError("Stage 'align' trains the projector alone, and no row has a picture.")


def read_held_out(run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer) -> Dataset | None:
    """The held-out rows with their tokens, if a run names some. Raises `UserError` as `read_rows` does."""
    if args.process_index == 0:
        Path(args.output_dir, HELD_OUT_BAD_ROWS_FILE).unlink(missing_ok=True)  # bad rows are listed again

    name = run_args.eval_dataset_name
    if name is None:
        return None
    config = run_args.dataset_config if name == run_args.dataset_name else None
    split = str(run_args.dataset_test_split) if has_splits(name) else "train"
    entry = SourceArguments(name, config, split, run_args.eval_image_folder)
    _, rows, _ = check_rows(run_args, args, tokenize, entry, HELD_OUT_BAD_ROWS_FILE)
    return rows


def check_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer, entry: SourceArguments, bad_rows_file: str
) -> tuple[int, Dataset, str]:
    """The number of a source's rows, the good ones with their tokens, and a fingerprint of their content. The first
    process reads and checks them, the others take what it leaves in datasets' cache. Bad rows that are left out are
    listed in `bad_rows_file`, below `output_dir`."""
    with args.main_process_first(desc="reading and checking the rows"):
        rows = load_rows(entry.path, entry.image_folder, entry.name, entry.split)
        assert isinstance(rows, Dataset)
        tokens = tokenize_rows(rows, RowCheck(tokenize, run_args.open_pictures), args.dataset_num_proc)
    report_file = Path(args.output_dir, bad_rows_file) if args.process_index == 0 else None
    return len(rows), *keep_good_rows(rows, tokens, run_args.bad_rows, report_file)
