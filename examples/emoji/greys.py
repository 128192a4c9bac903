"""Does a LayerNorm behind the projector still tell black from white?

    python -m examples.emoji.greys --trained runs/emoji/stage2

A LayerNorm takes away the norm of each image token, in which pictures of different greys may differ most. The command
shows an encoder eight slightly noisy pictures of each of sixteen greys. It prints how many of them have a nearest
neighbour of the same grey, by their image tokens before and behind the LayerNorm. The encoders are the quickstart's,
the emoji example's and a small random SigLIP, each with a new projector; --trained adds trained models.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from normllava.command_line import command, parse

import numpy as np
import pandas as pd
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaForConditionalGeneration,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    set_seed,
)

from examples.digits.quickstart import RUN as DIGITS
from examples.emoji.parts import RUN as EMOJI
from normllava.hooks import InterfaceHooks
from training.compose import compose


logger = logging.getLogger(__name__)

NUM_LEVELS = 16
PICTURES_PER_LEVEL = 8
NOISE = 3.0  # standard deviation of the noise, in levels of 256; neighbouring greys are 17 apart
# What is measured, by the name that `InterfaceHooks` gives to the place.
PLACES = {"norm_input": "before the LayerNorm", "projector_output": "as the decoder gets them"}


def make_pictures(size: int) -> tuple[list[Image.Image], np.ndarray]:
    """The pictures, and the number of the grey of each, `(num_pictures,)`."""
    rng = np.random.default_rng(0)
    levels = np.repeat(np.arange(NUM_LEVELS), PICTURES_PER_LEVEL)
    pictures = []
    for level in levels:
        grey = 255 * level / (NUM_LEVELS - 1)
        pixels = (grey + NOISE * rng.standard_normal((size, size, 3))).clip(0, 255)
        pictures.append(Image.fromarray(pixels.astype(np.uint8)))
    return pictures, levels


def share_told_apart(tokens: torch.Tensor, levels: np.ndarray) -> float:
    """The share of pictures whose nearest other picture has the same grey.

    Args:
        tokens: Image tokens of each picture, `(num_pictures, num_tokens, width)`.
        levels: The number of each picture's grey, `(num_pictures,)`.
    """
    points = tokens.flatten(1).double()
    distances = torch.cdist(points, points)
    distances.fill_diagonal_(torch.inf)
    nearest = distances.argmin(dim=1).numpy()
    return float((levels[nearest] == levels).mean())


@torch.no_grad()
def measure(name: str, model: LlavaForConditionalGeneration, processor: Any) -> list[dict[str, Any]]:
    """Rows of the table for a model: before its LayerNorm, if it has one, and as the decoder gets the tokens."""
    pictures, levels = make_pictures(model.config.vision_config.image_size)
    pixel_values = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
    tokens: dict[str, torch.Tensor] = {}
    with InterfaceHooks(model.eval(), lambda place, features: tokens.update({place: features.float()})):
        model.model.get_image_features(pixel_values.to(model.dtype))

    rows = []
    for place, title in PLACES.items():
        if place in tokens:
            of_picture = tokens[place].unflatten(0, (len(pictures), -1)).flatten(1, 2)  # one tile a picture
            norms = of_picture.norm(dim=-1).mean(dim=1)
            rows.append({
                "model": name,
                "tokens": title,
                "same grey nearest, %": 100 * share_told_apart(of_picture, levels),
                "norm of black": norms[levels == 0].mean().item(),
                "norm of white": norms[levels == NUM_LEVELS - 1].mean().item(),
            })  # fmt: skip
    return rows


def save_random_siglip(folder: Path) -> None:
    """Write a small SigLIP with random weights."""
    set_seed(0)
    config = SiglipVisionConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=3, image_size=64, patch_size=8
    )
    SiglipVisionModel(config).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", nargs="*", default=[], help="folders of trained models")
    return parser


@command()
def main() -> None:
    """Print the table."""
    options = parse(build_parser())
    siglip = EMOJI / "greys" / "siglip"
    save_random_siglip(siglip)
    encoders = {
        "digits' ViT": (DIGITS / "vision", DIGITS / "text"),
        "DINOv2-small": (EMOJI / "vision", EMOJI / "text"),
        "random SigLIP": (siglip, EMOJI / "text"),
    }
    rows = []
    for name, (vision, text) in encoders.items():
        model, processor = compose(str(vision), str(text), projector_norm="gwc", vision_feature_layer=-1)
        rows += measure(f"{name}, new projector", model, processor)
    for folder in options.trained:
        model = AutoModelForImageTextToText.from_pretrained(folder)
        rows += measure(folder, model, AutoProcessor.from_pretrained(folder))
    logger.info("%s", pd.DataFrame(rows).to_string(index=False, float_format="%.1f"))


if __name__ == "__main__":
    main()
