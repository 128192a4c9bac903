"""Makes the real model: it names drawings by artists that it wasn't trained on.

    python -m examples.emoji.run

It downloads two pretrained backbones and nine sets of drawings, composes and aligns a model, trains it, and asks it
questions. Every step prints how long it will take on this processor, and writes a folder below `runs/emoji`. A step is
skipped if its folder is complete. A training that was stopped goes on from its last checkpoint.
"""

import argparse
import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch.utils.benchmark import Timer

from common.console import command, parse
from examples.emoji.parts import RUN
from examples.steps import Step, run_steps


logger = logging.getLogger(__name__)

# The speed of the processor on which the minutes below were measured: two cores with AVX2.
REFERENCE_GFLOPS = 90


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done, and the questions at the end."""
    parse(build_parser(), argv)
    gflops = measure_processor()
    steps = []
    total = 0.0
    for step, reference_minutes in plan_steps():
        minutes = reference_minutes * REFERENCE_GFLOPS / gflops
        steps.append(dataclasses.replace(step, title=f"{step.title} (about {minutes:.1f} min)"))
        total += minutes

    logger.info("This processor does %.0f GFLOP/s: about %.0f minutes in all, downloads apart.", gflops, total)
    run_steps(steps)
    logger.info("figure: %s; model: %s", RUN / "stage2/answers.png", RUN / "stage2")


def plan_steps() -> list[tuple[Step, float]]:
    """The steps of the example, each with the minutes that it takes at `REFERENCE_GFLOPS`."""
    get_parts = Step(
        "Two pretrained backbones",
        ["-m", "examples.emoji.parts"],
        (RUN / "vision/preprocessor_config.json",),
    )
    draw = Step(
        "Drawings by nine artists, and rows",
        ["-m", "examples.emoji.pictures"],
        (RUN / "pictures/train.json",),
    )
    compose = Step(
        "Composing, with an aligned start",
        [
            *("training/compose.py", "--output_dir", "runs/emoji/aligned"),
            *("--vision_model", "runs/emoji/vision", "--vision_feature_layer", "-1"),
            *("--text_model", "runs/emoji/text"),
            *("--captions", "runs/emoji/pictures/captions.json"),
        ],
        (RUN / "aligned/processor_config.json",),
    )
    train = Step(
        "Stage 2: everything",
        [
            *("-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no"),
            # By default accelerate gives a process one thread.
            *("--num_cpu_threads_per_process", str(torch.get_num_threads())),
            *("training/sft.py", "--config", "training/recipes/SmolLM2-135M-Instruct/stage2.yaml"),
            *("--resume_from_checkpoint", "true"),
        ],
        (RUN / "stage2/trainer_state.json",),
    )
    ask = Step("Questions about drawings by two artists held out", ["-m", "examples.emoji.evaluate"])
    return [(get_parts, 1), (draw, 5), (compose, 4), (train, 38), (ask, 12)]


def measure_processor() -> float:
    """The GFLOP/s of a float32 matrix product: SmolLM2-135M's MLP on 1024 tokens."""
    rows = 1024
    width = 576
    columns = 1536
    factors = {"left": torch.rand(rows, width), "right": torch.rand(width, columns)}
    timer = Timer("left @ right", globals=factors, num_threads=torch.get_num_threads())
    flops = 2 * rows * width * columns
    return flops / timer.blocked_autorange().median / 1e9


if __name__ == "__main__":
    main()
