"""Compares the study's arms with what `training/compose.py` makes of the same seed, before any of them is trained.

    python -m examples.emoji.study.check SEED

The study makes all arms from one alignment; the command aligns each arm by itself. This makes every arm of block 2 in
both ways. For each model it prints the norm of its image tokens, the percentage of drawings whose image tokens point
at the right name, and the mean cosine between its image tokens and those of the shared start. It writes the same into
`runs/emoji/study/check-SEED.json`.
"""

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from transformers import AutoProcessor

from common.console import command, parse
from examples.emoji.parts import RUN
from examples.emoji.study.cells import BLOCK_2, Projector, Record
from examples.emoji.study.measures import PRIMARY, drawings_by, image_tokens, measure_tokens
from examples.emoji.study.starts import make_arm_model, make_start, write_rows
from examples.steps import ROOT
from modeling_normllava import NormLlavaForConditionalGeneration


logger = logging.getLogger(__name__)

WORK = RUN / "study"
# The options of `training/compose.py` that make each arm's projector.
OPTIONS = {
    Projector.PLAIN: ["--projector_norm=none"],
    Projector.SCALED: ["--projector_norm=none", "--scale_projector"],
    Projector.NORM: ["--projector_norm=gwc"],
}


def compose_by_command(projector: Projector, seed: int, folder: Path) -> None:
    """Compose and align an arm by the command, on the same captions as the study."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    captions = write_rows("captions.json", folder.parent)
    compose = [
        "training/compose.py",
        f"--vision_model={RUN / 'vision'}",
        f"--text_model={RUN / 'text'}",
        "--vision_feature_layer=-1",
        f"--captions={captions}",
        f"--image_folder={RUN / 'pictures'}",
        f"--seed={seed}",
        f"--output_dir={folder}",
        *OPTIONS[projector],
    ]
    subprocess.run([sys.executable, *compose], cwd=ROOT, check=True)


def mean_cosine(tokens: torch.Tensor, others: torch.Tensor) -> float:
    """The mean cosine between corresponding image tokens, both `(num_drawings, num_patches, hidden_size)`."""
    return nn.functional.cosine_similarity(tokens, others, dim=-1).mean().item()


def check_arms(seed: int) -> list[Record]:
    """A row of measures for each arm and each way of making it."""
    start = WORK / f"check-{seed}" / "start"
    if not start.exists():
        make_start(seed, start)
    drawings = []
    for artist in PRIMARY:
        drawings += drawings_by(artist)
    shared = NormLlavaForConditionalGeneration.from_pretrained(start).eval()
    shared_tokens = image_tokens(shared, AutoProcessor.from_pretrained(start), drawings)

    rows = []
    for arm in BLOCK_2.arms:
        composed = WORK / f"check-{seed}" / arm.projector.value
        if not (composed / "processor_config.json").exists():
            compose_by_command(arm.projector, seed, composed)
        by_command = NormLlavaForConditionalGeneration.from_pretrained(composed)
        by_study, processor = make_arm_model(arm, start)

        for way, model in (("study", by_study), ("command", by_command)):
            measured = measure_tokens(model.eval(), processor)
            cosine = mean_cosine(image_tokens(model, processor, drawings), shared_tokens)
            rows.append({"arm": arm.name, "made by": way, **measured, "cosine to the shared start": cosine})
    return rows


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, help="a seed, such as one of block 2's: 101 to 108")
    return parser


@command()
def main() -> None:
    """Print and write the comparison of a seed's arms."""
    seed = parse(build_parser()).seed
    WORK.mkdir(parents=True, exist_ok=True)
    rows = check_arms(seed)
    (WORK / f"check-{seed}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    logger.info("%s", pd.DataFrame(rows).to_string(index=False, float_format="%.3f"))


if __name__ == "__main__":
    main()
