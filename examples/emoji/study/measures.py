"""Measures a model of the study: its right names, and the norm and direction of its image tokens."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import LlavaProcessor

from diagnostics.norms import text_norm_target, token_norms, vocabulary_norms
from examples.emoji.evaluate import name_pictures, open_picture, perplexity
from examples.emoji.parts import RUN
from examples.emoji.pictures import Record
from modeling_normllava import NormLlavaForConditionalGeneration
from training.align import embed_captions


# No model is trained on drawings by these artists. The primary artists' drawings decide the study. The results on the
# secondary artist's drawings are only reported.
PRIMARY = ("twemoji", "emojione")
SECONDARY = ("openmoji",)
MAX_GRAD_NORM = 1.0  # the recipe's; above this norm, the trainer clips the gradient of a module
BATCH_SIZE = 64  # drawings that the vision encoder takes at once
# Names whose drawings are near copies of each other, found among the drawings to train on. A name on the left counts
# as the name on the right.
SAME_DRAWING = {
    "ram": "ewe",
    "two hump camel": "camel",
    "spouting whale": "whale",
    "nest with eggs": "empty nest",
    "front facing baby chick": "baby chick",
    "guide dog": "dog",
    "service dog": "dog",
}


def read_pictures() -> list[Record]:
    """The list of all drawings, each with its file, its artist (`set`) and its name."""
    return json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))


def drawings_by(artist: str) -> list[Record]:
    """An artist's drawings, in the order of pictures.json, which is the same in every run."""
    return [drawing for drawing in read_pictures() if drawing["set"] == artist]


def all_names() -> list[str]:
    """All names, from which a model chooses."""
    return sorted({drawing["name"] for drawing in read_pictures()})


def is_right(given: str, drawing: Record) -> bool:
    """Whether a given name is right for a drawing. By `SAME_DRAWING`, the name of a near copy is right too."""
    right = drawing["name"]
    given_counts_as = SAME_DRAWING.get(given, given)
    right_counts_as = SAME_DRAWING.get(right, right)
    return given_counts_as == right_counts_as


def as_digits(hits: list[bool]) -> str:
    """A text with one digit for each drawing: "1" if the given name was right, otherwise "0"."""
    return "".join("1" if hit else "0" for hit in hits)


@torch.no_grad()
def image_tokens(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, drawings: list[Record]
) -> torch.Tensor:
    """Drawings' image tokens where they enter the decoder, `(num_drawings, num_patches, hidden_size)` in float32."""
    tokens = []
    for start in range(0, len(drawings), BATCH_SIZE):
        images = [open_picture(drawing) for drawing in drawings[start : start + BATCH_SIZE]]
        inputs = processor.image_processor(images, return_tensors="pt").to(model.device, model.dtype)
        features = model.model.get_image_features(inputs["pixel_values"]).pooler_output
        tokens.append(torch.stack(list(features)).float())  # `features` has a tensor for each picture
    return torch.cat(tokens)


@torch.no_grad()
def measure_tokens(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> dict[str, Any]:
    """Measure the image tokens of the primary artists' drawings, without running the language model.

    Returns:
        `norm`: the mean L2 norm of image tokens, divided by T, the mean norm of text embeddings.
        `names_by_tokens`: the percentage of drawings whose image tokens point at the right name. A drawing's image
        tokens point at the name whose text embeddings are nearest in direction.
    """
    drawings = []
    for artist in PRIMARY:
        drawings += drawings_by(artist)
    names = all_names()
    tokens = image_tokens(model, processor, drawings)

    # As in training/align.py, the vocabulary's mean embedding is subtracted before directions are compared. This mean
    # is in units of the embeddings' mean norm, so image tokens are scaled to norm 1 first.
    name_directions, mean_embedding = embed_captions(model, processor, names)
    centered_tokens = nn.functional.normalize(tokens, dim=-1) - mean_embedding
    drawing_directions = nn.functional.normalize(centered_tokens.mean(dim=1), dim=-1)  # [num_drawings, hidden_size]
    cosines = drawing_directions @ name_directions.T  # [num_drawings, num_names]
    nearest_names = [names[index] for index in cosines.argmax(dim=-1).tolist()]

    hits = [is_right(name, drawing) for name, drawing in zip(nearest_names, drawings, strict=True)]
    text_norm = text_norm_target(vocabulary_norms(model))
    return {
        "norm": token_norms(tokens).mean().item() / text_norm,
        "names_by_tokens": 100 * sum(hits) / len(hits),
    }


@torch.no_grad()
def measure_model(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> dict[str, Any]:
    """Measure the names that a model gives to drawings, and its perplexity.

    Returns:
        `hits`: for each artist, the digits of `as_digits`.
        `perplexity`: the perplexity of text that no model here is trained on.
    """
    names = all_names()
    digits_by_artist = {}
    for artist in (*PRIMARY, *SECONDARY):
        drawings = drawings_by(artist)
        images = [open_picture(drawing) for drawing in drawings]
        given_names = name_pictures(model, processor, images, names)
        hits = [is_right(name, drawing) for name, drawing in zip(given_names, drawings, strict=True)]
        digits_by_artist[artist] = as_digits(hits)
    return {"hits": digits_by_artist, "perplexity": perplexity(model, processor.tokenizer)}


def measure_gain(model: Any) -> float | None:
    """How much the gain (the weight) of the LayerNorm behind the projector has grown in training.

    Returns:
        The mean gain divided by the gain at the start; `None` if the model has no such LayerNorm.
    """
    config = model.config
    if config.projector_norm == "none":
        return None
    # With this gain, the LayerNorm's outputs have the norm T.
    gain_at_start = config.projector_norm_target / config.text_config.hidden_size**0.5
    gain = model.model.multi_modal_projector.norm.weight.mean().item()
    return gain / gain_at_start


def read_training(folder: Path) -> dict[str, Any]:
    """Read what the trainer logged.

    Args:
        folder: Folder of the trained model.

    Returns:
        `losses`: the loss of each logged step.
        `clipped`: for each module, the percentage of logged steps in which its gradient was clipped.
    """
    lines = pd.read_json(folder / "metrics.jsonl", lines=True)
    steps = lines.dropna(subset="loss")  # the other lines are no training steps
    clipped = {}
    for column in steps.columns:
        if column.startswith("grad_norm/"):
            module = column.removeprefix("grad_norm/")
            is_clipped = steps[column] > MAX_GRAD_NORM
            clipped[module] = 100 * float(is_clipped.mean())
    return {"losses": steps["loss"].tolist(), "clipped": clipped}
