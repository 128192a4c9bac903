"""With `spatial_merge_size` above 1, each square of patches becomes one image token; with 1, each patch does."""

from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from modeling_normllava.modeling_normllava import NormLlavaMultiModalProjector, merge_patches


IMAGE_TOKEN_ID = 31


def make_config(spatial_merge_size: int) -> NormLlavaConfig:
    """The config of a tiny Llama with a CLIP encoder that makes 6 x 6 patches of a picture of 24 x 24 pixels."""
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=24, patch_size=4,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return NormLlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN_ID,
        vision_feature_select_strategy="default",  # drops CLIP's class token
        spatial_merge_size=spatial_merge_size,
        projector_norm_target=1.0,
    )


def merge_by_loops(patches: torch.Tensor, side: int, merge_size: int) -> torch.Tensor:
    """Join the patches of one picture, square by square, as `merge_patches` should.

    Args:
        patches: The picture's `side` x `side` patches, row by row: `(side * side, hidden_size)`.
        side: The number of patches in a row, and of rows.
        merge_size: The side of a square, in patches.

    Returns:
        One token for each square: `(num_squares, merge_size * merge_size * hidden_size)`.
    """
    tokens = []
    for top in range(0, side, merge_size):
        for left in range(0, side, merge_size):
            square = []
            for row in range(top, top + merge_size):
                for column in range(left, left + merge_size):
                    square.append(patches[row * side + column])
            tokens.append(torch.cat(square))
    return torch.stack(tokens)


@pytest.mark.parametrize("merge_size", [2, 3])
def test_squares_of_patches_are_joined_row_by_row(merge_size: int) -> None:
    features = torch.randn(3, 36, 5)  # 3 pictures of 6 x 6 patches
    merged = merge_patches(features, merge_size)
    for patches, tokens in zip(features, merged, strict=True):
        assert torch.equal(tokens, merge_by_loops(patches, side=6, merge_size=merge_size))


def test_a_projector_that_merges_nothing_is_llavas_with_a_norm() -> None:
    torch.manual_seed(0)
    projector = NormLlavaMultiModalProjector(make_config(spatial_merge_size=1))
    features = torch.randn(2, 36, 8)  # 2 pictures of 6 x 6 patches
    llavas_output = projector.linear_2(projector.act(projector.linear_1(features)))
    assert torch.equal(projector(features), projector.norm(llavas_output))


@pytest.mark.parametrize(
    ("num_patches", "merge_size"),
    [(27 * 27, 2), (6 * 6 + 1, 2), (6 * 6, 4)],
    ids=["an odd side", "a class token beside the patches", "a side of 6 in squares of 4"],
)
def test_patches_that_make_no_whole_squares_are_refused(num_patches: int, merge_size: int) -> None:
    with pytest.raises(ValueError, match=f"{num_patches} patches can't be merged by spatial_merge_size {merge_size}"):
        merge_patches(torch.randn(1, num_patches, 8), merge_size)


def test_a_saved_model_gives_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NormLlavaForConditionalGeneration(make_config(spatial_merge_size=2)).eval()
    image_tokens = [IMAGE_TOKEN_ID] * 9  # 6 x 6 patches make 9 squares of 2 x 2
    input_ids = torch.tensor([[1, *image_tokens, 5, 6]])  # BOS, the picture, and two tokens of text
    pixel_values = torch.randn(1, 3, 24, 24)
    expected = model(input_ids=input_ids, pixel_values=pixel_values).logits

    model.save_pretrained(tmp_path)
    loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert loaded.config.spatial_merge_size == 2
    assert torch.equal(loaded(input_ids=input_ids, pixel_values=pixel_values).logits, expected)
