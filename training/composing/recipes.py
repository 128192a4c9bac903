"""Writes a recipe of each stage for a composed model, after the recipes of the paper (arXiv 2512.08374, App. E.1).

The paper trains language models of two sizes, at the same rates and batches. A model of another size gets the recipes
of the nearer one. The length of packed rows is this project's choice, by what fits on a GPU.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import LlavaConfig

from training.modules.stages import Stage
from training.plan import GIB, Batch, StepPlan, describe_time, make_batch, parse_for_gpu, plan_step
from training.rows.batches import mixes_samples


@dataclass(frozen=True)
class PaperModel:
    """A language model that the paper trains."""

    name: str
    weights: float
    """The number of its weights, in billions."""
    packed_lengths: dict[Stage, int]
    """The length of packed rows in each stage, in tokens."""


PAPER_MODELS = (
    PaperModel("Llama-3.2-3B", 3.2, {Stage.ALIGN: 16384, Stage.INSTRUCT: 16384, Stage.ADAPT: 8192}),
    PaperModel("Qwen2.5-7B", 7.6, {Stage.ALIGN: 16384, Stage.INSTRUCT: 8192, Stage.ADAPT: 4096}),
)
# A size that differs by less is one of the paper's.
SAME_SIZE = 0.1

# The recipes below the comments at their heads. `optional` is a line that not every model needs, or nothing.
TEMPLATES = {
    Stage.ALIGN: """\
model_name_or_path: {start}
{data}
stage: align
output_dir: {output_dir}

num_train_epochs: 1
global_batch_size: 256           # samples a step: the paper's, whatever the number of devices
{align_rate}{optional}{schedule}
max_grad_norm: 1.0               # the default of LLaVA's trainer; the paper names none

{machine}""",
    Stage.INSTRUCT: """\
model_name_or_path: {start}
{data}
stage: instruct
output_dir: {output_dir}

num_train_epochs: 1
global_batch_size: 128           # samples a step: the paper's, whatever the number of devices
learning_rate: 1.0e-5
vision_learning_rate: 2.0e-6
{optional}{schedule}
max_grad_norm: 1.0               # the default of LLaVA's trainer; the paper names none

{machine}""",
    Stage.ADAPT: """\
model_name_or_path: {start}
{data}
stage: adapt
output_dir: {output_dir}

# load_in_4bit: true             # QLoRA, for a smaller card; needs pip install -e ".[train]"
lora_r: 64                       # rank, alpha and rate are QLoRA's (arXiv 2305.14314); the paper trains no LoRA
lora_alpha: 16

num_train_epochs: 1
global_batch_size: 128           # samples a step, as in stage 2
learning_rate: 2.0e-4
{optional}{schedule}
max_grad_norm: 1.0
clip_by_module: true             # otherwise the projector's far larger gradient would set the adapters' step

