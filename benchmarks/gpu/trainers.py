"""Measures the arms that train, on the same rows: our command, TRL's trainer, or a loop of plain PyTorch."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers.trainer
from peft import LoraConfig
from transformers import AutoProcessor
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu.attention import cudnn_attention
from benchmarks.gpu.bare_loop import BareLoop
from benchmarks.gpu.models import make_model, make_plain_llava, quantize
from benchmarks.gpu.recorder import StepRecorder, TrainingMeasured
from benchmarks.gpu.results import Arm, Figures
from benchmarks.trl_rows import trl_dataset
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training import sft
from training.modules.adapters import quantization_config
from training.options.arguments import RunArguments, TrainingConfig


# The file of rows of each stage.
ROW_FILES = {"align": "captions.json", "instruct": "conversations.json", "adapt": "conversations.json"}
LORA = {"lora_r": 64, "lora_alpha": 16}
# LLaVA's format of stage 1 as a chat template for TRL: the picture, then the caption and a line break. TRL passes each
# message's content as a list of pictures and texts.
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message["role"] == "assistant" -%}
        {%- generation -%}
            {{- message["content"][0]["text"] + "\\n" -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- for part in message["content"] if part["type"] == "image" -%}
            {{- "<image>" -}}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Workplace:
    """The folder, the device and the sizes that all arms of a part share."""

    folder: Path
    """Folder of the rows and pictures. Its subfolder `model` holds the config and the processor."""
    config: NormLlavaConfig
    device: torch.device
    rows_per_step: int
    rows_per_pass: int
    """Number of padded rows in a forward pass. A pass takes only one packed row."""
    num_workers: int
    """Number of the data loader's workers, in arms that use workers."""
    compile_backend: str
    """Backend of `torch.compile`, in arms with compiled layers."""


@dataclass(frozen=True)
class Training:
    """The options of an arm: which trainer trains which stage, and how."""

    trainer: Literal["ours", "TRL", "bare"]
    """Our command, TRL's trainer, or the loop of plain PyTorch."""
    stage: Literal["align", "instruct", "adapt"]
    """Stage 1, stage 2 with all weights, or stage 2 with LoRA."""
    steps: int
    """Number of steps, those of the warm-up included. Another one is profiled."""
    warmup: int
    """Number of steps at the beginning that are not measured."""
    packed_length: int | None = None
    """The largest number of tokens in a packed row. With `None`, rows are padded instead."""
    attention: str = "sdpa"
    """The decoder's implementation of attention."""
    checkpointing: bool = True
    """Whether to use gradient checkpointing, as TRL does by default."""
    workers: bool = False
    """Whether the data loader has workers. `Workplace.num_workers` is their number."""
    compiled: bool = False
    """Whether layers are compiled: by our command, or for TRL's trainer by accelerate. The bare loop always does."""
    cudnn: bool = True
    """Whether sdpa may use cuDNN, as torch does by default on these GPUs."""
    optimizer: str = "adamw_torch_fused"
    fields: dict[str, Any] = field(default_factory=dict)
    """More fields of our command's config."""


def training_arm(name: str, training: Training, workplace: Workplace, compared_with: str | None = None) -> Arm:
    """An arm that measures this training. `compared_with` is the name of another arm."""
    # In the settings, `workers` is the number of workers.
    settings = vars(training) | {
        "rows_per_step": workplace.rows_per_step,
        "rows_per_pass": None if training.packed_length else workplace.rows_per_pass,
        "workers": workplace.num_workers if training.workers else 0,
    }
    return Arm(name, lambda: measure_training(training, workplace), settings, compared_with)


def measure_training(training: Training, workplace: Workplace) -> Figures:
    """Train, and return the recorder's figures."""
    clean_up()
    if training.trainer == "bare":
        recorder: StepRecorder = BareLoop(training.warmup, training.steps, workplace.compile_backend)
    else:
        recorder = StepRecorder(training.warmup, training.steps)

    # Our command makes its own trainer, so the recorder becomes a default callback of all trainers.
    transformers.trainer.DEFAULT_CALLBACKS.append(recorder)
    try:
        with cudnn_attention(training.cudnn):
            if training.trainer == "TRL":
                train_trl(training, workplace)
            else:
                train_ours(training, workplace)
    except TrainingMeasured:  # how the recorder ends every training
        return recorder.figures
    finally:
        transformers.trainer.DEFAULT_CALLBACKS.remove(recorder)
    raise RuntimeError("The training ended without a figure.")


def clean_up() -> None:
    """Free the trainer of the arm before, and its compiled graphs, whose number is limited."""
    gc.collect()  # a trainer refers to itself, so only this frees the trainer
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def common_fields(training: Training, workplace: Workplace) -> dict[str, Any]:
    """The fields of the config that TRL's trainer and ours have in common."""
    on_gpu = workplace.device.type == "cuda"
    fields = {"tf32": False} if on_gpu else {}  # TRL would turn it on for this and all later arms where it compiles
    return fields | {
        "output_dir": str(workplace.folder / "run"),
        "max_steps": training.steps + 1,
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "optim": training.optimizer,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": training.checkpointing,
        "dataloader_num_workers": workplace.num_workers if training.workers else 0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 10,
        "seed": 42,
    }


