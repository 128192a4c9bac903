"""`spatial_merge_size` joins neighbouring patches into one image token, and 1 leaves patches as they are."""

from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from modeling_normllava.modeling_normllava import NormLlavaMultiModalProjector, merge_patches


IMAGE_TOKEN_ID = 31


def make_config(spatial_merge_size: int) -> NormLlavaConfig:
    """A tiny Llama with a CLIP that makes 6 x 6 patches of a picture of 24 x 24 pixels."""
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


def merge_by_loops(picture: torch.Tensor, side: int, merge_size: int) -> torch.Tensor:
    """What `merge_patches` gives for one picture's patches `(side * side, hidden_size)`, patch by patch."""
    merged = []
    for top in range(0, side, merge_size):
        for left in range(0, side, merge_size):
            square = []
            for row in range(top, top + merge_size):
                for column in range(left, left + merge_size):
                    square.append(picture[row * side + column])
            merged.append(torch.cat(square))
    return torch.stack(merged)


@pytest.mark.parametrize("merge_size", [2, 3])
def test_squares_of_patches_are_joined_row_by_row(merge_size: int) -> None:
    features = torch.randn(3, 36, 5)
    merged = merge_patches(features, merge_size)
    assert merged.shape == (3, 36 // merge_size**2, 5 * merge_size**2)
    for picture, tokens in zip(features, merged, strict=True):
        assert torch.equal(tokens, merge_by_loops(picture, side=6, merge_size=merge_size))


def test_a_projector_that_merges_nothing_is_llavas_with_a_norm() -> None:
    torch.manual_seed(0)
    projector = NormLlavaMultiModalProjector(make_config(spatial_merge_size=1))
    features = torch.randn(2, 36, 8)
    expected = projector.norm(projector.linear_2(projector.act(projector.linear_1(features))))
    assert torch.equal(projector(features), expected)


@pytest.mark.parametrize(
    ("num_patches", "merge_size"), [(729, 2), (37, 2), (36, 4)], ids=["27 x 27", "a class token", "6 x 6 by 4"]
)
def test_what_does_not_divide_is_refused(num_patches: int, merge_size: int) -> None:
    with pytest.raises(ValueError, match=f"{num_patches} patches can't be merged by spatial_merge_size {merge_size}"):
        merge_patches(torch.randn(1, num_patches, 8), merge_size)


def test_a_saved_model_gives_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NormLlavaForConditionalGeneration(make_config(spatial_merge_size=2)).eval()
    image_tokens = [IMAGE_TOKEN_ID] * 9  # 6 x 6 patches in squares of 2 x 2
    input_ids = torch.tensor([[1, *image_tokens, 5, 6]])
    pixel_values = torch.randn(1, 3, 24, 24)
    expected = model(input_ids=input_ids, pixel_values=pixel_values).logits

    model.save_pretrained(tmp_path)
    loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert loaded.config.spatial_merge_size == 2
    assert torch.equal(loaded(input_ids=input_ids, pixel_values=pixel_values).logits, expected)
