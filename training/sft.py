"""Train one stage of a NormLlava.

    accelerate launch training/sft.py --config training/recipes/Qwen2.5-7B-Instruct/stage1.yaml

Every field of the recipe can be given on the command line too, which wins. The output is a complete checkpoint folder;
for stage "adapt" it is an adapter, which training/merge.py turns into one.
"""

import json
import logging
import math
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import AutoProcessor, LlavaProcessor
from transformers.trainer_pt_utils import BatchRebalanceSampler

import training.attention  # noqa: F401 - registers "varlen"
from conversations.chat_template import plain_template
from conversations.measured import RowCheck
from conversations.tokens import RowTokenizer
from diagnostics.loading import Question, take_questions
from diagnostics.parts import NoVisualTokensError
from modeling_normllava import NormLlavaConfig
from training.arguments import RunArguments, TrainingConfig, parse_arguments
from training.batches import deal_held_out, deal_rows, require_separate_samples
from training.checkpoints import (
    STATE_FILE,
    best_checkpoint,
    checkpoint_problem,
    checkpoints,
    lock,
    newest_complete,
    publish_checkpoint,
    steps_done,
    supersede,
)
from training.collator import VisionLanguageCollator
from training.data import BAD_ROWS_FILE, read_held_out, read_rows
from training.environment import describe_environment
from training.flops import MfuMeter, device_peak
from training.held_out import HeldOutQuestions
from training.key_alignment import KeyAlignment
from training.loading import load_base, make_room, prepare_model
from training.memory import describe_plan, finish_plan, largest_batch, start_plan
from training.mixture import describe_sources
from training.model_type import require_model_type
from training.phases import phase, with_size
from training.run import Run, check_same_run, describe_run
from training.stages import Stage, describe_stage
from training.streams import StreamBatches
from training.trainer import NormLlavaTrainer


logger = logging.getLogger(__name__)


def find_checkpoint(args: TrainingConfig) -> Path | None:
    """Where to resume from: `resume_from_checkpoint: true` means the newest complete checkpoint, if there is one.

    Raises:
        ValueError: if the output folder holds a model that is not a run's, or a run that is not to be resumed, or a
            given checkpoint can't be resumed from.
    """
    output_dir, checkpoint = Path(args.output_dir), None
    holds_run = steps_done(output_dir) > 0 or any(output_dir.glob("checkpoint-*"))
    if not holds_run and any(output_dir.glob("*config.json")):
        raise ValueError(
            f"output_dir {output_dir} holds a model, and no run that could be resumed: choose another folder."
        )
    if args.resume_from_checkpoint is True:
        with args.main_process_first(local=False, desc="looking for a checkpoint"):
            return newest_complete(output_dir, args.process_index == 0)
    if args.resume_from_checkpoint is not None:
        checkpoint = Path(str(args.resume_from_checkpoint))
        problem = checkpoint_problem(checkpoint)
        if problem is not None:
            raise ValueError(f"{checkpoint} can't be resumed from: {problem}.")
    is_own = checkpoint is not None and checkpoint.resolve().parent == output_dir.resolve()
    if holds_run and not is_own:
        raise ValueError(
            f"output_dir {args.output_dir} already holds a run. Resume it with --resume_from_checkpoint true, or "
            "choose another folder."
        )
    return checkpoint


def steps_per_epoch(args: TrainingConfig, sampler: BatchRebalanceSampler) -> int:
    """Optimizer steps of an epoch, as Trainer counts them."""
    return math.ceil(len(sampler) / args.gradient_accumulation_steps)


def count_steps(args: TrainingConfig, sampler: BatchRebalanceSampler | None) -> int:
    """Optimizer steps of the whole run, as Trainer counts them."""
    if args.max_steps > 0 or sampler is None:
        return args.max_steps
    return math.ceil(args.num_train_epochs * steps_per_epoch(args, sampler))


def check_delay(args: TrainingConfig, num_steps: int, sampler: BatchRebalanceSampler | None) -> None:
    """Raises `ValueError` if a run ends before `eval_delay`, which would leave it without any evaluation."""
    unit, end = "steps", float(num_steps)
    if args.eval_strategy == "epoch" and sampler is not None:  # a stream has no epochs
        unit, end = "epochs", num_steps / steps_per_epoch(args, sampler)
    if args.eval_strategy != "no" and args.eval_delay > end:
        raise ValueError(f"eval_delay {args.eval_delay:g}: the run ends earlier, after {end:g} {unit}.")


