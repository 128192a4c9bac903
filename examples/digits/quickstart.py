"""The quickstart: from nothing to a small vision-language model that answers questions about unseen handwriting.

    python -m examples.digits.quickstart

Makes data, trains two small backbones, composes them, runs both stages through `accelerate launch training/sft.py`,
and reports. Every step writes a folder below `runs/digits` and is skipped where that folder is complete.
"""

import argparse
import logging
from pathlib import Path

import torch
import yaml

from common.console import command
from examples.steps import ROOT, Step, run_steps


logger = logging.getLogger(__name__)

RUN = Path("runs/digits")  # relative to ROOT, as in the recipes
# Processes gain more than threads on models this small.
PROCESSES = min(2, torch.get_num_threads())


def train(stage: str) -> list[str]:
    """The command of a stage, with the rows of a step divided among the processes."""
    recipe = f"training/recipes/digits/{stage}.yaml"
    global_batch_size = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))["global_batch_size"]
    rows = ("--per_device_train_batch_size", str(global_batch_size // PROCESSES))
    threads = str(torch.get_num_threads() // PROCESSES)
    launch = ["-m", "accelerate.commands.launch", "--config_file", "training/accelerate/cpu_ddp.yaml"]
    launch += ["--num_processes", str(PROCESSES), "--num_cpu_threads_per_process", threads]
    return [*launch, "training/sft.py", "--config", recipe, *rows]


STEPS: list[Step] = [
    ("Scenes of handwritten digits", [RUN / "data/held_out.json"],
     ["examples/digits/scenes.py", "--output_dir", "runs/digits/data"]),
    ("A vision encoder and a language model",
     [RUN / "vision/preprocessor_config.json", RUN / "text/tokenizer_config.json"],
     ["examples/digits/pretrain.py", "--data_dir", "runs/digits/data", "--output_dir", "runs/digits"]),
    ("Composing", [RUN / "composed/processor_config.json"],
     ["training/compose.py", "--vision_model", "runs/digits/vision", "--text_model", "runs/digits/text",
      "--vision_feature_layer", "-1", "--output_dir", "runs/digits/composed"]),
    ("Stage 1: projector and norm, on captions", [RUN / "stage1/trainer_state.json"], train("stage1")),
    ("Stage 2: everything, on questions", [RUN / "stage2/trainer_state.json"], train("stage2")),
    ("Questions about unseen handwriting", [], ["examples/digits/report.py", "--run_dir", "runs/digits"]),
]  # fmt: skip


@command()
def main() -> None:
    """Run the missing steps; the report is always rebuilt."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    run_steps(STEPS)
    logger.info("figures: %s, %s; model: %s", RUN / "norms.png", RUN / "answers.png", RUN / "stage2")


if __name__ == "__main__":
    main()
