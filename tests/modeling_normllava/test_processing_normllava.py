"""The processor of models whose pictures are cut into tiles writes and counts the image tokens of all tiles."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration, NormLlavaProcessor


TILE = 28  # the side of a tile, in pixels
TOKENS_PER_TILE = 4  # the vision encoder makes 2 x 2 patches of a tile
# The width and height of pictures, and the number of their tiles if a grid has six tiles at most.
NUM_TILES = {
    (TILE, TILE): 1,  # a square is left whole
    (2 * TILE, TILE): 3,  # two tiles and the thumbnail
    (TILE, 3 * TILE): 4,  # three tiles and the thumbnail
    (300, 210): 7,  # a grid of 3 x 2 tiles, whose shape is the nearest, and the thumbnail
}


@pytest.fixture
def folder(make_model_folder: Callable[..., Path]) -> Path:
    """The folder of a model whose pictures are cut into six tiles at most."""
    return make_model_folder(max_tiles=6)


def make_picture(size: tuple[int, int]) -> Image.Image:
    """A picture of noise, so that no two tiles are alike."""
    return Image.effect_noise(size, sigma=80).convert("RGB")


@pytest.mark.parametrize(("size", "num_tiles"), NUM_TILES.items(), ids=str)
def test_a_picture_has_the_image_tokens_of_all_its_tiles(folder: Path, size: tuple[int, int], num_tiles: int) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    assert isinstance(processor, NormLlavaProcessor)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder)
    inputs = processor(images=make_picture(size), text=f"{processor.image_token} What?", return_tensors="pt")

    assert len(inputs["pixel_values"]) == num_tiles
    image_embeddings = torch.cat(model.model.get_image_features(inputs["pixel_values"]).pooler_output)
    num_image_tokens = int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert num_image_tokens == TOKENS_PER_TILE * num_tiles
    assert len(image_embeddings) == num_image_tokens

    width, height = size
    counts = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
    assert counts.num_image_tokens == [num_image_tokens]
    assert counts.num_image_patches == [num_tiles]  # transformers' "patches" are tiles here


def test_each_picture_of_a_prompt_has_its_own_number_of_tokens(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    sizes = list(NUM_TILES)
    text = ";".join([processor.image_token] * len(sizes))  # ";" shows where a picture's tokens end
    inputs = processor(images=[make_picture(size) for size in sizes], text=text)

    (input_ids,) = inputs["input_ids"]
    text_of_pictures = processor.tokenizer.decode(input_ids).split(";")
    num_tokens = [picture_text.count(processor.image_token) for picture_text in text_of_pictures]
    assert num_tokens == [TOKENS_PER_TILE * num_tiles for num_tiles in NUM_TILES.values()]
    # The image processor's `num_patches` is left out, because the model would refuse it.
    assert set(inputs) == {"input_ids", "attention_mask", "pixel_values"}


def test_tiles_are_parts_of_the_picture_and_the_thumbnail_is_all_of_it(
    folder: Path, backbones: Callable[[str], Path]
) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    encoder_processor = AutoImageProcessor.from_pretrained(backbones("siglip"))
    picture = make_picture((2 * TILE, TILE))  # already of the grid's size
    left, right, thumbnail = processor.image_processor(picture, return_tensors="pt")["pixel_values"]

    # The encoder's own image processor doesn't cut pictures. It gives the same pixels for the halves and the whole.
    left_half = picture.crop((0, 0, TILE, TILE))
    right_half = picture.crop((TILE, 0, 2 * TILE, TILE))
    expected = encoder_processor([left_half, right_half, picture], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(torch.stack([left, right, thumbnail]), expected, rtol=0, atol=1e-5)


def test_a_caller_can_leave_pictures_whole(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    width, height = 300, 210  # without `max_patches`, a picture of 7 tiles
    inputs = processor(images=make_picture((width, height)), text=processor.image_token, max_patches=1)
    assert len(inputs["pixel_values"]) == 1
    assert len(inputs["input_ids"][0]) == TOKENS_PER_TILE
    counts = processor._get_num_multimodal_tokens([(height, width)], max_patches=1)
    assert counts.num_image_tokens == [TOKENS_PER_TILE]


def test_without_pictures_nothing_is_counted(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    assert processor._get_num_multimodal_tokens().num_image_tokens is None