def finish(
    run_args: RunArguments,
    args: TrainingConfig,
    run: Run,
    checkpoint: Path | None,
    num_steps: int,
    stream: StreamBatches | None = None,
) -> bool:
    """Whether a run has taken all of its steps; then its model is published. Otherwise prepares to resume, if asked.

    Raises:
        ValueError: if the folder or the checkpoint is of another run or its place in the stream does not fit, or there
            is nothing to resume from.
    """
    output_dir, is_main_process = Path(args.output_dir), args.process_index == 0
    # A checkpoint given by path is resumed from, whatever came after it.
    done = steps_done(output_dir) if args.resume_from_checkpoint is True else 0
    before = checkpoint or (output_dir if done else None)
    if before is None:
        return False
    if not run_args.resume_changed:
        check_same_run(before, run)
    if done >= num_steps:
        logger.info("%s holds a finished run of %d steps: there is nothing to do.", output_dir, done)
        return True
    if checkpoint is None:
        raise ValueError(
            f"{output_dir} holds a run of {done} steps, but no checkpoint to continue from to step {num_steps}. Start "
            "from its model, with another output_dir."
        )
    state, result = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")), checkpoint
    ends = state["global_step"] >= num_steps
    if args.load_best_model_at_end and (ends or state["best_global_step"] is not None):
        result = best_checkpoint(state, output_dir)
    if not ends:
        if stream is not None:
            stream.go_on(checkpoint)
        if is_main_process:
            supersede(output_dir, checkpoint)
        return False
    if is_main_process:
        publish_checkpoint(result, output_dir, state, Run.read(checkpoint).environment.resumed)
    logger.info("%s is the end of the run; its model is now in %s", checkpoint, output_dir)
    return True


def train(run_args: RunArguments, args: TrainingConfig) -> None:
    """Read the data, prepare the model, train, and publish the result; for a finished run, only publish."""
    require_model_type(str(run_args.model_name_or_path), "normllava", run_args.model_revision)
    if run_args.packed_length is not None:
        config = NormLlavaConfig.from_pretrained(run_args.model_name_or_path, revision=run_args.model_revision)
        require_separate_samples(config.text_config)
    checkpoint = find_checkpoint(args)
    environment = describe_environment(args.device.type, args.world_size, resumed=checkpoint is not None)
    stage = Stage(str(run_args.stage))
    processor: LlavaProcessor = AutoProcessor.from_pretrained(
        run_args.model_name_or_path, revision=run_args.model_revision
    )
    template = (
        plain_template(processor.tokenizer, processor.image_token) if stage is Stage.ALIGN else processor.chat_template
    )
    tokenize = RowTokenizer(processor, template, args.max_length)
    with phase("Reading and checking " + ", ".join(with_size(source.path) for source in run_args.sources)):
        rows, data, sources = read_rows(run_args, args, tokenize)
    if run_args.datasets is not None and sources:
        logger.info("%s", describe_sources(sources, args.seed if args.data_seed is None else args.data_seed))
    sampler, args.gradient_accumulation_steps = deal_rows(run_args, args, rows, tokenize.tokens_per_image)
    collate = VisionLanguageCollator(tokenize, packed=run_args.packed_length is not None)
    stream = None
    if isinstance(rows, IterableDataset):
        stream = StreamBatches(
            rows,
            RowCheck(tokenize, run_args.open_pictures),
            collate,
            args.per_device_train_batch_size,
            run_args.packed_length,
            run_args.bad_rows,
            Path(args.output_dir) / BAD_ROWS_FILE,
            args.process_index,
            args.world_size,
            args.dataloader_num_workers,
        )
    held_out, held_out_data = read_held_out(run_args, args, tokenize)
    eval_sampler = None
    if held_out is not None:
        eval_sampler = deal_held_out(run_args, args, held_out, tokenize.tokens_per_image)
    run = describe_run(run_args, args, data, environment, held_out_data, sources)

    num_steps = count_steps(args, sampler)
    check_delay(args, num_steps, sampler)
    if finish(run_args, args, run, checkpoint, num_steps, stream):
        return

    planning = None
    if args.device.type == "cuda" and args.process_index == 0 and sampler is not None and isinstance(rows, Dataset):
        planning = start_plan(run_args, args, largest_batch(rows, sampler, run_args.packed_length is not None))
    probed = []
    if run_args.probe_steps is not None:
        probed = probe_questions(run_args, rows if stream is None else stream.good_rows(stream.rows))
    with phase("Loading the weights of " + with_size(str(run_args.model_name_or_path), "*.safetensors")):
        model = load_base(run_args, args)
    trained, groups = prepare_model(model, run_args, args)
    make_room(trained)
    questions = None
    if held_out is not None and run_args.eval_samples > 0:
        rows_to_answer = held_out.select(range(min(run_args.eval_samples, len(held_out))))
        questions = HeldOutQuestions(rows_to_answer, collate, args.per_device_eval_batch_size, stage is Stage.ALIGN)
    peak = device_peak(args.device)
    trainer = NormLlavaTrainer(
        trained,
        groups,
        run,
        sampler=sampler,
        stream=stream,
        eval_sampler=eval_sampler,
        questions=questions,
        key_alignment=KeyAlignment.from_arguments(model, processor, run_args),
        mfu=None if peak is None else MfuMeter(model, stage, peak),
        clip_by_module=run_args.clip_by_module,
        args=args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=processor,
        data_collator=collate,
    )
    if run_args.probe_steps is not None:
        from diagnostics.dynamics import FILE  # needs the extra "diagnostics"
        from training.dynamics import DynamicsCallback

        path = Path(args.output_dir) / FILE
        trainer.add_callback(DynamicsCallback(model, processor, probed, run_args.probe_steps, path, trainer.leave_out))
    logger.info("%s", describe_stage(stage, groups))
    del groups  # holds unsharded parameters, which sharding replaces
    logger.info("%s", describe_batch(run_args, args, rows))
    if planning is not None:
        available = torch.cuda.get_device_properties(args.device).total_memory
        logger.info("%s", describe_plan(finish_plan(planning), available))
    if args.world_size > 1:
        logger.info("Distributing the model to %d processes ...", args.world_size)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    trainer.save_model()
    logger.info("Saved to %s", args.output_dir)


