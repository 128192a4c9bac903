"""The data of a run: its checked rows, or a stream that is checked as it is read."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset

from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.measured import RowCheck, keep_good_rows, tokenize_rows
from conversations.tokens import RowTokenizer
from training.arguments import RunArguments, TrainingConfig
from training.mixture import mix
from training.run import Source


# Lists the bad rows that were skipped.
BAD_ROWS_FILE = "bad_rows.jsonl"


def read_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset | IterableDataset, str, list[Source]]:
    """The rows with their tokens, a fingerprint that must be the same when a run is resumed, and what was taken from
    each source. For a stream the last is empty, and rows are checked when they are read.

    Raises:
        ValueError: as `load_rows` does; with several sources the message names the entry.
        BadRowError: if there is a bad row that is not to be left out.
    """
    report_file = Path(args.output_dir) / BAD_ROWS_FILE
    if run_args.dataset_streaming:
        (source,) = run_args.sources
        place = (source.path, source.name, source.split)
        if args.resume_from_checkpoint is None:
            _forget(args, report_file)
        return load_rows(source.path, source.image_folder, *place[1:], streaming=True), stream_fingerprint(*place), []
    _forget(args, report_file)
    checked, counts = [], []
    for number, source in enumerate(run_args.sources):
        with nullcontext() if run_args.datasets is None else _named(f"datasets, entry {number + 1}"):
            rows, good, fingerprint = _check(
                run_args, args, tokenize, report_file, source.path, source.image_folder, source.name, source.split
            )
        counts.append(len(rows))
        checked.append((good, fingerprint))
    return mix(run_args.sources, counts, checked, args.seed if args.data_seed is None else args.data_seed)


def read_held_out(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset, str] | tuple[None, None]:
    """The held-out rows with their tokens, and their fingerprint, if a run names some; never a stream.

    Raises:
        ValueError: as `read_rows` does; the message names the field.
    """
    name, split = run_args.eval_dataset_name, run_args.dataset_test_split
    if name is None:
        return None, None
    if split == RunArguments.dataset_test_split and not has_splits(name):
        split = "train"
    config = run_args.dataset_config if name == run_args.dataset_name else None
    report_file = Path(args.output_dir) / "bad_eval_rows.jsonl"
    _forget(args, report_file)
    with _named("eval_dataset_name"):
        _, good, fingerprint = _check(
            run_args, args, tokenize, report_file, name, run_args.eval_image_folder, config, split
        )
    return good, fingerprint


@contextmanager
def _named(field: str) -> Iterator[None]:
    """A `with` block whose errors name a field."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{field}: {error}") from error


def _forget(args: TrainingConfig, report_file: Path) -> None:
    """Delete the list of bad rows of an earlier start: they are listed again."""
    if args.process_index == 0:
        report_file.unlink(missing_ok=True)


def _check(
    run_args: RunArguments,
    args: TrainingConfig,
    tokenize: RowTokenizer,
    report_file: Path,
    *source: Any,
) -> tuple[Dataset, Dataset, str]:
    """All rows, the good ones with their tokens, and a fingerprint. The first process reads and checks them, the
    others take what it leaves in datasets' cache. `source` is what `load_rows` takes."""
    with args.main_process_first(desc="reading and checking the rows"):
        rows: Any = load_rows(*source)
        tokens = tokenize_rows(rows, RowCheck(tokenize, run_args.open_pictures), args.dataset_num_proc)
    return rows, *keep_good_rows(rows, tokens, run_args.bad_rows, report_file if args.process_index == 0 else None)
