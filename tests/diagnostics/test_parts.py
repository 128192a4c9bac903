"""The parts of each family's model, where transformers' own attributes have them."""

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from diagnostics.parts import DiagnosticsError, find_decoder, find_encoder, find_norm, find_projector, image_token_id
from families import FAMILIES, IMAGE, build


# Pictures are not among the decoder's input tokens, or the defaults of the config name no token for them.
REFUSED = {
    "blip", "blip-2", "florence2", "git", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5",
    "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mistral4", "nemotron_h_omni", "pi0", "pix2struct", "pp_formulanet",
    "t5gemma2", "udop", "vision-encoder-decoder",
}  # fmt: skip
# Where a model names none; by default Gemma 4 has no vision encoder.
WITHOUT_ENCODER = {"apertus1p5", "fuyu", "gemma4", "gemma4_unified"}
WITHOUT_PROJECTOR = {"apertus1p5", "gemma4", "gemma4_unified", "inkling_mm_model"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_of_a_family_are_found(name: str) -> None:
    model = build(name)
    encoder, projector = find_encoder(model), find_projector(model)
    assert encoder is not None
    assert projector is not None
    # What the projector returns is as wide as the decoder; no layer of the decoder is in either.
    layers = find_decoder(model).layers
    assert len(layers) == 3
    assert not set(layers.modules()) & {*encoder.modules(), *projector.modules()}
    assert image_token_id(model) == IMAGE
    assert (find_norm(model) is None) == (not name.startswith("normllava"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
def test_every_family_of_transformers_has_its_parts_or_is_refused_in_one_line(name: str) -> None:
    """As its config's defaults have it, without memory for weights."""
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name]())
    except Exception as error:
        pytest.skip(f"its defaults make no model: {str(error).strip().splitlines()[0]}")
    if name in REFUSED:
        with pytest.raises(DiagnosticsError, match=rf"\A{type(model).__name__} has no image tokens: .*\Z"):
            assert image_token_id(model) is find_decoder(model)
        return
    assert isinstance(image_token_id(model), int)
    assert len(find_decoder(model).layers) == find_decoder(model).config.num_hidden_layers
    assert (find_encoder(model) is None) == (name in WITHOUT_ENCODER)
    assert (find_projector(model) is None) == (name in WITHOUT_PROJECTOR)
