"""Measures what a page costs: its image tokens, and the time and memory until the first token of an answer.

    python -m benchmarks.pages

A page of 1240 x 1754 pixels (A4 at 150 dpi) is given whole or cut into six tiles and a thumbnail, and squares of 2 x 2
patches are merged or not. The model has the shapes of Qwen3-0.6B and SigLIP2-base-512. Its weights are random: neither
time nor memory depends on their values. The model runs on the GPU if there is one. On a CPU, the memory is that of the
whole process.
"""

import argparse
import logging
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import GotOcr2ImageProcessorPil, Qwen3Config, SiglipVisionConfig

from common.console import command, parse
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration


logger = logging.getLogger(__name__)

PAGE = (1240, 1754)  # width and height in pixels
IMAGE_TOKEN_ID = 5  # any id would do
NUM_QUESTION_TOKENS = 40
GIB = 2**30


class Setting(NamedTuple):
    """How a page is given to the model."""

    max_tiles: int
    """The largest number of tiles that the page is cut into; 1 leaves it whole."""
    spatial_merge_size: int
    """Number of patches along each side of the squares that are merged into one image token."""


SETTINGS = [
    Setting(max_tiles=1, spatial_merge_size=2),
    Setting(max_tiles=6, spatial_merge_size=2),
    Setting(max_tiles=1, spatial_merge_size=1),
    Setting(max_tiles=6, spatial_merge_size=1),
]


class Cost(NamedTuple):
    """What a page costs in one setting."""

    image_tokens: int
    seconds: float
    """Time of a forward pass over the page and a question, the faster of two passes."""
    gib: float
    """The largest memory in GiB that tensors took on the GPU, or that the process took on a CPU. Weights count."""


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that the command works")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parse(build_parser(), argv)
    logger.info("%10s%12s%14s%12s%10s", "max tiles", "merge size", "image tokens", "seconds", "GiB")
    for setting in SETTINGS:
        # Each setting has a process of its own, because the largest memory of a process never falls.
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            cost = pool.submit(measure_page, setting, options.tiny).result()
        logger.info(
            "%10d%12d%14s%12.2f%10.2f",
            setting.max_tiles,
            setting.spatial_merge_size,
            f"{cost.image_tokens:,}",
            cost.seconds,
            cost.gib,
        )


def measure_page(setting: Setting, tiny: bool) -> Cost:
    """Measure what a page costs in one setting. `tiny` takes a tiny model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = make_config(setting.spatial_merge_size, tiny)
    with device:
        model = NormLlavaForConditionalGeneration(config).to(dtype).eval()

    pixel_values = cut_page(config.vision_config.image_size, setting.max_tiles).to(device, dtype)
    tokens_per_tile = config.image_seq_length
    num_image_tokens = tokens_per_tile * len(pixel_values)
    question_token_id = IMAGE_TOKEN_ID + 1  # any id but the image token's would do
    token_ids = [IMAGE_TOKEN_ID] * num_image_tokens + [question_token_id] * NUM_QUESTION_TOKENS
    input_ids = torch.tensor([token_ids], device=device)

    seconds = []
    for _ in range(2):  # the first pass warms up
        started = time.perf_counter()
        with torch.no_grad():
            # As in generation, only the logits of the last token are computed.
            model(input_ids=input_ids, pixel_values=pixel_values, logits_to_keep=1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)

    if device.type == "cuda":
        num_bytes = torch.cuda.max_memory_allocated()
    else:
        num_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
    return Cost(image_tokens=num_image_tokens, seconds=min(seconds), gib=num_bytes / GIB)


def make_config(spatial_merge_size: int, tiny: bool) -> NormLlavaConfig:
    """The config of Qwen3-0.6B with SigLIP2-base-512, or of a tiny model that takes pictures of the same size."""
    if tiny:
        text = Qwen3Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, vocab_size=64,
        )  # fmt: skip
        vision = SiglipVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=512,
            patch_size=64, vision_use_head=False,
        )  # fmt: skip
    else:
        text = Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        )  # fmt: skip
        vision = SiglipVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=512,
            patch_size=16, vision_use_head=False,
        )  # fmt: skip

    patches_a_side = vision.image_size // vision.patch_size
    return NormLlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN_ID,
        image_seq_length=(patches_a_side // spatial_merge_size) ** 2,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        spatial_merge_size=spatial_merge_size,
    )


def cut_page(tile_size: int, max_tiles: int) -> torch.Tensor:
    """The tiles of a page of noise, and a thumbnail if there are several tiles.

    Returns:
        The pixels, `[num_tiles, 3, tile_size, tile_size]`. The thumbnail counts as a tile.
    """
    width, height = PAGE
    noise = np.random.default_rng(0).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    image_processor = GotOcr2ImageProcessorPil(
        size={"height": tile_size, "width": tile_size}, crop_to_patches=True, max_patches=max_tiles
    )
    return image_processor(Image.fromarray(noise), return_tensors="pt")["pixel_values"]


if __name__ == "__main__":
    main()
