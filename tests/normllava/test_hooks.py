"""Tests of the hidden states before and after the first layer's MLP, which `InterfaceHooks` passes to a function."""

import pytest
import torch
from transformers import PreTrainedModel

from families import build, inputs
from normllava.hooks import InterfaceHooks
from normllava.parts import find_decoder


@torch.no_grad()
def states_by_place(model: PreTrainedModel, sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The hidden states at each place of the model, such as "before_mlp", in one forward pass."""
    states: dict[str, torch.Tensor] = {}

    def keep_state(place: str, state: torch.Tensor) -> None:
        states[place] = state

    with InterfaceHooks(model, keep_state):
        model(**sample)
    return states


@pytest.mark.parametrize(
    ("name", "mlp_name"),
    [("normllava", "mlp"), ("qwen2_5_vl", "mlp"), ("gemma3", "mlp"), ("lfm2_vl", "feed_forward")],
)
def test_the_states_before_and_after_an_mlp_that_adds_nothing_are_the_same(name: str, mlp_name: str) -> None:
    model = build(name)
    mlp = getattr(find_decoder(model).layers[0], mlp_name)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.zero_()

    states = states_by_place(model, inputs(name))
    assert torch.equal(states["before_mlp"], states["after_mlp"])
    # At the place "decoder" the states enter the layer. Attention then adds to them.
    assert not torch.allclose(states["before_mlp"], states["decoder"])


def test_there_is_no_place_before_an_mlp_that_gets_the_same_input_as_attention() -> None:
    """In Cohere 2's layers, attention and MLP run side by side."""
    states = states_by_place(build("cohere2_vision"), inputs("cohere2_vision"))
    assert "after_mlp" in states
    assert "before_mlp" not in states