def train_ours(training: Training, workplace: Workplace) -> None:
    """Train by our command, in this process, on a model with random weights.

    The bare loop is started here too: it is a callback of our trainer, and takes our trainer's model and batches.
    """
    fields = {
        **common_fields(training, workplace),
        **training.fields,
        "stage": training.stage,
        "model_name_or_path": str(workplace.folder / "model"),
        "dataset_name": str(workplace.folder / ROW_FILES[training.stage]),
        "global_batch_size": workplace.rows_per_step,
        "per_device_train_batch_size": 1 if training.packed_length else workplace.rows_per_pass,
        "attn_implementation": training.attention,
    }
    if training.packed_length is not None:
        fields["packed_length"] = training.packed_length
    if training.stage == "instruct":
        fields["vision_learning_rate"] = 1e-5
    if training.stage == "adapt":
        fields |= LORA
    if training.compiled and training.trainer == "ours":  # the bare loop compiles the layers itself
        fields |= {"torch_compile": True, "torch_compile_backend": workplace.compile_backend}

    with random_weights_for_our_command(workplace.config):
        sft.main([f"--{name}={value}" for name, value in fields.items()])


@contextmanager
def random_weights_for_our_command(config: NormLlavaConfig) -> Iterator[None]:
    """Within the block, our command makes a model with random weights instead of loading a checkpoint."""

    def load_base(run_args: RunArguments, args: TrainingConfig) -> NormLlavaForConditionalGeneration:
        trains_all = run_args.stage == "instruct"
        dtype = torch.float32 if trains_all else args.frozen_dtype
        model = make_model(config, dtype, str(run_args.attn_implementation), args.device)
        if run_args.load_in_4bit:
            quantize(model, quantization_config(dtype), args.device)
        # As in training/folders/loading.py: torch wouldn't train the embedding of `padding_idx`.
        model.get_input_embeddings().padding_idx = None
        reset_peak_memory()
        return model

    usual_load_base = sft.load_base
    sft.load_base = load_base
    try:
        yield
    finally:
        sft.load_base = usual_load_base


def reset_peak_memory() -> None:
    """Forget the peak of memory so far, so that making the model doesn't count."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train_trl(training: Training, workplace: Workplace) -> None:
    """Train plain Llava on padded rows with TRL's trainer, as TRL's documentation does for pictures."""
    lora = None
    if training.stage == "adapt":
        lora = LoraConfig(
            r=LORA["lora_r"],
            lora_alpha=LORA["lora_alpha"],
            # All linear layers of the decoder, such as model.language_model.layers.0.self_attn.q_proj.
            target_modules=r"model\.language_model\.layers\..*\.(q|k|v|o|gate|up|down)_proj",
            modules_to_save=["multi_modal_projector"],
            task_type="CAUSAL_LM",
        )

    # With LoRA on a GPU, the frozen weights are bfloat16, as in our command.
    is_bfloat16 = lora is not None and workplace.device.type == "cuda"
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    model = make_plain_llava(workplace.config, dtype, workplace.device)
    reset_peak_memory()
    processor = AutoProcessor.from_pretrained(workplace.folder / "model")
    if training.stage == "align":
        model.requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)
        processor.chat_template = PLAIN_TEMPLATE

    rows = json.loads((workplace.folder / ROW_FILES[training.stage]).read_text(encoding="utf-8"))
    fields = common_fields(training, workplace)
    if training.compiled:
        fields |= {"torch_compile": True, "torch_compile_backend": workplace.compile_backend}
    args = SFTConfig(
        **fields,
        max_length=None,
        remove_unused_columns=False,
        assistant_only_loss=True,
        per_device_train_batch_size=workplace.rows_per_pass,
        gradient_accumulation_steps=workplace.rows_per_step // workplace.rows_per_pass,
        train_sampling_strategy="sequential",  # `trl_dataset` has put the rows in order
    )
    with compiling_by_layer():
        trainer = SFTTrainer(
            model,
            args,
            train_dataset=trl_dataset(rows, workplace.folder, args.seed),
            processing_class=processor,
            peft_config=lora,
        )
    trainer.train()


@contextmanager
def compiling_by_layer() -> Iterator[None]:
    """Within the block, a trainer that compiles is told to compile each layer by itself, for rows of any length.

    Otherwise accelerate would compile the model as a whole. `accelerate launch` sets these variables by its options
    `--dynamo_use_regional_compilation` and `--dynamo_use_dynamic`.
    """
    names = ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "ACCELERATE_DYNAMO_USE_DYNAMIC")
    os.environ.update(dict.fromkeys(names, "true"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
