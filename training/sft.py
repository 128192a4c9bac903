"""Train one stage of a NormLlava or a Llava.

    accelerate launch -q training/sft.py --config training/recipes/Qwen2.5-7B-Instruct/align.yaml

Every field of the recipe is also an option of the command line, which wins over the recipe. The output is a complete
checkpoint folder, or in stage "adapt" the folder of an adapter, which training/merge.py turns into a checkpoint.
"""

import os


# This is set before torch is imported, because torch's OpenMP reads it at import. By default OpenMP's threads spin
# while they wait, which makes training on a CPU many times slower as soon as another process is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import logging
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from normllava.command_line import command

import torch
from transformers import LlavaConfig

from normllava.conversations.chat_template import plain_template
from normllava.conversations.checked_rows import RowCheck
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.conversations.sources import find_source
from normllava.errors import UserError
from training.folders.checkpoints import (
    check_weights,
    find_checkpoint,
    list_checkpoints,
    lock_output_dir,
    move_superseded,
    recorded_arguments,
    steps_done,
)
from training.folders.loading import (
    load_base,
    load_config,
    load_processor,
    prepare_model,
    require_complete,
    require_trained_end,
)
from training.folders.run import (
    Composed,
    Run,
    check_same_run,
    check_start_weights,
    describe_environment,
    describe_run,
    read_composed,
    start_weights,
)
from training.loop.trainer import NormLlavaTrainer
from training.modules.attention import default_attention
from training.modules.key_alignment import KeyAlignment
from training.modules.stages import Stage, describe_stage
from training.options.arguments import RunArguments, TrainingConfig, read_resume
from training.options.command_line import build_parser, make_arguments, read_fields
from training.options.refusals import check_devices, check_tiles
from training.rows.batches import Batches, deal_held_out, deal_rows, require_separate_samples
from training.rows.collator import VisionLanguageCollator
from training.rows.data import read_held_out, read_rows, require_pictures
from training.rows.streams import StreamBatches


logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = build_parser()
    fields = fill_from_record(read_fields(parser, argv))
    run_args, args = make_arguments(parser, fields)
    check_devices(args)

    is_main_process = args.process_index == 0
    logging.basicConfig(format="%(message)s")  # for notebooks; from the command line, `command` has done this
    logging.getLogger().setLevel(logging.INFO if is_main_process else logging.ERROR)

    # The main process locks the folder for all processes of the run.
    output_dir = Path(args.output_dir)
    lock = lock_output_dir(output_dir) if is_main_process else nullcontext()
    try:
        with lock:
            train(run_args, args)
    except KeyboardInterrupt:
        logger.info("\nStopped. %s", describe_resuming(output_dir))
        sys.exit(128 + signal.SIGINT)  # the exit status that a shell gives to an interrupted command


