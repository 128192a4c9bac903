"""Runs the quickstart: trains a small vision-language model from scratch that reads unseen handwritten digits.

    python -m examples.digits.quickstart

It makes the data, trains two small backbones, composes them, trains both stages, and reports the results. Every step
writes a folder below `runs/digits`. A step is skipped if its folder is complete.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from common.console import command, parse
from examples.steps import ROOT, Step, run_steps


logger = logging.getLogger(__name__)

# The folder of the run, relative to ROOT as in the recipes.
RUN = Path("runs/digits")


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done, and the report."""
    parse(build_parser(), argv)
    run_steps(plan_steps())
    logger.info("figures: %s, %s; model: %s", RUN / "norms.png", RUN / "answers.png", RUN / "stage2")


def plan_steps() -> list[Step]:
    """All steps of the quickstart."""
    return [
        Step(
            "Scenes of handwritten digits",
            ["examples/digits/scenes.py", "--output_dir", "runs/digits/data"],
            (RUN / "data/held_out.json",),
        ),
        Step(
            "A vision encoder and a language model",
            ["examples/digits/pretrain.py", "--data_dir", "runs/digits/data", "--output_dir", "runs/digits"],
            (RUN / "vision/preprocessor_config.json", RUN / "text/tokenizer_config.json"),
        ),
        Step(
            "Composing",
            [
                *("training/compose.py", "--output_dir", "runs/digits/composed"),
                *("--vision_model", "runs/digits/vision", "--vision_feature_layer", "-1"),
                *("--text_model", "runs/digits/text"),
            ],
            (RUN / "composed/processor_config.json",),
        ),
        Step(
            "Stage 1: projector and norm, on captions",
            training_command("training/recipes/digits/stage1.yaml"),
            (RUN / "stage1/trainer_state.json",),
        ),
        Step(
            "Stage 2: everything, on questions",
            training_command("training/recipes/digits/stage2.yaml"),
            (RUN / "stage2/trainer_state.json",),
        ),
        Step("Questions about unseen handwriting", ["examples/digits/report.py", "--run_dir", "runs/digits"]),
    ]


def training_command(recipe: str) -> list[str]:
    """The command that trains by a recipe. The rows of a step are divided evenly among two processes.

    With a single thread there is a single process.
    """
    # For models this small, two processes are faster than two threads.
    num_threads = torch.get_num_threads()
    num_processes = min(2, num_threads)
    global_batch_size = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))["global_batch_size"]
    return [
        *("-m", "accelerate.commands.launch", "--config_file", "training/accelerate/cpu_ddp.yaml"),
        *("--num_processes", str(num_processes)),
        *("--num_cpu_threads_per_process", str(num_threads // num_processes)),
        *("training/sft.py", "--config", recipe),
        *("--per_device_train_batch_size", str(global_batch_size // num_processes)),
    ]


if __name__ == "__main__":
    main()
