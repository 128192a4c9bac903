"""The places of a decoder's first layer: what `InterfaceHooks` passes before and after its MLP."""

import pytest
import torch
from transformers import PreTrainedModel

from diagnostics.hooks import InterfaceHooks
from diagnostics.parts import find_decoder
from families import build, inputs


@torch.no_grad()
def states_by_place(model: PreTrainedModel, sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensor at each place in one forward pass."""
    states: dict[str, torch.Tensor] = {}
    with InterfaceHooks(model, states.__setitem__):
        model(**sample)
    return states


@pytest.mark.parametrize("name", ["normllava", "qwen2_5_vl", "gemma3", "lfm2_vl"])
def test_before_an_mlp_that_adds_nothing_is_what_the_layer_returns(name: str) -> None:
    model = build(name)
    layer = find_decoder(model).layers[0]
    mlp = layer.feed_forward if name == "lfm2_vl" else layer.mlp
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.zero_()

    states = states_by_place(model, inputs(name))
    assert torch.equal(states["before_mlp"], states["after_mlp"])
    assert not torch.allclose(states["before_mlp"], states["decoder"])


def test_a_layer_whose_mlp_gets_the_input_of_attention_has_no_place_before_the_mlp() -> None:
    states = states_by_place(build("cohere2_vision"), inputs("cohere2_vision"))
    assert "after_mlp" in states
    assert "before_mlp" not in states