{machine}""",
}
SCHEDULE = """\
lr_scheduler_type: cosine
warmup_steps: 0.03               # fraction of all steps
weight_decay: 0.0"""
PACKED = """\
packed_length: {packed_length:<18}# samples share rows without padding; memory grows with it
per_device_train_batch_size: 1   # packed rows; the accumulation steps follow from the global batch
"""
PADDED = """\
per_device_train_batch_size: 4   # padded, since this decoder would mix samples of a packed row; memory grows with it
"""
MACHINE = """\
{rows}optim: adamw_torch_fused         # or adamw_bnb_8bit, without FSDP2: a quarter of the states; extra "train"
# torch_compile: true            # faster on a GPU, once each layer is compiled
dataset_num_proc: 8              # for checking and measuring the rows before training
logging_steps: 10
save_steps: 500                  # a killed run goes on with --resume_from_checkpoint true
save_total_limit: 2
report_to: none                  # or tensorboard, wandb, trackio; metrics.jsonl is always written
seed: 42
"""
NORM_RATE = "norm_learning_rate: 1.0e-5       # 2e-4 would move the norm's gain by over 1% a step\n"
ALIGN_RATE = "learning_rate: 1.0e-3\n"
SCALED_RATE = """\
# Not the paper's 1e-3, at which a scaled projector leaves the text's norm: in front of SmolLM2-135M its embeddings had
# 34 times as much after 60 steps, 3.8 times at 2e-4 and 1.3 times at 5e-5 (docs/own_trainer.md). Which is best isn't
# known.
learning_rate: 2.0e-4
"""
ALIGNED_RATE = """\
# Not the paper's 1e-3: this projector is aligned already, and at 5e-4 it forgot most of that in 60 steps, at a tenth
# of it little (docs/emoji.md, with adapters).
learning_rate: 5.0e-5
"""
ALIGNED_ADAPT = "projector_learning_rate: 5.0e-5  # it is aligned already, and at 5e-4 forgot that (docs/emoji.md)\n"
WHOLE_PICTURES = "max_tiles: 1                     # whole pictures: a caption says nothing of a corner\n"

# The paper's rows: where a recipe finds them, and how many there are.
PAPER_DATA = {
    Stage.ALIGN: (
        "# liuhaotian/LLaVA-Pretrain: this file, and its images.zip unpacked into image_folder\n"
        "dataset_name: data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json\n"
        "image_folder: data/LLaVA-Pretrain",
        558_128,
    ),
    Stage.INSTRUCT: ("dataset_name: lmms-lab/LLaVA-NeXT-Data", 780_000),
    Stage.ADAPT: ("dataset_name: lmms-lab/LLaVA-NeXT-Data", 780_000),
}
# A row's text as it is planned, in tokens: all of it, and what is supervised. A caption is shorter than an answer.
PLANNED_TEXT = {Stage.ALIGN: (32, 24), Stage.INSTRUCT: (295, 200), Stage.ADAPT: (295, 200)}
# The speed as it is planned, in FLOP/s: 40% of an H100's peak.
PLANNED_SPEED = 0.4 * 989e12

TITLES = {
    Stage.ALIGN: "Stage 1, the projector on captions",
    Stage.INSTRUCT: "Stage 2, all weights on conversations",
    Stage.ADAPT: "In place of stage 2, LoRA on conversations: the projector whole, the vision encoder frozen",
}
LAUNCHERS = {Stage.ALIGN: "ddp.yaml", Stage.INSTRUCT: "fsdp2.yaml", Stage.ADAPT: "ddp.yaml"}


@dataclass(frozen=True)
class Composition:
    """A composed model, as its recipes need to know it."""

    folder: Path
    """The model's folder. The recipes stand in it too, and each stage writes into a folder inside."""
    command: Sequence[str]
    """The options of `training/compose.py` that made the model."""
    projector_scaled: bool
    """Whether the projector starts scaled to the text's norm."""
    projector_aligned: bool
    """Whether the projector was aligned with captions before training."""
    config: LlavaConfig
    text_weights: int
    """The number of the language model's weights."""
    max_tiles: int
    """The most tiles of a picture's grid; 1 if pictures aren't cut."""
    captions: str | None
    """The user's own rows for stage 1; `None` for the paper's."""
    data: str | None
    """The user's own rows for the other stages; `None` for the paper's."""
    image_folder: str | None
    """The prefix of the image paths in the user's own rows."""

    def own_rows(self, stage: Stage) -> str | None:
        """The user's own rows for a stage; `None` for the paper's."""
        return self.captions if stage is Stage.ALIGN else self.data


def plan_recipes(composed: Composition) -> dict[str, str]:
    """The text of each stage's recipe, by the file's name: `align.yaml`, `instruct.yaml` and `adapt.yaml`."""
    return {f"{stage}.yaml": describe_recipe(composed, stage) + recipe_fields(composed, stage) for stage in Stage}


def recipe_fields(composed: Composition, stage: Stage) -> str:
    """The fields of a stage's recipe, as YAML with comments."""
    start = composed.folder if stage is Stage.ALIGN else composed.folder / Stage.ALIGN
    data, _ = PAPER_DATA[stage]
    own_rows = composed.own_rows(stage)
    if own_rows is not None:
        data = f"dataset_name: {yaml_text(own_rows)}"
        if composed.image_folder is not None:
            data += f"\nimage_folder: {yaml_text(composed.image_folder)}"

    optional = ""
    has_norm = getattr(composed.config, "projector_norm", "none") != "none"
    if stage is Stage.ADAPT and has_norm:
        optional = NORM_RATE
    if stage is Stage.ADAPT and composed.projector_aligned:
        optional += ALIGNED_ADAPT
    if stage is Stage.ALIGN and composed.max_tiles > 1:
        optional += WHOLE_PICTURES

    align_rate = ALIGN_RATE
    if composed.projector_aligned:
        align_rate = ALIGNED_RATE
    elif composed.projector_scaled:
        align_rate = SCALED_RATE

    return TEMPLATES[stage].format(
        start=yaml_text(str(start)),
        data=data,
        output_dir=yaml_text(str(composed.folder / stage)),
        align_rate=align_rate,
        optional=optional,
        schedule=SCHEDULE,
        machine=MACHINE.format(rows=batch_fields(composed, stage)),
    )


def batch_fields(composed: Composition, stage: Stage) -> str:
    """The fields of a recipe that say what a device's batch is: a packed row, or padded rows."""
    if mixes_samples(composed.config.text_config):
        return PADDED

    # A packed row holds at least one sample as it is planned.
    packed_length = nearest_paper_model(composed.text_weights).packed_lengths[stage]
    while packed_length < planned_tokens(composed, stage):
        packed_length *= 2
    return PACKED.format(packed_length=packed_length)


