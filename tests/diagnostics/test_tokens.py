"""The type of each token, in a sample and in a batch that is padded or packed."""

import pytest
import torch

from diagnostics.parts import DiagnosticsError
from diagnostics.tokens import TokenIds, classify, classify_sample, find_sinks, token_ids
from families import build, inputs, record_sample


Inputs = dict[str, torch.Tensor]
IDS = TokenIds(image=9, special=frozenset({0, 1, 2}))
# A sample with a picture, and one without, with the type of each of their tokens.
PICTURE_IDS = [1, 9, 9, 5, 6, 2]
PICTURE_TYPES = ["special", "visual", "visual", "text", "text", "special"]
TEXT_IDS = [1, 7, 2]
TEXT_TYPES = ["special", "text", "special"]


def types(inputs: Inputs) -> list[list[str]]:
    """The type of each position of a batch, by name; every position has exactly one."""
    tokens = classify(inputs, IDS)
    masks = {"visual": tokens.visual, "text": tokens.text, **tokens.excluded}
    names = list(masks)
    stacked = torch.stack(list(masks.values())).int()  # [num_types, batch_size, S]
    assert (stacked.sum(dim=0) == 1).all()

    rows = []
    for type_numbers in stacked.argmax(dim=0).tolist():
        rows.append([names[number] for number in type_numbers])
    return rows


def test_a_padded_batch_with_a_blank_picture() -> None:
    """The blank picture at the end of the first row is not attended to, as padding isn't."""
    padded = {
        "input_ids": torch.tensor([[*PICTURE_IDS, 9, 9], [*TEXT_IDS, 0, 0, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 6 + [0] * 2, [1] * 3 + [0] * 5]),
    }
    first_row = [*PICTURE_TYPES, "blank picture", "blank picture"]
    second_row = [*TEXT_TYPES, *["padding"] * 5]
    assert types(padded) == [first_row, second_row]


def test_a_packed_row_with_a_blank_picture() -> None:
    """Each token of the blank picture at the end has position 0, as if it was a sample of its own."""
    packed = {
        "input_ids": torch.tensor([[*PICTURE_IDS, *TEXT_IDS, 9, 9]]),
        "position_ids": torch.tensor([[*range(6), *range(3), 0, 0]]),
    }
    assert types(packed) == [[*PICTURE_TYPES, *TEXT_TYPES, "blank picture", "blank picture"]]


def test_a_batch_that_is_neither_padded_nor_packed() -> None:
    assert types({"input_ids": torch.tensor([PICTURE_IDS])}) == [PICTURE_TYPES]


def test_a_sink_has_a_large_norm_after_a_layer() -> None:
    """A norm that is large only before the first layer makes no sink: the layer may undo it."""
    tokens = record_sample(build("llava-siglip"), inputs("llava-siglip")).tokens_with_sinks
    layer_norms = torch.ones(4, len(tokens.text))
    layer_norms[0, 10] = 1e4
    assert not find_sinks(layer_norms, tokens).any()
    layer_norms[2, 10] = 1e4
    assert find_sinks(layer_norms, tokens).nonzero().flatten().tolist() == [10]


def test_a_sample_without_image_tokens_or_text_and_a_batch_are_refused() -> None:
    model = build("llava-siglip")
    sample = inputs("llava-siglip")
    ids = token_ids(model)
    words = torch.tensor([[1, 20, 21]])
    only_image_tokens = sample["input_ids"][:, 4:20]

    with pytest.raises(DiagnosticsError, match="has no image tokens"):
        classify_sample({"input_ids": words}, ids)
    with pytest.raises(DiagnosticsError, match="no ordinary text"):
        classify_sample({"input_ids": only_image_tokens}, ids)
    with pytest.raises(DiagnosticsError, match="one sample at a time, got 2"):
        classify_sample({"input_ids": words.repeat(2, 1)}, ids)
