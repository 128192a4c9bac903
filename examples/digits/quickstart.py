"""Runs the quickstart: trains, from scratch, a small vision-language model that reads unseen handwritten digits.

    python -m examples.digits.quickstart

The command makes the data, trains two small backbones, composes them, trains both stages, and reports the results.
Each step writes into a folder below `runs/digits`. A step is skipped if the files that it writes last exist.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from normllava.command_line import command, parse

import torch
import yaml

from examples.steps import ROOT, Step, run_steps


logger = logging.getLogger(__name__)

RUN = Path("runs/digits")  # relative to the repository's root
# The command that the quickstart suggests at its end.
SWEEP = f"normllava diagnose --model {RUN}/stage2 --data {RUN}/data/probe.json --sweep --output_dir {RUN}/sweep"


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done. The last step, which reports the results, always runs."""
    parse(build_parser(), argv)
    run_steps(plan_steps())
    logger.info("figures: %s, %s; model: %s", RUN / "norms.png", RUN / "answers.png", RUN / "stage2")
    logger.info("next, after `source .venv/bin/activate`: would another norm answer better?\n  %s", SWEEP)


def plan_steps() -> list[Step]:
    """All steps of the quickstart."""
    make_data = Step(
        title="Scenes of handwritten digits",
        command=["examples/digits/scenes.py", f"--output_dir={RUN}/data"],
        last_files=(RUN / "data/held_out.json",),
    )
    train_backbones = Step(
        title="A vision encoder and a language model",
        command=["examples/digits/pretrain.py", f"--data_dir={RUN}/data", f"--output_dir={RUN}"],
        last_files=(RUN / "vision/preprocessor_config.json", RUN / "text/tokenizer_config.json"),
    )
    compose = Step(
        title="Composing",
        command=[
            "training/compose.py",
            f"--vision_model={RUN}/vision",
            "--vision_feature_layer=-1",  # the last layer, which pretrain.py trains
            f"--text_model={RUN}/text",
            "--projector_norm=gwc",
            f"--output_dir={RUN}/composed",
        ],
        last_files=(RUN / "composed/adapt.yaml",),
    )
    train_stage_1 = Step(
        title="Stage 1: projector and norm, on captions",
        command=training_command("training/recipes/digits/stage1.yaml"),
        last_files=(RUN / "stage1/trainer_state.json",),
    )
    train_stage_2 = Step(
        title="Stage 2: all weights, on questions",
        command=training_command("training/recipes/digits/stage2.yaml"),
        last_files=(RUN / "stage2/trainer_state.json",),
    )
    report = Step(
        title="Questions about unseen handwriting",
        command=["examples/digits/report.py", f"--run_dir={RUN}"],
    )
    return [make_data, train_backbones, compose, train_stage_1, train_stage_2, report]


def training_command(recipe: str) -> list[str]:
    """The command that trains by a recipe: in two processes, or in one if torch has only one thread."""
    # For models this small, two processes are faster than two threads.
    num_threads = torch.get_num_threads()
    num_processes = min(2, num_threads)

    fields = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))
    batch_size_of_process = fields["global_batch_size"] // num_processes
    return [
        "-m",
        "accelerate.commands.launch",
        "--config_file=training/accelerate/cpu_ddp.yaml",
        f"--num_processes={num_processes}",
        f"--num_cpu_threads_per_process={num_threads // num_processes}",
        "training/sft.py",
        f"--config={recipe}",
        f"--per_device_train_batch_size={batch_size_of_process}",
    ]


if __name__ == "__main__":
    main()
