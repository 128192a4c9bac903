"""Makes the untrained models of the study: a shared start for each seed, and from it the model of each arm.

    python -m examples.emoji.study.starts SEED FOLDER

The shared start is a composed model with a scaled and aligned projector. As all arms of a seed begin with it, they
differ only in what the arm changes.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, LlavaProcessor

from conversations.loading import load_rows
from diagnostics.norms import text_norm_target, vocabulary_norms
from examples.emoji.parts import RUN
from examples.emoji.study.cells import Arm, Projector
from modeling_normllava import GlobalWeightCompensatedLayerNorm, NormLlavaForConditionalGeneration
from training.align import align
from training.compose import compose, interface_norms


# The artist whose drawings are left out of training, in addition to the two that the example itself holds out. The
# study's outcome is measured on EmojiOne's and Twemoji's drawings.
LEFT_OUT = "emojione"
START_FILE = "start.json"


def write_rows(name: str, folder: Path) -> Path:
    """Copy one of the example's files of rows into a folder, without the rows about drawings of `LEFT_OUT`.

    Returns:
        The new file.
    """
    rows = json.loads((RUN / "pictures" / name).read_text(encoding="utf-8"))
    kept = [row for row in rows if not row.get("image", "").startswith(f"{LEFT_OUT}/")]

    path = folder / name
    path.write_text(json.dumps(kept), encoding="utf-8")
    return path


def make_start(seed: int, folder: Path) -> None:
    """Make a seed's shared start: compose a model, scale its projector to the text's norm, align it, and save it.

    This is what `training/compose.py --projector_norm none --scale_projector --captions` does. `start.json` holds `k`,
    the norm of image tokens over the text's norm before the projector was scaled.
    """
    parts: dict[str, Any] = {
        "vision_model_path": str(RUN / "vision"),
        "text_model_path": str(RUN / "text"),
        "projector_norm": "none",
        "vision_feature_layer": -1,
        "seed": seed,
    }
    unscaled, processor = compose(**parts)
    norms = interface_norms(unscaled, processor)
    del unscaled

    # All is written into a folder aside, which gets its name at the end: a folder with that name is whole.
    aside = folder.with_name(f"{folder.name}-aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    captions: Any = load_rows(str(write_rows("captions.json", aside)), str(RUN / "pictures"))
    model, processor = compose(**parts, scale_projector=True)
    align(model, processor, captions, seed)

    model.save_pretrained(aside)
    processor.save_pretrained(aside)
    k = norms["projector_output"] / norms["text"]
    (aside / START_FILE).write_text(json.dumps({"seed": seed, "k": k}), encoding="utf-8")
    aside.replace(folder)


def read_norm_ratio(start: Path) -> float:
    """The k of docs/study.md: image tokens' norm over the text's norm, before the projector was scaled to it."""
    return json.loads((start / START_FILE).read_text(encoding="utf-8"))["k"]


@torch.no_grad()
def make_arm_model(arm: Arm, start: Path) -> tuple[NormLlavaForConditionalGeneration, LlavaProcessor]:
    """The untrained model of an arm, made from the seed's shared start, and its processor."""
    model: Any = NormLlavaForConditionalGeneration.from_pretrained(start)
    processor = AutoProcessor.from_pretrained(start)
    projector = model.model.multi_modal_projector

    if arm.projector is not Projector.SCALED:
        model.config.projector_scaled = False
        for parameter in projector.linear_2.parameters():
            parameter *= read_norm_ratio(start)

    if arm.projector is Projector.NORM:
        target = text_norm_target(vocabulary_norms(model))
        hidden_size = model.config.text_config.hidden_size
        norm = GlobalWeightCompensatedLayerNorm(hidden_size, eps=model.config.projector_norm_eps)
        norm.weight.fill_(target / hidden_size**0.5)
        projector.norm = norm
        model.config.projector_norm = "gwc"
        model.config.projector_norm_target = target
    return model, processor


if __name__ == "__main__":
    make_start(int(sys.argv[1]), Path(sys.argv[2]))
