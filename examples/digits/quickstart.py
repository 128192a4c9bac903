"""The quickstart: from nothing to a small vision-language model that answers questions about unseen handwriting.

    python -m examples.digits.quickstart

Makes data, trains two small backbones, composes them, runs both stages through `accelerate launch training/sft.py`,
and reports. Every step writes a folder below `runs/digits` and is skipped where that folder is complete.
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

RUN = Path("runs/digits")  # relative to ROOT, as in the recipes


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the missing steps; the report is always rebuilt."""
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
    """The command that trains by a recipe, with the rows of a step divided among the processes."""
    # Processes gain more than threads on models this small.
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
