"""The places of a decoder's first layer, where its parts show what stands between them."""

import pytest
import torch

from diagnostics.hooks import InterfaceHooks
from diagnostics.parts import find_decoder
from families import build, inputs


@pytest.mark.parametrize("name", ["normllava", "qwen2_5_vl", "gemma3", "lfm2_vl"])
@torch.no_grad()
def test_what_is_before_an_mlp_that_adds_nothing_leaves_the_layer(name: str) -> None:
    model, sample = build(name), inputs(name)
    layer = find_decoder(model).layers[0]
    mlp = layer.feed_forward if name == "lfm2_vl" else layer.mlp
    for parameter in mlp.parameters():
        parameter.zero_()

    seen: dict[str, torch.Tensor] = {}
    with InterfaceHooks(model, seen.__setitem__):
        model(**sample)
    assert torch.equal(seen["before_mlp"], seen["after_mlp"])
    assert not torch.allclose(seen["before_mlp"], seen["decoder"])


@torch.no_grad()
def test_a_layer_whose_mlp_is_given_what_attention_is_given_has_nothing_between() -> None:
    """Its two updates can't be told apart."""
    model, sample = build("cohere2_vision"), inputs("cohere2_vision")
    seen: dict[str, torch.Tensor] = {}
    with InterfaceHooks(model, seen.__setitem__):
        model(**sample)
    assert "after_mlp" in seen
    assert "before_mlp" not in seen
