"""What a run reads: its rows, checked, and packed where that is asked for."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from trl import SFTConfig

from conversations.checks import check_stream, control_tokens, keep_good_rows, measure_rows
from conversations.rows import load_rows, stream_fingerprint
from training.packing import PackedBatchSampler, pack_window, plan_accumulation
from training.tokenization import RowTokenizer


if TYPE_CHECKING:
    from training.sft import ScriptArguments

# Rows of a stream that are packed together.
PACKING_WINDOW = 512


def read_rows(
    script_args: "ScriptArguments", args: SFTConfig, tokenize: RowTokenizer
) -> tuple[Dataset | IterableDataset, str]:
    """The checked rows with their lengths, and a fingerprint that a resumed run must find again."""
    report_file = Path(args.output_dir) / "bad_rows.jsonl"
    with args.main_process_first(desc="reading the data"):
        if args.process_index == 0 and args.resume_from_checkpoint is None:
            report_file.unlink(missing_ok=True)  # an earlier run's
        rows: Dataset | IterableDataset = load_rows(
            script_args.dataset_name,
            script_args.image_folder,
            script_args.dataset_config,
            script_args.dataset_split,
            script_args.streaming,
        )
    tokens = control_tokens(tokenize.processor.tokenizer, tokenize.processor.image_token)
    if isinstance(rows, IterableDataset):
        rows = check_stream(rows, tokens, tokenize, script_args.bad_rows, report_file)
        # From the start again at its end: Trainer begins a new epoch there, and could not resume in it.
        return rows.repeat(None), stream_fingerprint(
            script_args.dataset_name, script_args.dataset_config, script_args.dataset_split
        )
    is_main_process = args.process_index == 0
    measured: list[Any] = [None]
    if is_main_process:
        open_pictures = script_args.bad_rows == "skip"
        measured = [measure_rows(rows, tokens, tokenize, open_pictures, args.dataset_num_proc)]
    broadcast_object_list(measured)
    return keep_good_rows(rows, measured[0], script_args.bad_rows, report_file if is_main_process else None)


def pack_rows(
    script_args: "ScriptArguments", args: SFTConfig, rows: Dataset | IterableDataset
) -> tuple[Dataset | IterableDataset, PackedBatchSampler | None]:
    """Pack a stream, or plan the packing of a dataset, which its sampler does; neither without `packed_length`."""
    if script_args.packed_length is None:
        return rows, None
    if isinstance(rows, IterableDataset):
        packed = rows.map(
            pack_window,
            batched=True,
            batch_size=PACKING_WINDOW,
            remove_columns=["images", "image_folder", "conversations", "source", "length"],
            fn_kwargs={"packed_length": script_args.packed_length},
        )
        return packed, None
    assert script_args.global_batch_size is not None  # check_arguments
    return rows, plan_packing(args, rows, script_args.global_batch_size, script_args.packed_length)


def plan_packing(args: SFTConfig, rows: Dataset, samples_per_step: int, packed_length: int) -> PackedBatchSampler:
    """Sampler of packed rows; sets the accumulation steps that they take."""
    lengths = list(rows["length"])
    epochs = math.ceil(args.num_train_epochs)
    if args.max_steps > 0:
        epochs = math.ceil(args.max_steps / max(len(lengths) // samples_per_step, 1))
    args.gradient_accumulation_steps = plan_accumulation(
        lengths, samples_per_step, args.world_size, args.seed, epochs, packed_length
    )
    return PackedBatchSampler(
        lengths, samples_per_step, args.world_size, args.process_index, args.gradient_accumulation_steps, args.seed
    )
