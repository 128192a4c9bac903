"""What a token is, in a sample and in a batch that is padded or packed."""

import pytest
import torch

from diagnostics.parts import DiagnosticsError
from diagnostics.tokens import TokenIds, classify, classify_sample, find_sinks, token_ids
from families import build, inputs, record_sample


Inputs = dict[str, torch.Tensor]
IDS = TokenIds(image=9, special=frozenset({0, 1, 2}))
SAMPLES = ([1, 9, 9, 5, 6, 2], [1, 7, 2])
IS_WHAT = (["special", "visual", "visual", "text", "text", "special"], ["special", "text", "special"])


def kinds(inputs: Inputs) -> list[list[str]]:
    """What each position is, by name; every position is exactly one thing."""
    tokens = classify(inputs, IDS)
    masks = {"visual": tokens.visual, "text": tokens.text, **tokens.excluded}
    assert (sum(mask.int() for mask in masks.values()) == 1).all()
    names = list(masks)
    return [[names[n] for n in row] for row in torch.stack(list(masks.values())).int().argmax(0).tolist()]


def test_a_batch_is_sorted_padded_and_packed() -> None:
    """Padding is text that nobody wrote; a blank picture is tokens that no sample holds."""
    padded = {
        "input_ids": torch.tensor([[*SAMPLES[0], 9, 9], [*SAMPLES[1], 0, 0, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 6 + [0] * 2, [1] * 3 + [0] * 5]),
    }
    assert kinds(padded) == [[*IS_WHAT[0], "blank picture", "blank picture"], [*IS_WHAT[1], *["padding"] * 5]]
    packed = {
        "input_ids": torch.tensor([[*SAMPLES[0], *SAMPLES[1], 9, 9]]),
        "position_ids": torch.tensor([[*range(6), *range(3), 0, 0]]),
    }
    assert kinds(packed) == [[*IS_WHAT[0], *IS_WHAT[1], "blank picture", "blank picture"]]
    assert kinds({"input_ids": torch.tensor(SAMPLES[:1])}) == [IS_WHAT[0]]


def test_a_token_that_is_long_when_it_enters_is_no_sink() -> None:
    """A layer may take it back; what counts is what stands behind one."""
    tokens = record_sample(build("llava-siglip"), inputs("llava-siglip")).with_sinks
    norms = torch.ones(4, len(tokens.text))
    norms[0, 10] = 1e4
    assert not find_sinks(norms, tokens).any()
    norms[2, 10] = 1e4
    assert find_sinks(norms, tokens).nonzero().flatten().tolist() == [10]


def test_what_has_nothing_visual_is_refused() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    ids, words = token_ids(model), torch.tensor([[1, 20, 21]])
    with pytest.raises(DiagnosticsError, match="has no image tokens"):
        classify_sample({"input_ids": words}, ids)
    with pytest.raises(ValueError, match="no ordinary text"):
        classify_sample({"input_ids": sample["input_ids"][:, 4:20]}, ids)
    with pytest.raises(ValueError, match="one sample at a time, got 2"):
        classify_sample({"input_ids": words.repeat(2, 1)}, ids)
