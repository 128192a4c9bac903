"""The parts of each family's model, where transformers' own attributes have them."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from diagnostics.parts import (
    NoVisualTokensError,
    decoder_layers,
    find_encoder,
    find_norm,
    find_projector,
    image_token_id,
)
from families import FAMILIES, IMAGE, build


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_of_a_family_are_found(name: str) -> None:
    model = build(name)
    encoder, projector = find_encoder(model), find_projector(model)
    assert encoder is not None
    assert projector is not None
    # What the projector returns is as wide as the decoder; no layer of the decoder is in either.
    decoder = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    assert len(decoder_layers(model)) == 3
    assert not decoder & {id(module) for part in (encoder, projector) for module in part.modules()}
    assert image_token_id(model) == IMAGE
    assert (find_norm(model) is None) == (name != "normllava")


def test_a_language_model_has_no_image_token() -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(NoVisualTokensError, match="LlamaForCausalLM has no visual tokens"):
        image_token_id(LlamaForCausalLM(LlamaConfig(**small, vocab_size=32)))
