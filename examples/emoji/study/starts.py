"""Makes the untrained models of the study: a shared start for each seed, and from it the model of each arm.

    python -m examples.emoji.study.starts SEED FOLDER

An arm is one way to make a model. All arms of a seed start from one model, the shared start, and so differ
only in what each arm changes. The command makes the shared start of a seed: it composes a model, scales its projector
so that image tokens enter the decoder with the norm T, the mean norm of text embeddings, and aligns the scaled
projector with captions.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

from examples.emoji.parts import RUN
from examples.emoji.study.cells import Arm
from normllava.conversations.loading import load_rows
from normllava.llava import add_norm
from training.compose import compose, interface_norms
from training.composing.align import align


# The study tests on the drawings of three artists: Twemoji, OpenMoji and EmojiOne. The example has already left
# Twemoji and OpenMoji out of its rows to train on, so here only EmojiOne's rows are left out.
LEFT_OUT = "emojione"
START_FILE = "start.json"


def write_rows(name: str, folder: Path) -> Path:
    """Copy one of the example's files of rows into a folder, without the rows about drawings by `LEFT_OUT`.

    Returns:
        The path of the copy.
    """
    rows = json.loads((RUN / "pictures" / name).read_text(encoding="utf-8"))
    kept = []
    for row in rows:
        image = row.get("image", "")  # such as "emojione/cat-face-12.png"; a row may have no image
        if not image.startswith(f"{LEFT_OUT}/"):
            kept.append(row)

    path = folder / name
    path.write_text(json.dumps(kept), encoding="utf-8")
    return path


def make_start(seed: int, folder: Path) -> None:
    """Make a seed's shared start: compose a model, scale its projector to T, align the projector, and save the model.

    `training/compose.py --projector_norm none --scale_projector --aligned_start` does the same. But here the folder
    also gets `START_FILE`, which has the number k: the norm of image tokens before the projector was scaled, divided
    by T.
    """
    # The model is composed twice from the same random numbers: once to measure k, and once with the scaled projector.
    arguments: dict[str, Any] = {
        "vision_model_path": str(RUN / "vision"),
        "text_model_path": str(RUN / "text"),
        "projector_norm": "none",
        "vision_feature_layer": -1,  # the last layer, as in the example
        "seed": seed,
    }
    unscaled_model, processor = compose(**arguments)
    norms = interface_norms(unscaled_model, processor)
    k = norms["projector_output"] / norms["text"]
    del unscaled_model

    # Everything is written into another folder, which is renamed at the end. So if `folder` exists, it is complete.
    unfinished_folder = folder.with_name(f"{folder.name}-aside")
    shutil.rmtree(unfinished_folder, ignore_errors=True)
    unfinished_folder.mkdir(parents=True)
    captions_file = write_rows("captions.json", unfinished_folder)
    captions: Any = load_rows(str(captions_file), str(RUN / "pictures"))
    model, processor = compose(**arguments, scale_projector=True)
    align(model, processor, captions, seed)

    model.save_pretrained(unfinished_folder)
    processor.save_pretrained(unfinished_folder)
    (unfinished_folder / START_FILE).write_text(json.dumps({"seed": seed, "k": k}), encoding="utf-8")
    unfinished_folder.replace(folder)


def read_norm_ratio(start: Path) -> float:
    """The number k that `make_start` wrote: the norm of image tokens before the projector was scaled, divided by T."""
    fields = json.loads((start / START_FILE).read_text(encoding="utf-8"))
    return fields["k"]


@torch.no_grad()
def make_arm_model(arm: Arm, start: Path) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Make the untrained model of an arm from the seed's shared start.

    Returns:
        The model and its processor.
    """
    model = LlavaForConditionalGeneration.from_pretrained(start)
    processor = AutoProcessor.from_pretrained(start)

    # Undo the scaling, which divided the second layer by k.
    if arm is not Arm.SCALED:
        k = read_norm_ratio(start)
        for parameter in model.model.multi_modal_projector.linear_2.parameters():
            parameter *= k

    # Add a LayerNorm whose output has the norm T.
    if arm is Arm.LAYER_NORM:
        model = add_norm(model, "gwc")
    return model, processor


if __name__ == "__main__":
    make_start(int(sys.argv[1]), Path(sys.argv[2]))
