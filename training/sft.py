"""Train one stage of a NormLlava.

    accelerate launch training/sft.py --config training/recipes/Qwen2.5-7B-Instruct/stage1.yaml

Every field of the recipe can be given on the command line too, which wins. The output is a complete checkpoint folder;
for stage "adapt" it is an adapter, which training/merge.py turns into one.
"""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, IterableDataset
from transformers import AutoProcessor, LlavaProcessor, PreTrainedModel, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, TrlParser

import training.attention  # noqa: F401 - registers "varlen"
from conversations.chat_template import plain_template
from conversations.rows import load_rows
from modeling_normllava import NormLlavaForConditionalGeneration
from training.checkpoints import check_same_run, checkpoint_problem, newest_complete
from training.collator import VisionLanguageCollator
from training.data import pack_rows, read_rows
from training.environment import describe_environment
from training.stages import LearningRates, Stage, describe_stage, prepare_stage
from training.tokenization import RowTokenizer
from training.trainer import NormLlavaTrainer


logger = logging.getLogger(__name__)

CHOICES = {"stage": tuple(Stage), "bad_rows": ("error", "skip")}


@dataclass
class ScriptArguments:
    """What a run needs beside TRL's arguments."""

    model_name_or_path: str = field(metadata={"help": "NormLlava checkpoint to start from: folder or Hub id."})
    dataset_name: str = field(metadata={"help": "LLaVA JSON file, dataset folder or Hub id."})
    stage: Literal["align", "instruct", "adapt"] = field(metadata={"help": "What to train; see training/stages.py."})
    image_folder: str | None = field(
        default=None, metadata={"help": "Goes before the image paths of a JSON file; its own folder by default."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the data as it comes, in its own order; needs max_steps."}
    )
    vision_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the vision encoder; required in stage 'instruct'."}
    )
    norm_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the projector's norm; learning_rate by default."}
    )
    clip_by_module: bool = field(
        default=False, metadata={"help": "Clip each module's gradient to max_grad_norm, not that of all together."}
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Samples a step over all devices; sets gradient_accumulation_steps to what this takes."},
    )
    packed_length: int | None = field(
        default=None,
        metadata={"help": "Join samples into rows of at most this many tokens, instead of padding them."},
    )
    bad_rows: Literal["error", "skip"] = field(
        default="error", metadata={"help": "Stop at a bad row, or leave all of them out and list them in a file."}
    )
    attn_implementation: str = field(
        default="sdpa", metadata={"help": "Attention of the language model: 'varlen' for packed rows, 'sdpa', ..."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "Hold the language model in 4-bit NF4; for stage 'adapt'."}
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters of stage 'adapt'."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapters' output is scaled by lora_alpha / lora_r."})
    bf16_weights: bool = field(
        default=False,
        metadata={"help": "Hold trained weights in bfloat16 too, which loses small updates; to see what that does."},
    )
    probe_steps: int | None = field(
        default=None,
        metadata={"help": "Measure norms and turning by layer every so many steps, into dynamics.jsonl."},
    )
    probe_samples: int = field(default=16, metadata={"help": "Pictures to measure on: the data's first."})
    resume_changed: bool = field(
        default=False, metadata={"help": "Resume although data, batch or learning rate are not those of before."}
    )

    def __post_init__(self) -> None:
        # A recipe's values bypass the parser's own check of choices.
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.stage == Stage.INSTRUCT and self.vision_learning_rate is None:
            raise ValueError("Stage 'instruct' trains the vision encoder too: give vision_learning_rate.")
        if self.load_in_4bit and self.stage != Stage.ADAPT:
            raise ValueError("load_in_4bit goes with stage 'adapt' alone: 4-bit weights can't be trained.")
        if self.packed_length is None and self.attn_implementation == "varlen":
            raise ValueError("attn_implementation 'varlen' is for packed rows: give packed_length, or use 'sdpa'.")


