"""Makes, from pretrained backbones, a model that names drawings by artists on whom it wasn't trained.

    python -m examples.emoji.run

The command downloads two pretrained backbones and nine sets of drawings. Then it composes, aligns and trains a model,
and asks the model questions. Each step prints an estimate of its minutes on this CPU, and writes a folder below
`runs/emoji`. A step is skipped if its folder is complete. Training that was stopped goes on from its last checkpoint.
"""

import argparse
import dataclasses
import logging
from collections.abc import Sequence

from normllava.command_line import command, parse

import torch
from torch.utils.benchmark import Timer

from examples.emoji.parts import RUN
from examples.steps import Step, run_steps


logger = logging.getLogger(__name__)

# The speed of the CPU on which the minutes in `plan_steps` were measured: two cores with AVX2.
REFERENCE_GFLOPS = 90


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done. The last step, which asks questions, always runs."""
    parse(build_parser(), argv)
    gflops = measure_gflops()
    steps = []
    total_minutes = 0.0
    for step, reference_minutes in plan_steps():
        minutes = reference_minutes * REFERENCE_GFLOPS / gflops
        total_minutes += minutes
        steps.append(dataclasses.replace(step, title=f"{step.title} (about {minutes:.1f} min)"))

    logger.info("This CPU does %.0f GFLOP/s: about %.0f minutes in all, downloads apart.", gflops, total_minutes)
    run_steps(steps)
    logger.info("figure: %s; model: %s", RUN / "stage2/answers.png", RUN / "stage2")


def plan_steps() -> list[tuple[Step, float]]:
    """The steps of the example, each with the minutes that it takes at `REFERENCE_GFLOPS`."""
    get_backbones = Step(
        title="Two pretrained backbones",
        command=["-m", "examples.emoji.parts"],
        last_files=(RUN / "vision/preprocessor_config.json",),
    )
    get_drawings = Step(
        title="Drawings by nine artists, and rows",
        command=["-m", "examples.emoji.pictures"],
        last_files=(RUN / "pictures/train.json",),
    )
    compose = Step(
        title="Composing, with an aligned start",
        command=[
            "training/compose.py",
            f"--vision_model={RUN}/vision",
            "--vision_feature_layer=-1",  # the last layer; the default is the layer before
            f"--text_model={RUN}/text",
            "--projector_norm=gwc",
            f"--captions={RUN}/pictures/captions.json",
            "--aligned_start",
            f"--output_dir={RUN}/aligned",
        ],
        last_files=(RUN / "aligned/adapt.yaml",),
    )
    train = Step(
        title="Stage 2: all weights",
        command=[
            "-m",
            "accelerate.commands.launch",
            "--num_processes=1",
            "--mixed_precision=no",
            # By default accelerate gives a process one thread.
            f"--num_cpu_threads_per_process={torch.get_num_threads()}",
            "training/sft.py",
            "--config=training/recipes/SmolLM2-135M-Instruct/stage2.yaml",
            "--resume_from_checkpoint=true",
        ],
        last_files=(RUN / "stage2/trainer_state.json",),
    )
    ask = Step(
        title="Questions about drawings by the two held-out artists",
        command=["-m", "examples.emoji.evaluate"],
    )
    return [(get_backbones, 1), (get_drawings, 5), (compose, 4), (train, 38), (ask, 12)]


def measure_gflops() -> float:
    """This CPU's speed in GFLOP/s at a float32 matrix product as in SmolLM2-135M's MLP, on 1024 tokens."""
    num_tokens = 1024
    hidden_size = 576
    intermediate_size = 1536
    factors = {"left": torch.rand(num_tokens, hidden_size), "right": torch.rand(hidden_size, intermediate_size)}
    timer = Timer("left @ right", globals=factors, num_threads=torch.get_num_threads())
    seconds = timer.blocked_autorange().median
    num_operations = 2 * num_tokens * hidden_size * intermediate_size  # as many multiplications as additions
    return num_operations / seconds / 1e9


if __name__ == "__main__":
    main()
