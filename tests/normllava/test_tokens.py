"""Tests of the type of each token, in a sample and in a batch that is padded or packed."""

from typing import Any

import pytest
import torch

from families import build, inputs, record_sample
from normllava.parts import DiagnosticsError
from normllava.tokens import TokenIds, classify, classify_sample, find_sinks


# The token ids that are not words. Padding has id 0.
IDS = TokenIds(image=9, special=frozenset({0, 1, 2}))
# The token ids of a sample with a picture and of a sample without one, and the type of each token.
PICTURE_IDS = [1, 9, 9, 5, 6, 2]
PICTURE_TYPES = ["special", "image", "image", "text", "text", "special"]
TEXT_IDS = [1, 7, 2]
TEXT_TYPES = ["special", "text", "special"]


def token_types(batch: dict[str, torch.Tensor]) -> list[list[str]]:
    """The type of each position of a batch, after a check that every position has exactly one type."""
    tokens = classify(batch, IDS)
    masks = {"image": tokens.image, "text": tokens.text, **tokens.excluded}
    names = list(masks)
    stacked = torch.stack(list(masks.values())).int()  # [num_types, batch_size, length]
    assert (stacked.sum(dim=0) == 1).all()

    types = []
    for type_numbers in stacked.argmax(dim=0).tolist():
        types.append([names[number] for number in type_numbers])
    return types


def test_a_padded_batch_with_a_blank_picture() -> None:
    """The blank picture, two image tokens at the end of the first sample, is masked like the padding of the second."""
    padded = {
        "input_ids": torch.tensor([[*PICTURE_IDS, 9, 9], [*TEXT_IDS, 0, 0, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 6 + [0] * 2, [1] * 3 + [0] * 5]),
    }
    first_sample = [*PICTURE_TYPES, "blank picture", "blank picture"]
    second_sample = [*TEXT_TYPES, *["padding"] * 5]
    assert token_types(padded) == [first_sample, second_sample]


def test_a_packed_row_with_a_blank_picture() -> None:
    """Each token of the blank picture at the end has position 0, as if the token were a sample of its own."""
    packed = {
        "input_ids": torch.tensor([[*PICTURE_IDS, *TEXT_IDS, 9, 9]]),
        "position_ids": torch.tensor([[*range(6), *range(3), 0, 0]]),
    }
    assert token_types(packed) == [[*PICTURE_TYPES, *TEXT_TYPES, "blank picture", "blank picture"]]


def test_a_batch_that_is_neither_padded_nor_packed() -> None:
    assert token_types({"input_ids": torch.tensor([PICTURE_IDS])}) == [PICTURE_TYPES]


@pytest.mark.parametrize("mask", [torch.zeros(2, 1, 6, 6), {"full_attention": None}], ids=["4-D", "by kind of layer"])
def test_a_mask_that_does_not_say_what_is_padding_is_passed_over(mask: Any) -> None:
    batch = {"input_ids": torch.tensor([PICTURE_IDS, PICTURE_IDS]), "attention_mask": mask}
    assert token_types(batch) == [PICTURE_TYPES, PICTURE_TYPES]


def test_a_sink_has_a_large_norm_after_a_layer() -> None:
    """A token whose norm is large only before the first layer is no sink, because the layer may undo it."""
    tokens = record_sample(build("llava-siglip"), inputs("llava-siglip")).tokens_with_sinks
    # The decoder has three layers. Index 0 has the norms before the first layer, index n those after layer n.
    layer_norms = torch.ones(3 + 1, len(tokens.text))
    position = 10  # of an image token

    layer_norms[0, position] = 1e4
    assert not find_sinks(layer_norms, tokens).any()

    layer_norms[2, position] = 1e4
    assert find_sinks(layer_norms, tokens).nonzero().flatten().tolist() == [position]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        pytest.param([[1, 5, 6]], "has no image tokens", id="text only"),
        pytest.param([[9, 9, 9]], "no ordinary text", id="image tokens only"),
        pytest.param([PICTURE_IDS, PICTURE_IDS], "one sample at a time, got 2", id="two samples"),
    ],
)
def test_a_sample_that_can_not_be_measured_is_refused(samples: list[list[int]], message: str) -> None:
    with pytest.raises(DiagnosticsError, match=message):
        classify_sample({"input_ids": torch.tensor(samples)}, IDS)
