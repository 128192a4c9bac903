"""Train one stage of a NormLlava.

    accelerate launch training/sft.py --config training/recipes/Qwen2.5-7B-Instruct/stage1.yaml

Every field of the recipe can be given on the command line too, which wins. The output is a complete checkpoint folder.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoProcessor, LlavaProcessor
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, TrlParser

from modeling_normllava import NormLlavaForConditionalGeneration
from training.chat_template import plain_template
from training.collator import VisionLanguageCollator
from training.data import check_rows, load_rows
from training.stages import Stage, describe_stage, prepare_stage
from training.trainer import NormLlavaTrainer


logger = logging.getLogger(__name__)


@dataclass
class ScriptArguments:
    """What a run needs beside TRL's arguments."""

    model_name_or_path: str = field(metadata={"help": "NormLlava checkpoint to start from: folder or Hub id."})
    dataset_name: str = field(metadata={"help": "LLaVA JSON file, dataset folder or Hub id."})
    stage: Literal["align", "instruct"] = field(metadata={"help": "What to train; see training/stages.py."})
    image_folder: str | None = field(
        default=None, metadata={"help": "Goes before the image paths of a JSON file; its own folder by default."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset."})
    vision_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the vision encoder; required in stage 'instruct'."}
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Samples a step over all devices; sets gradient_accumulation_steps to what this takes."},
    )
    bad_rows: Literal["error", "skip"] = field(
        default="error", metadata={"help": "Stop at a bad row, or leave all of them out and list them in a file."}
    )
    attn_implementation: str = field(default="sdpa", metadata={"help": "Attention, as in `from_pretrained`."})

    def __post_init__(self) -> None:
        # A recipe's values bypass the parser's own check of choices.
        for name, allowed in (("stage", ("align", "instruct")), ("bad_rows", ("error", "skip"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.stage == "instruct" and self.vision_learning_rate is None:
            raise ValueError("Stage 'instruct' trains the vision encoder too: give vision_learning_rate.")


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's arguments, with defaults that don't lose data in silence."""

    max_length: int | None = field(
        default=None, metadata={"help": "Longest row allowed, in tokens; a longer one is an error, none is cut."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off: rows are read when needed."})


def set_accumulation(args: TrainingConfig, global_batch_size: int | None) -> None:
    """Choose the accumulation steps that give the global batch on this many devices.

    Raises:
        ValueError: if it can't be met, or is stated twice.
    """
    if global_batch_size is None:
        return
    if args.gradient_accumulation_steps != 1:
        raise ValueError("Give either global_batch_size or gradient_accumulation_steps, not both.")
    per_pass = args.per_device_train_batch_size * args.world_size
    if global_batch_size % per_pass:
        raise ValueError(
            f"global_batch_size {global_batch_size} is no multiple of per_device_train_batch_size "
            f"{args.per_device_train_batch_size} times {args.world_size} processes; change one of them."
        )
    args.gradient_accumulation_steps = global_batch_size // per_pass


def find_checkpoint(args: TrainingConfig) -> str | None:
    """Where to go on from: `resume_from_checkpoint: true` means the last checkpoint, if there is one yet.

    Raises:
        ValueError: if the output folder holds a run and nothing says to go on with it.
    """
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if str(args.resume_from_checkpoint).lower() == "true":
        return last
    if args.resume_from_checkpoint is None and (last or (Path(args.output_dir) / "config.json").exists()):
        raise ValueError(
            f"output_dir {args.output_dir} already holds a run. Go on with it by --resume_from_checkpoint true, or "
            "choose another folder."
        )
    return args.resume_from_checkpoint


def main() -> None:
    """Run the command line."""
    script_args, args = TrlParser((ScriptArguments, TrainingConfig)).parse_args_and_config()
    logging.basicConfig(level=logging.INFO if args.process_index == 0 else logging.ERROR, format="%(message)s")
    stage = Stage(script_args.stage)
    set_accumulation(args, script_args.global_batch_size)
    checkpoint = find_checkpoint(args)

    processor: LlavaProcessor = AutoProcessor.from_pretrained(script_args.model_name_or_path)
    with args.main_process_first(desc="reading the data"):
        rows = load_rows(
            script_args.dataset_name, script_args.image_folder, script_args.dataset_config, script_args.dataset_split
        )
        rows = check_rows(
            rows,
            processor.image_token,
            script_args.bad_rows,
            Path(args.output_dir) / "bad_rows.jsonl",
            args.dataset_num_proc,
        )

    model = NormLlavaForConditionalGeneration.from_pretrained(
        script_args.model_name_or_path, dtype=torch.float32, attn_implementation=script_args.attn_implementation
    )
    groups = prepare_stage(
        model,
        stage,
        args.learning_rate,
        script_args.vision_learning_rate or 0.0,
        frozen_dtype=torch.bfloat16 if args.bf16 else torch.float32,
    )
    template = (
        plain_template(processor.tokenizer, processor.image_token) if stage is Stage.ALIGN else processor.chat_template
    )
    trainer = NormLlavaTrainer(
        model,
        groups,
        args=args,
        train_dataset=rows,
        processing_class=processor,
        data_collator=VisionLanguageCollator(processor, template, args.max_length),
    )
    logger.info("%s", describe_stage(stage, groups))
    logger.info(
        "%d rows; %d processes x %d rows x %d accumulation steps = global batch %d",
        len(rows),
        args.world_size,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    logger.info("Saved to %s", args.output_dir)


if __name__ == "__main__":
    main()
