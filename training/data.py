"""The data of a run: its checked rows, and which process gets which of them when."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers.trainer_pt_utils import BatchRebalanceSampler

from conversations.checks import BadRowList, StreamCheck, control_tokens
from conversations.loading import has_splits, load_rows, stream_fingerprint
from conversations.measured import keep_good_rows, measure_rows, row_lengths
from conversations.streams import RowStream
from training.arguments import RunArguments, TrainingConfig, set_accumulation
from training.batching import FixedBatchSampler, PaddedBatchSampler
from training.mixture import mix
from training.packing import PackedBatchSampler, check_longest, partition_fitting, plan_accumulation
from training.run import Source
from training.tokenization import RowTokenizer


# Lists the bad rows that were skipped.
BAD_ROWS_FILE = "bad_rows.jsonl"


def open_rows(run_args: RunArguments) -> list[Any]:
    """The rows of each source that a run names, unchecked: datasets, or one stream.

    Raises:
        ValueError: as `load_rows` does; with several sources the message names the entry.
    """
    rows = []
    for number, source in enumerate(run_args.sources):
        with _named_source(run_args, number):
            rows.append(
                load_rows(source.path, source.image_folder, source.name, source.split, run_args.dataset_streaming)
            )
    return rows


def read_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset | RowStream, str, list[Source]]:
    """The checked rows with their lengths, a fingerprint that must be the same when a run is resumed, and what was
    taken from each source. For a stream the last is empty, and rows are checked when read (`check_of_stream`)."""
    report_file = Path(args.output_dir) / BAD_ROWS_FILE
    opened = _open_on_main_first(args, lambda: open_rows(run_args), report_file, run_args.dataset_streaming)
    if run_args.dataset_streaming:
        (rows,), (source,) = opened, run_args.sources
        return rows, stream_fingerprint(source.path, source.name, source.split), []
    checked = []
    for number, rows in enumerate(opened):
        with _named_source(run_args, number):
            checked.append(_check_rows(run_args, args, tokenize, rows, report_file))
    return mix(run_args.sources, [len(rows) for rows in opened], checked, sampling_seed(args))


def sampling_seed(args: TrainingConfig) -> int:
    """The seed for drawing rows and for their order."""
    return args.seed if args.data_seed is None else args.data_seed


def _named_source(run_args: RunArguments, number: int) -> Any:
    """A `with` block whose errors name the entry of `datasets`, if there are any."""
    if run_args.datasets is None:
        return nullcontext()
    return _named(f"datasets, entry {number + 1}", "the entry's image_folder")


@contextmanager
def _named(field: str, image_folder: str) -> Iterator[None]:
    """A `with` block whose errors name a field, and that field's image folder instead of --image_folder."""
    try:
        yield
    except (ValueError, OSError) as error:
        reason = str(error).replace("--image_folder", image_folder)
        raise ValueError(f"{field}: {reason}") from error


def check_of_stream(run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer) -> StreamCheck:
    """The check of a stream's rows, made when they are read."""
    return StreamCheck(
        control_tokens(tokenize.processor.tokenizer, tokenize.processor.image_token),
        tokenize,
        run_args.bad_rows,
        BadRowList(Path(args.output_dir) / BAD_ROWS_FILE),
    )


def read_held_out(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer
) -> tuple[Dataset, str] | tuple[None, None]:
    """The checked held-out rows with their lengths, and their fingerprint, if a run names some; never a stream.

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
    with _named("eval_dataset_name", "--eval_image_folder"):
        rows = _open_on_main_first(
            args, lambda: load_rows(name, run_args.eval_image_folder, config, split), report_file
        )
        return _check_rows(run_args, args, tokenize, rows, report_file)


def _open_on_main_first(
    args: TrainingConfig, load: Callable[[], Any], report_file: Path, is_stream: bool = False
) -> Any:
    with args.main_process_first(desc="reading the data"):
        if args.process_index == 0 and (args.resume_from_checkpoint is None or not is_stream):
            report_file.unlink(missing_ok=True)  # from an earlier run, or to be written again
        return load()


def _check_rows(
    run_args: RunArguments, args: TrainingConfig, tokenize: RowTokenizer, rows: Dataset, report_file: Path
) -> tuple[Dataset, str]:
    tokens = control_tokens(tokenize.processor.tokenizer, tokenize.processor.image_token)
    is_main_process = args.process_index == 0
    measured: list[Any] = [None]
    if is_main_process:
        open_pictures = run_args.bad_rows == "skip"
        measured = [measure_rows(rows, tokens, tokenize, open_pictures, args.dataset_num_proc, tokenize.identity())]
    broadcast_object_list(measured)
    return keep_good_rows(rows, measured[0], run_args.bad_rows, report_file if is_main_process else None)


def deal_held_out(run_args: RunArguments, args: TrainingConfig, lengths: list[int]) -> FixedBatchSampler:
    """The batches of held-out rows, packed if the run packs: the same ones for any number of processes.

    Raises:
        ValueError: if a row is longer than a packed one.
    """
    size, packed_length = args.per_device_eval_batch_size, run_args.packed_length
    if packed_length is None:
        batches = [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    else:
        check_longest(lengths, packed_length, "row of eval_dataset_name")
        batches = partition_fitting(lengths, packed_length)
    return FixedBatchSampler(batches, args.world_size, args.process_index)


def deal_rows(run_args: RunArguments, args: TrainingConfig, rows: Dataset | RowStream) -> BatchRebalanceSampler | None:
    """The sampler of rows, `None` for a stream; sets the accumulation steps."""
    if isinstance(rows, RowStream):
        if run_args.packed_length is None:
            set_accumulation(args, run_args.global_batch_size)
        return None
    lengths, seed = row_lengths(rows), sampling_seed(args)
    if run_args.packed_length is None:
        set_accumulation(args, run_args.global_batch_size)
        return PaddedBatchSampler(
            lengths, args.per_device_train_batch_size, args.world_size, args.process_index, seed,
            args.train_sampling_strategy, args.gradient_accumulation_steps,
        )  # fmt: skip
    assert run_args.global_batch_size is not None  # check_arguments
    return plan_packing(args, lengths, seed, run_args.global_batch_size, run_args.packed_length)


def plan_packing(
    args: TrainingConfig, lengths: np.ndarray, seed: int, samples_per_step: int, packed_length: int
) -> PackedBatchSampler:
    """Sampler of packed rows; sets the accumulation steps that they take."""
    epochs = math.ceil(args.num_train_epochs)
    if args.max_steps > 0:
        epochs = math.ceil(args.max_steps / max(len(lengths) // samples_per_step, 1))
    args.gradient_accumulation_steps = plan_accumulation(
        lengths, samples_per_step, args.world_size, seed, epochs, packed_length
    )
    return PackedBatchSampler(
        lengths, samples_per_step, args.world_size, args.process_index, args.gradient_accumulation_steps, seed
    )