def probe_questions(run_args: RunArguments, rows: Iterable[Any]) -> list[Question]:
    """The first different pictures of the good rows with their questions, for `probe_steps`.

    Raises:
        ValueError: if the rows have no pictures.
    """
    names = ", ".join(source.path for source in run_args.sources)
    try:
        return take_questions(rows, run_args.probe_samples, names).questions
    except NoVisualTokensError as error:
        raise ValueError(f"probe_steps: {error}") from error


def describe_batch(run_args: RunArguments, args: TrainingConfig, rows: Dataset | IterableDataset) -> str:
    """The line that training prints: how many rows there are, and how many a step takes on how many processes."""
    size = "a stream of" if isinstance(rows, IterableDataset) else f"{len(rows)}"
    steps = args.world_size * args.gradient_accumulation_steps
    if run_args.packed_length is None:
        batch = f"{args.per_device_train_batch_size} rows"
        total = f"global batch {steps * args.per_device_train_batch_size}"
    else:
        batch = f"1 packed row of up to {run_args.packed_length} tokens"
        samples = run_args.global_batch_size
        total = f"global batch {samples} in {steps} packed rows" if samples else f"{steps} packed rows a step"
    return (
        f"{size} rows; {args.world_size} processes x {batch} x {args.gradient_accumulation_steps} accumulation steps "
        f"= {total}"
    )


def interrupt_quietly() -> None:
    """Raise `KeyboardInterrupt` in this process only: workers that it forks end with it, silently."""
    owner = os.getpid()

    def interrupt(signum: int, frame: Any) -> None:
        if os.getpid() == owner:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_args, args = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO if args.process_index == 0 else logging.ERROR, format="%(message)s")
    # It would warn on every last batch that rows were repeated, which never happens here.
    logging.getLogger("accelerate.accelerator").setLevel(logging.ERROR)
    interrupt_quietly()
    output_dir = Path(args.output_dir)
    try:
        if args.process_index > 0:
            train(run_args, args)
            return
        with lock(output_dir):
            train(run_args, args)
    except KeyboardInterrupt:
        last = checkpoints(output_dir)[:1]
        way_on = "Resume with the same command and --resume_from_checkpoint true"
        logger.info("\nStopped. %s", f"{way_on}, from {last[0].name}." if last else "There is no checkpoint yet.")
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