@dataclass
class TrainingConfig(SFTConfig):
    """TRL's arguments, with defaults that don't lose data in silence."""

    max_length: int | None = field(
        default=None, metadata={"help": "Longest sample allowed, in tokens; a longer one is a bad row, none is cut."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off: rows are read when needed."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Off: every trained parameter has a gradient in every batch."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Off: a loss that is no number ends it."})


def check_arguments(script_args: ScriptArguments, args: TrainingConfig) -> None:
    """Refuse what does not go together before anything is loaded. Raises `ValueError`."""
    if args.packing or args.padding_free:
        raise ValueError("TRL packs text alone; give packed_length to pack rows with pictures.")
    if script_args.clip_by_module and args.deepspeed_plugin is not None:
        raise ValueError("DeepSpeed clips all gradients together by itself: leave clip_by_module.")
    if script_args.bf16_weights and (args.bf16 or script_args.load_in_4bit):
        raise ValueError("bf16_weights computes in bfloat16 throughout: leave bf16 and load_in_4bit.")
    if args.push_to_hub:
        raise ValueError(
            "push_to_hub would upload training_args.bin, which holds your token; upload the folder after."
        )
    if script_args.packed_length is not None and args.per_device_train_batch_size != 1:
        raise ValueError("With packed_length a device takes one row at a time: set per_device_train_batch_size to 1.")
    if script_args.streaming and args.max_steps <= 0:
        raise ValueError("The length of a stream is not known: give max_steps.")
    if script_args.streaming and script_args.packed_length is not None and script_args.global_batch_size is not None:
        raise ValueError(
            "Rows packed from a stream hold as many samples as fit, so no global_batch_size can be kept: give "
            "gradient_accumulation_steps, or leave streaming or packed_length."
        )
    if script_args.packed_length is not None and not script_args.streaming and script_args.global_batch_size is None:
        raise ValueError("Packed rows hold varying numbers of samples: give global_batch_size, the samples of a step.")
    if script_args.global_batch_size is not None and args.gradient_accumulation_steps != 1:
        raise ValueError("Give either global_batch_size or gradient_accumulation_steps, not both.")


def set_accumulation(args: TrainingConfig, global_batch_size: int | None) -> None:
    """Choose the accumulation steps that give the global batch on this many devices, for padded batches.

    Raises:
        ValueError: if it can't be met.
    """
    if global_batch_size is None:
        return
    per_pass = args.per_device_train_batch_size * args.world_size
    if global_batch_size % per_pass:
        raise ValueError(
            f"global_batch_size {global_batch_size} is no multiple of per_device_train_batch_size "
            f"{args.per_device_train_batch_size} times {args.world_size} processes; change one of them."
        )
    args.gradient_accumulation_steps = global_batch_size // per_pass


def find_checkpoint(args: TrainingConfig) -> Path | None:
    """Where to go on from: `resume_from_checkpoint: true` means the newest complete checkpoint, if there is one.

    Raises:
        ValueError: if the output folder holds a run and nothing says to go on with it, or a checkpoint that is named
            can't be resumed from.
    """
    output_dir = Path(args.output_dir)
    if str(args.resume_from_checkpoint).lower() == "true":
        with args.main_process_first(local=False, desc="looking for a checkpoint"):
            return newest_complete(output_dir, args.process_index == 0)
    if args.resume_from_checkpoint is not None:
        checkpoint = Path(args.resume_from_checkpoint)
        problem = checkpoint_problem(checkpoint)
        if problem is not None:
            raise ValueError(f"{checkpoint} can't be resumed from: {problem}.")
        return checkpoint
    if any(output_dir.glob("checkpoint-*")) or any(output_dir.glob("*config.json")):
        raise ValueError(
            f"output_dir {args.output_dir} already holds a run. Go on with it by --resume_from_checkpoint true, or "
            "choose another folder."
        )
    return None


def load_model(script_args: ScriptArguments, args: TrainingConfig) -> NormLlavaForConditionalGeneration:
    """The model to start from: float32, but for a language model in 4 bits."""
    # ZeRO-3 would share the weights out while loading, before the stage has looked at them.
    unset_hf_deepspeed_config()
    options: dict[str, Any] = {"dtype": torch.float32}
    if script_args.load_in_4bit:
        from training.adapters import quantization_config  # needs the extra "qlora"

        options = {
            "dtype": torch.bfloat16 if args.bf16 else torch.float32,
            "quantization_config": quantization_config(torch.bfloat16 if args.bf16 else torch.float32),
            "device_map": {"": args.device},
        }
    model = NormLlavaForConditionalGeneration.from_pretrained(
        script_args.model_name_or_path,
        # Packing concerns the language model alone.
        attn_implementation={"text_config": script_args.attn_implementation, "vision_config": "sdpa"},
        **options,
    )
    name_sharding_units(model)
    return model


def name_sharding_units(model: PreTrainedModel) -> None:
    """Leave the names of modules that the model has in `_no_split_modules`, which FSDP2 shards one by one.

    A vision encoder names its whole family's, text encoder included, and accelerate refuses names that it can't find.
    """
    present = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = sorted(present & set(model._no_split_modules or ()))


def describe_run(script_args: ScriptArguments, args: TrainingConfig, data: str) -> dict[str, Any]:
    """What the weights of a run depend on; a resumed run must be made of the same."""
    names = ("model_name_or_path", "stage", "packed_length", "streaming", "load_in_4bit", "lora_r", "lora_alpha")
    rates = ("vision_learning_rate", "norm_learning_rate", "clip_by_module", "global_batch_size", "bf16_weights")
    trl_names = (
        "seed", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
        "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16",
    )  # fmt: skip
    return {
        "data": data,
        "num_processes": args.world_size,
        **{name: getattr(script_args, name) for name in names + rates},
        **{name: getattr(args, name) for name in trl_names},
    }


def main() -> None:
    """Run the command line."""
    script_args, args = TrlParser((ScriptArguments, TrainingConfig)).parse_args_and_config()
    logging.basicConfig(level=logging.INFO if args.process_index == 0 else logging.ERROR, format="%(message)s")
    check_arguments(script_args, args)
    if script_args.packed_length is None:
        set_accumulation(args, script_args.global_batch_size)
    checkpoint = find_checkpoint(args)
    environment = describe_environment(args.world_size, resumed=checkpoint is not None)
    stage = Stage(script_args.stage)

    processor: LlavaProcessor = AutoProcessor.from_pretrained(script_args.model_name_or_path)
    template = (
        plain_template(processor.tokenizer, processor.image_token) if stage is Stage.ALIGN else processor.chat_template
    )
    tokenize = RowTokenizer(processor, template, args.max_length)
    rows, data = read_rows(script_args, args, tokenize)
    rows, sampler = pack_rows(script_args, args, rows)
    run = describe_run(script_args, args, data)
    if checkpoint is not None and not script_args.resume_changed:
        check_same_run(checkpoint, run)

    model = load_model(script_args, args)
    trained: Any = model
    if stage is Stage.ADAPT:
        from training.adapters import add_adapters  # needs the extra "qlora"

        torch.manual_seed(args.seed)
        trained = add_adapters(model, script_args.lora_r, script_args.lora_alpha)
    rates = LearningRates(
        common=args.learning_rate,
        vision=script_args.vision_learning_rate or 0.0,
        norm=script_args.norm_learning_rate or args.learning_rate,
    )
    groups = prepare_stage(
        model,
        stage,
        rates,
        frozen_dtype=torch.bfloat16 if args.bf16 or script_args.bf16_weights else torch.float32,
        trained_dtype=torch.bfloat16 if script_args.bf16_weights else torch.float32,
    )
    trainer = NormLlavaTrainer(
        trained,
        groups,
        run,
        environment=environment,
        sampler=sampler,
        clip_by_module=script_args.clip_by_module,
        args=args,
        train_dataset=rows,
        processing_class=processor,
        data_collator=VisionLanguageCollator(tokenize, packed=script_args.packed_length is not None),
    )
    if script_args.probe_steps is not None:
        trainer.add_callback(watch_dynamics(script_args, args, model, processor))
    logger.info("%s", describe_stage(stage, groups))
    logger.info("%s", describe_batch(script_args, args, rows))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    trainer.save_model()
    trainer.save_state()
    if args.process_index == 0:
        copy_prose(Path(args.output_dir))
    logger.info("Saved to %s", args.output_dir)


def copy_prose(output_dir: Path) -> None:
    """Put the model card's prose that lies beside the recipe, if there is one, beside the model."""
    if "--config" in sys.argv:  # which the parser does not hand on
        prose = Path(sys.argv[sys.argv.index("--config") + 1]).with_name("card.yaml")
        if prose.exists():
            (output_dir / prose.name).write_bytes(prose.read_bytes())


def watch_dynamics(
    script_args: ScriptArguments,
    args: TrainingConfig,
    model: NormLlavaForConditionalGeneration,
    processor: LlavaProcessor,
) -> TrainerCallback:
    """The callback that measures the model on the data's first pictures while it is trained."""
    from diagnostics.dynamics import FILE, DynamicsCallback  # needs the extra "diagnostics"
    from diagnostics.loading import take_questions

    assert script_args.probe_steps is not None
    rows = load_rows(
        script_args.dataset_name,
        script_args.image_folder,
        script_args.dataset_config,
        script_args.dataset_split,
        script_args.streaming,
    )
    questions, _ = take_questions(rows, script_args.probe_samples, script_args.dataset_name)
    return DynamicsCallback(model, processor, questions, script_args.probe_steps, Path(args.output_dir) / FILE)


def describe_batch(script_args: ScriptArguments, args: TrainingConfig, rows: Dataset | IterableDataset) -> str:
    """The line that training prints: how many rows there are, and how many a step takes on how many processes."""
    size = "a stream of" if isinstance(rows, IterableDataset) else f"{len(rows)}"
    steps = args.world_size * args.gradient_accumulation_steps
    if script_args.packed_length is None:
        batch = f"{args.per_device_train_batch_size} rows"
        total = f"global batch {steps * args.per_device_train_batch_size}"
    else:
        batch = f"1 packed row of up to {script_args.packed_length} tokens"
        samples = script_args.global_batch_size
        total = f"global batch {samples} in {steps} packed rows" if samples else f"{steps} packed rows a step"
    return (
        f"{size} rows; {args.world_size} processes x {batch} x {args.gradient_accumulation_steps} accumulation steps "
        f"= {total}"
    )


if __name__ == "__main__":
    main()