def describe_recipe(composed: Composition, stage: Stage) -> str:
    """The comments at the head of a recipe: what it is, how to start it, what it takes."""
    lines = [f"{TITLES[stage]}. Written by:"]
    lines += [f"  {line}" for line in command_lines(composed.command)]
    lines += size_lines(composed.text_weights)
    lines += ["", "On one device, and on eight:"]
    config = composed.folder / f"{stage}.yaml"
    lines += [f"  {launch}" for launch in launch_commands(stage, config)]
    lines += ["", *plan_lines(composed, stage)]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def command_lines(options: Sequence[str]) -> list[str]:
    """The command that composed the model, with an option a line."""
    lines = ["python training/compose.py"]
    for word in options:
        if word.startswith("--"):
            lines[-1] += " \\"
            lines.append("    " + shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines


def launch_commands(stage: Stage, config: Path) -> list[str]:
    """The commands that start a stage, on one device and on eight."""
    script = f"training/sft.py --config {shlex.quote(str(config))}"
    return [
        f"accelerate launch -q --num_processes 1 {script}",
        f"accelerate launch -q --config_file training/accelerate/{LAUNCHERS[stage]} {script}",
    ]


def nearest_paper_model(text_weights: int) -> PaperModel:
    """The paper's model whose number of weights has the ratio to `text_weights` that is nearest to 1."""
    return min(PAPER_MODELS, key=lambda model: abs(math.log(text_weights / 1e9 / model.weights)))


def size_lines(text_weights: int) -> list[str]:
    """Whose recipe a model gets whose size isn't in the paper."""
    nearest = nearest_paper_model(text_weights)
    if abs(text_weights / 1e9 / nearest.weights - 1) < SAME_SIZE:
        return []
    return [
        f"The paper trains language models of 3 and 7 billion weights. This one has {text_weights / 1e9:.3g} billion:",
        f"rates, batch and packing are those of {nearest.name}, and not tuned for its size.",
    ]


def plan_lines(composed: Composition, stage: Stage) -> list[str]:
    """The memory and the time that the stage takes by `training/plan.py`, and what was assumed."""
    plan, batch = plan_stage(composed, stage)
    picture = "a picture" if batch.tiles == 1 else f"a picture of {batch.tiles} tiles"
    lines = [
        f"Planned by training/plan.py, not measured, for rows of {batch.tokens:,} tokens with {picture}:",
        f"  memory of a GPU, layers checkpointed: {plan.peak / GIB:.3g} GiB",
    ]
    if stage is Stage.INSTRUCT:
        lines[-1] += f"; on each of eight with fsdp2.yaml {plan.sharded(8).peak / GIB:.3g} GiB"
    if stage is Stage.ADAPT:
        quantized, _ = plan_stage(composed, stage, load_in_4bit=True)
        lines[-1] += f"; with load_in_4bit {quantized.peak / GIB:.3g} GiB"

    _, num_rows = PAPER_DATA[stage]
    if composed.own_rows(stage) is not None:
        num_rows = 100_000
    seconds = plan.flops / batch.samples * num_rows / PLANNED_SPEED
    lines.append(
        f"  time for {num_rows:,} rows at 40% of an H100's peak: {describe_time(seconds)}; on eight "
        f"{describe_time(seconds / 8)}"
    )
    return lines


def plan_stage(composed: Composition, stage: Stage, **fields: Any) -> tuple[StepPlan, Batch]:
    """The plan of a step of a stage on one GPU, and the batch that was planned. `fields` are added to the recipe."""
    recipe = yaml.safe_load(recipe_fields(composed, stage)) | fields
    run_args, args = parse_for_gpu([f"--{name}={value}" for name, value in recipe.items()])

    _, supervised = PLANNED_TEXT[stage]
    tokens = planned_tokens(composed, stage)
    batch = make_batch(run_args, args, tokens, supervised, planned_tiles(composed, stage))
    return plan_step(composed.config, run_args, args, batch), batch


def planned_tokens(composed: Composition, stage: Stage) -> int:
    """The tokens of a row as it is planned."""
    text_tokens, _ = PLANNED_TEXT[stage]
    return composed.config.image_seq_length * planned_tiles(composed, stage) + text_tokens


def planned_tiles(composed: Composition, stage: Stage) -> int:
    """The tiles of a picture as it is planned: all that it can have. Stage 1 leaves pictures whole."""
    cuts = composed.max_tiles > 1 and stage is not Stage.ALIGN
    return composed.max_tiles + 1 if cuts else 1


def yaml_text(text: str) -> str:
    """A text as YAML writes it on a line, in quotes where it needs them."""
    return yaml.safe_dump(text, width=math.inf, allow_unicode=True).removesuffix("...\n").rstrip("\n")