def fill_from_record(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with arithmetic, attention and checkpointing of the resumed run, unless these fields are given.

    The defaults of these fields depend on the machine, and a run may be resumed on another machine.
    """
    resume = read_resume(fields["resume_from_checkpoint"])
    if resume is None or fields["output_dir"] is None:
        return fields

    earlier_arguments = recorded_arguments(Path(fields["output_dir"]), resume)
    filled_fields: dict[str, Any] = {}
    arithmetic_is_given = fields["bf16"] is not None or fields["fp16"]
    if not arithmetic_is_given:
        filled_fields["bf16"] = earlier_arguments.get("bf16")
    if fields["attn_implementation"] is None:
        filled_fields["attn_implementation"] = earlier_arguments.get("attn_implementation")
    if fields["gradient_checkpointing"] is None:
        filled_fields["gradient_checkpointing"] = earlier_arguments.get("gradient_checkpointing")
    return fields | filled_fields


def train(run_args: RunArguments, args: TrainingConfig) -> None:
    """Train a stage, and publish the result. A finished run is left as it is.

    Raises:
        UserError: for data, a model or a checkpoint that doesn't fit, mostly before the weights are loaded.
    """
    output_dir = Path(args.output_dir)
    stage = Stage(str(run_args.stage))
    is_packed = run_args.packed_length is not None

    # Read the model's config, and find the checkpoint that the run resumes from.
    config = load_config(str(run_args.model_name_or_path), run_args.model_revision)
    if is_packed:
        require_separate_samples(config.text_config)
    if run_args.attn_implementation is None:
        run_args.attn_implementation = default_attention(config.text_config, args.device)
    checkpoint = find_checkpoint(output_dir, args.resume_from_checkpoint)

    # Read the rows. What needs none has been checked before, since reading them takes long.
    logger.info("Reading and checking the rows ...")
    row_tokenizer = make_tokenizer(run_args, args, config)
    rows, fingerprint, sources = read_rows(run_args, args, row_tokenizer)
    if stage is Stage.ALIGN:
        require_pictures(rows)
    held_out = read_held_out(run_args, args, row_tokenizer)

    # Deal the rows into batches.
    collate = VisionLanguageCollator(row_tokenizer, is_packed)
    sampler, accumulation_steps = deal_rows(run_args, args, rows, row_tokenizer.tokens_per_tile)
    args.gradient_accumulation_steps = accumulation_steps
    stream = None
    if sampler is None:  # the rows are a stream
        check = RowCheck(row_tokenizer, run_args.open_pictures)
        is_local = find_source(str(run_args.dataset_name)).is_local
        stream = StreamBatches(rows, check, collate, is_local, run_args.bad_rows, args)
    eval_sampler = None
    if held_out is not None:
        eval_sampler = deal_held_out(args, held_out, row_tokenizer.tokens_per_tile, run_args.packed_length)

    # Make the record of the run. If the run is resumed, the record must agree with the checkpoint's.
    environment = describe_environment(args.device.type, args.world_size, resumed=checkpoint is not None)
    arguments = {**vars(run_args), **args.to_dict()}
    run = describe_run(arguments, fingerprint, environment, run_args.recipe, sources)
    num_done = count_done(args)
    recorded_in = output_dir if checkpoint is None and num_done > 0 else checkpoint
    if recorded_in is not None and not run_args.resume_changed:
        check_same_run(recorded_in, run)

    num_steps = count_steps(args, sampler)
    if num_done >= num_steps:
        logger.info("%s holds a finished run of %d steps: there is nothing to do.", output_dir, num_done)
        return
    if checkpoint is None:
        require_no_result(output_dir, num_done, num_steps)
    else:
        logger.info("Going on after step %d, from %s", steps_done(checkpoint), checkpoint)
        prepare_resuming(checkpoint, args, stream)

    # Load the model.
    logger.info("Loading the weights of %s ...", run_args.model_name_or_path)
    model = load_base(run_args, args)
    run = run.with_start(find_start_weights(run_args, stage, checkpoint), find_composed(run_args, checkpoint))
    trained_model, module_groups = prepare_model(model, run_args, args, frozen_dtype=args.frozen_dtype)
    if checkpoint is not None:
        check_weights(checkpoint, trained_model)
    key_alignment = None
    if run_args.has_key_losses:
        key_alignment = KeyAlignment(model, row_tokenizer.processor, run_args.key_mmd_weight, run_args.key_gram_weight)

    # Train.
    trainer = NormLlavaTrainer(
        trained_model,
        module_groups,
        run,
        sampler=sampler,
        stream=stream,
        eval_sampler=eval_sampler,
        num_answers=run_args.eval_answers,
        key_alignment=key_alignment,
        clip_by_module=run_args.clip_by_module,
        args=args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=row_tokenizer.processor,
        data_collator=collate,
    )
    logger.info("%s\n%s", describe_stage(stage, module_groups), describe_batch(run_args, args, num_steps))
    warn_if_never_logged(args, num_steps)
    del module_groups  # their references to unsharded parameters would keep memory that FSDP2 frees by sharding
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    logger.info("Saved to %s", output_dir)


def find_start_weights(run_args: RunArguments, stage: Stage, checkpoint: Path | None) -> str | None:
    """The fingerprint of the weights that the run started from, which a resumed run takes from its checkpoint.

    Raises:
        UserError: if a resumed adapter's base model has changed. A checkpoint of the other stages has all weights.
    """
    name = str(run_args.model_name_or_path)
    if checkpoint is None:
        return start_weights(name, run_args.model_revision)
    if stage is Stage.ADAPT:
        check_start_weights(checkpoint, name, start_weights(name, run_args.model_revision))
    return Run.read(checkpoint).start_weights


def find_composed(run_args: RunArguments, checkpoint: Path | None) -> Composed | None:
    """How the model of the first stage was composed. A resumed run takes it from its checkpoint."""
    if checkpoint is not None:
        return Run.read(checkpoint).composed
    return read_composed(str(run_args.model_name_or_path))


def make_tokenizer(run_args: RunArguments, args: TrainingConfig, config: LlavaConfig) -> RowTokenizer:
    """The tokenizer of rows: in LLaVA's "plain" format for stage "align", by the chat template for other stages."""
    name = str(run_args.model_name_or_path)
    processor = load_processor(name, run_args.model_revision)
    require_complete(name, processor)
    check_tiles(run_args, processor.image_processor)
    template = processor.chat_template
    if run_args.stage == Stage.ALIGN:
        template = plain_template(processor.tokenizer, processor.image_token)
    row_tokenizer = RowTokenizer(
        processor,
        template,
        max_length=args.max_length,
        max_positions=getattr(config.text_config, "max_position_embeddings", None),
        max_tiles=run_args.max_tiles,
    )
    if run_args.stage != Stage.ALIGN:
        require_trained_end(name, row_tokenizer)
    return row_tokenizer


def count_steps(args: TrainingConfig, sampler: Batches | None) -> int:
    """The number of optimizer steps in the whole run. `sampler` is `None` for a stream, which needs `max_steps`."""
    if sampler is None or args.max_steps > 0:
        return args.max_steps
    steps_per_epoch = math.ceil(len(sampler) / args.gradient_accumulation_steps)
    return math.ceil(args.num_train_epochs * steps_per_epoch)


def count_done(args: TrainingConfig) -> int:
    """The number of steps of the result in the output folder; 0 if there is none, or if the run doesn't go on from it.

    If the user names a checkpoint by its path, the run resumes from it even if the folder holds a finished run.
    """
    if args.resume_from_checkpoint is not True:
        return 0
    return steps_done(Path(args.output_dir))


def require_no_result(output_dir: Path, num_done: int, num_steps: int) -> None:
    """Refuse to resume in a folder that holds a result of too few steps and no checkpoint.

    Raises:
        UserError: if the folder holds a result, which has `num_done` steps.
    """
    if num_done > 0:
        raise UserError(
            f"{output_dir} holds a run of {num_done} steps, but no checkpoint to continue from to step {num_steps}. "
            "Start from its model, with another output_dir."
        )


def prepare_resuming(checkpoint: Path, args: TrainingConfig, stream: StreamBatches | None) -> None:
    """Set the stream to the checkpoint's place, move later checkpoints away, and turn `eval_on_start` off."""
    args.eval_on_start = False  # the run's first start has evaluated the untrained model
    if stream is not None:
        stream.read_place(checkpoint)
    if args.process_index == 0:
        move_superseded(Path(args.output_dir), checkpoint)


def describe_batch(run_args: RunArguments, args: TrainingConfig, num_steps: int) -> str:
    """The line that training prints about its steps: processes, rows, accumulation steps, number and arithmetic."""
    num_rows = args.per_device_train_batch_size
    num_passes = args.gradient_accumulation_steps
    num_samples = run_args.global_batch_size
    if num_samples is None:
        num_samples = num_rows * num_passes * args.world_size

    batch = f"{num_rows} rows"
    if run_args.packed_length is not None:
        batch = f"1 row of up to {run_args.packed_length} tokens"

    arithmetic = "float32"
    if args.bf16:
        arithmetic = "bfloat16"
    elif args.fp16:
        arithmetic = "float16"
    if args.device.type == "cpu":
        # Users should see the number of threads, which `accelerate launch` sets to 1 by default.
        arithmetic += f" by {torch.get_num_threads()} threads"

    step = f"{args.world_size} processes x {batch} x {num_passes} accumulation steps"
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    return f"{step} = global batch {num_samples}, {steps} in all; arithmetic in {arithmetic}"


def warn_if_never_logged(args: TrainingConfig, num_steps: int) -> None:
    """Warn that no step of the run will be logged, if it is so short."""
    if num_steps < args.logging_steps and not args.logging_first_step:
        logger.warning(
            "The run ends before step %g, the first that would be logged: give a smaller global_batch_size or "
            "logging_steps, or more epochs.",
            args.logging_steps,
        )


def describe_resuming(output_dir: Path) -> str:
    """How to resume a run that was stopped."""
    checkpoints = list_checkpoints(output_dir)
    if not checkpoints:
        return "There is no checkpoint yet."
    return f"Resume with the same command and --resume_from_checkpoint true, from {checkpoints[0].name}."


if __name__ == "__main__":
    with command():
        main()
