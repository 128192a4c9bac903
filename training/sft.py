"""Train one stage of a NormLlava.

    accelerate launch -q training/sft.py --config training/recipes/Qwen2.5-7B-Instruct/stage1.yaml

Every field of the recipe can be given on the command line too, which wins. The output is a complete checkpoint folder;
for stage "adapt" it is an adapter, which training/merge.py turns into one.
"""

import os

from common.errors import UserError


# Before torch is imported, whose OpenMP reads it then. Threads that spin while they wait make
# training on a CPU many times slower as soon as another process is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import logging
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoProcessor

from common.console import command
from conversations.chat_template import plain_template
from conversations.measured import RowCheck
from conversations.tokens import RowTokenizer
from training.arguments import RunArguments, TrainingConfig, check_devices, parse_arguments
from training.arguments import build_parser as build_parser  # docs/reference.py asks the command for it
from training.attention import default_attention
from training.batches import deal_held_out, deal_rows, require_separate_samples
from training.checkpoints import check_weights, checkpoints, find, lock, recorded_argument, restore, steps_done
from training.collator import VisionLanguageCollator
from training.data import read_held_out, read_rows, require_pictures
from training.key_alignment import KeyAlignment
from training.loading import load_base, load_config, prepare_model
from training.run import Run, check_same_run, describe_environment, describe_run
from training.stages import Stage, describe_stage
from training.streams import StreamBatches
from training.trainer import NormLlavaTrainer


logger = logging.getLogger(__name__)


def is_finished(run_args: RunArguments, args: TrainingConfig, run: Run, checkpoint: Path | None, steps: int) -> bool:
    """Whether a run has taken all of its steps, and its model is there. Raises `UserError` if the folder or the
    checkpoint is of another run, or there is nothing to resume from."""
    output_dir = Path(args.output_dir)
    # A checkpoint given by path is resumed from, whatever came after it.
    done = steps_done(output_dir) if args.resume_from_checkpoint is True else 0
    before = checkpoint or (output_dir if done else None)
    if before is not None and not run_args.resume_changed:
        check_same_run(before, run)
    if done >= steps:
        logger.info("%s holds a finished run of %d steps: there is nothing to do.", output_dir, done)
        return True
    if done and checkpoint is None:
        raise UserError(
            f"{output_dir} holds a run of {done} steps, but no checkpoint to continue from to step {steps}. Start "
            "from its model, with another output_dir."
        )
    return False


def train(run_args: RunArguments, args: TrainingConfig) -> None:
    """Read the rows, deal them into batches, prepare the model, train, and publish the result; nothing for a finished
    run."""
    output_dir, stage = Path(args.output_dir), Stage(str(run_args.stage))
    packed = run_args.packed_length is not None
    config = load_config(str(run_args.model_name_or_path), run_args.model_revision)
    if packed:
        require_separate_samples(config.text_config)
    checkpoint = find(output_dir, args.resume_from_checkpoint)
    if run_args.attn_implementation is None:
        before = recorded_argument(output_dir, args.resume_from_checkpoint, "attn_implementation")
        run_args.attn_implementation = before or default_attention(config.text_config, packed, args.device)

    processor = AutoProcessor.from_pretrained(run_args.model_name_or_path, revision=run_args.model_revision)
    plain = plain_template(processor.tokenizer, processor.image_token)
    template = plain if stage is Stage.ALIGN else processor.chat_template
    positions = getattr(config.text_config, "max_position_embeddings", None)
    tokenize = RowTokenizer(processor, template, max_length=args.max_length, max_positions=positions)
    logger.info("Reading and checking the rows ...")
    rows, data, sources = read_rows(run_args, args, tokenize)
    if stage is Stage.ALIGN:
        require_pictures(rows)
    held_out = read_held_out(run_args, args, tokenize)

    sampler, args.gradient_accumulation_steps = deal_rows(run_args, args, rows, tokenize.tokens_per_image)
    collate, stream, steps = VisionLanguageCollator(tokenize, packed), None, args.max_steps
    if sampler is None:
        stream = StreamBatches(rows, RowCheck(tokenize, run_args.open_pictures), collate, run_args.bad_rows, args)
    elif steps <= 0:  # as Trainer counts them
        steps = math.ceil(args.num_train_epochs * math.ceil(len(sampler) / args.gradient_accumulation_steps))
    environment = describe_environment(args.device.type, args.world_size, resumed=checkpoint is not None)
    run = describe_run({**vars(run_args), **args.to_dict()}, data, environment, run_args.recipe, sources)
    if is_finished(run_args, args, run, checkpoint, steps):
        return
    if checkpoint is not None:
        args.eval_on_start = False  # done at the first start
        if stream is not None:
            stream.go_on(checkpoint)
        if args.process_index == 0:
            restore(output_dir, checkpoint)

    logger.info("Loading the weights of %s ...", run_args.model_name_or_path)
    model = load_base(run_args, args)
    trained, groups = prepare_model(model, run_args, args, args.frozen_dtype)
    if checkpoint is not None:
        check_weights(checkpoint, trained)
    weights = (run_args.key_mmd_weight, run_args.key_gram_weight)
    key_alignment = KeyAlignment(model, processor, *weights) if any(weights) else None
    trainer = NormLlavaTrainer(
        trained,
        groups,
        run,
        sampler=sampler,
        stream=stream,
        eval_sampler=None if held_out is None else deal_held_out(args, len(held_out)),
        key_alignment=key_alignment,
        clip_by_module=run_args.clip_by_module,
        args=args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=processor,
        data_collator=collate,
    )
    logger.info("%s\n%s", describe_stage(stage, groups), describe_batch(run_args, args))
    del groups  # holds unsharded parameters, which sharding replaces
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model()
    logger.info("Saved to %s", output_dir)


def describe_batch(run_args: RunArguments, args: TrainingConfig) -> str:
    """What training prints: how many rows a step takes on how many processes, and in which arithmetic."""
    batch, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    samples = run_args.global_batch_size or batch * passes * args.world_size
    shape = f"{batch} rows" if run_args.packed_length is None else f"1 row of up to {run_args.packed_length} tokens"
    arithmetic = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    passes_of = f"{args.world_size} processes x {shape} x {passes} accumulation steps"
    threads = f" by {torch.get_num_threads()} threads" if args.device.type == "cpu" else ""  # accelerate gives it 1
    return f"{passes_of} = global batch {samples}; arithmetic in {arithmetic}{threads}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_args, args = parse_arguments(argv)
    check_devices(args)
    logging.basicConfig(format="%(message)s")  # for notebooks; the command line has done so
    logging.getLogger().setLevel(logging.INFO if args.process_index == 0 else logging.ERROR)
    output_dir = Path(args.output_dir)
    try:
        with lock(output_dir) if args.process_index == 0 else nullcontext():
            train(run_args, args)
    except KeyboardInterrupt:
        last = checkpoints(output_dir)[:1]
        way_on = "Resume with the same command and --resume_from_checkpoint true"
        logger.info("\nStopped. %s", f"{way_on}, from {last[0].name}." if last else "There is no checkpoint yet.")
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    with command():
        main()
