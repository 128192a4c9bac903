"""Compares each arm's untrained model with the model that `training/compose.py` makes from the same seed.

    python -m examples.emoji.study.check SEED

An arm is one way to make a model. The study aligns one model for a seed, the shared start, and makes all arms from it.
`training/compose.py` aligns each arm by itself. This check makes every arm in both ways. It
prints a table with a row for each model: the norm of the model's image tokens, the percentage of drawings whose image
tokens point at the right name, and the mean cosine between the model's image tokens and those of the shared start. The
table is also written into `runs/emoji/study/check-SEED.json`.
"""

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from normllava.command_line import command, parse

import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples.emoji.parts import RUN
from examples.emoji.study.cells import Arm
from examples.emoji.study.measures import PRIMARY, drawings_by, image_tokens, measure_tokens
from examples.emoji.study.starts import make_arm_model, make_start, write_rows
from examples.steps import ROOT


logger = logging.getLogger(__name__)

WORK = RUN / "study"  # the folder of the study
# The options of `training/compose.py` that make each arm.
OPTIONS = {
    Arm.NOTHING: ["--projector_norm=none"],
    Arm.SCALED: ["--projector_norm=none", "--scale_projector"],
    Arm.LAYER_NORM: ["--projector_norm=gwc"],
}


def compose_arm(arm: Arm, seed: int, folder: Path) -> None:
    """Compose and align an arm by `training/compose.py`, on the same captions as in the study."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    captions = write_rows("captions.json", folder.parent)
    arguments = [
        "training/compose.py",
        f"--vision_model={RUN / 'vision'}",
        f"--text_model={RUN / 'text'}",
        "--vision_feature_layer=-1",  # the last layer, as in the study
        f"--captions={captions}",
        "--aligned_start",
        f"--image_folder={RUN / 'pictures'}",
        f"--seed={seed}",
        f"--output_dir={folder}",
        *OPTIONS[arm],
    ]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


def mean_cosine(tokens: torch.Tensor, other_tokens: torch.Tensor) -> float:
    """The mean cosine between the image tokens of two models, each `(num_drawings, num_patches, hidden_size)`."""
    return nn.functional.cosine_similarity(tokens, other_tokens, dim=-1).mean().item()


def check_arms(seed: int) -> list[dict[str, Any]]:
    """The rows of the table: measures of each arm's model, made by the study and by `training/compose.py`."""
    folder = WORK / f"check-{seed}"
    shared_start = folder / "start"
    if not shared_start.exists():
        make_start(seed, shared_start)

    drawings = []
    for artist in PRIMARY:
        drawings += drawings_by(artist)
    shared_model = AutoModelForImageTextToText.from_pretrained(shared_start).eval()
    shared_processor = AutoProcessor.from_pretrained(shared_start)
    shared_tokens = image_tokens(shared_model, shared_processor, drawings)

    rows = []
    for arm in Arm:
        composed_folder = folder / arm.name.lower()
        if not (composed_folder / "adapt.yaml").exists():  # the file that compose.py writes last
            compose_arm(arm, seed, composed_folder)
        model_by_compose = AutoModelForImageTextToText.from_pretrained(composed_folder)
        model_by_study, processor = make_arm_model(arm, shared_start)  # both models have the same processor

        for made_by, model in (("study", model_by_study), ("command", model_by_compose)):
            measured = measure_tokens(model.eval(), processor)
            tokens = image_tokens(model, processor, drawings)
            cosine = mean_cosine(tokens, shared_tokens)
            rows.append({"arm": arm.value, "made by": made_by, **measured, "cosine to the shared start": cosine})
    return rows


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, help="a seed, such as one of the study's: 101 to 116")
    return parser


@command()
def main() -> None:
    """Print and write the table of a seed's arms."""
    seed = parse(build_parser()).seed
    WORK.mkdir(parents=True, exist_ok=True)
    rows = check_arms(seed)
    (WORK / f"check-{seed}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    logger.info("%s", pd.DataFrame(rows).to_string(index=False, float_format="%.3f"))


if __name__ == "__main__":
    main()
