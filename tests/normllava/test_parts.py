"""Tests of finding the parts of a vision-language model in every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    BaseImageProcessor,
    CLIPImageProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from families import FAMILIES, IMAGE, NUM_PATCHES, build, inputs
from normllava import NormMonitor, scale_projector
from normllava.diagnostics.scaling import scaled
from normllava.inputs import prepare_picture
from normllava.parts import (
    DiagnosticsError,
    complete_processor,
    find_decoder,
    find_encoder,
    find_projector,
    find_projector_norm,
    image_token_id,
)


# Families that are refused: pictures don't reach the decoder as tokens, or the default config names no image token.
REFUSED = {
    "blip", "blip-2", "florence2", "git", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5",
    "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mistral4", "nemotron_h_omni", "pi0", "pix2struct", "pp_formulanet",
    "t5gemma2", "udop", "vision-encoder-decoder",
}  # fmt: skip
# Families in which no encoder, or no projector, is found. With its default config Gemma 4 has no vision encoder.
WITHOUT_ENCODER = {"apertus1p5", "fuyu", "gemma4", "gemma4_unified"}
WITHOUT_PROJECTOR = {"apertus1p5", "gemma4", "gemma4_unified", "inkling_mm_model"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_of_a_family_are_found(name: str) -> None:
    model = build(name)
    encoder = find_encoder(model)
    projector = find_projector(model)
    layers = find_decoder(model).layers
    assert encoder is not None
    assert projector is not None
    assert len(layers) == 3

    # No module of the decoder is taken for a part of the encoder or the projector.
    decoder_modules = set(layers.modules())
    assert decoder_modules.isdisjoint(encoder.modules())
    assert decoder_modules.isdisjoint(projector.modules())

    assert image_token_id(model) == IMAGE
    has_norm = find_projector_norm(model) is not None
    assert has_norm == name.startswith("normllava")  # only NormLlava has a norm module at the projector's end


def check_image_tokens(model: PreTrainedModel) -> None:
    """Raise `DiagnosticsError` for a model without image tokens. Which function raises it depends on the family."""
    image_token_id(model)
    find_decoder(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
def test_every_family_of_transformers_has_its_parts_or_is_refused_in_one_line(name: str) -> None:
    """The model is made from the family's default config, on the meta device, where weights need no memory."""
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name]())
    except Exception as error:
        first_line = str(error).strip().splitlines()[0]
        pytest.skip(f"no model can be made from the default config: {first_line}")

    if name in REFUSED:
        with pytest.raises(DiagnosticsError, match=rf"\A{type(model).__name__} has no image tokens: .*\Z"):
            check_image_tokens(model)
        return

    decoder = find_decoder(model)
    assert isinstance(image_token_id(model), int)
    assert len(decoder.layers) == decoder.config.num_hidden_layers
    assert (find_encoder(model) is None) == (name in WITHOUT_ENCODER)
    assert (find_projector(model) is None) == (name in WITHOUT_PROJECTOR)


@pytest.mark.parametrize(
    ("name", "processor_class", "image_processor"),
    [
        ("llava-clip", LlavaProcessor, CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)),
        ("vipllava", LlavaProcessor, CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)),
        (
            "llava_next",
            LlavaNextProcessor,
            LlavaNextImageProcessorPil(size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=[[28, 56]]),
        ),
    ],
    ids=["llava", "vipllava", "llava_next"],
)
def test_an_older_processor_counts_the_patches_once_it_is_completed(
    name: str, processor_class: Any, image_processor: BaseImageProcessor, backbones: Callable[[str], Path]
) -> None:
    model = build(name)
    tokenizer = AutoTokenizer.from_pretrained(backbones("qwen2"))
    processor = processor_class(image_processor, tokenizer, image_token="<|image_pad|>")
    assert processor.patch_size is None
    complete_processor(processor, model)
    picture = Image.new("RGB", (28, 28))
    inputs = processor(images=picture, text="<|image_pad|>What?", return_tensors="pt")
    num_image_tokens = (inputs["input_ids"] == processor.image_token_id).sum()
    assert num_image_tokens >= NUM_PATCHES
    assert processor.patch_size == 7


def test_inputs_are_prepared_by_an_older_processor_too(backbones: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbones("qwen2"))
    image_processor = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)
    processor = LlavaProcessor(image_processor, tokenizer, image_token="<|image_pad|>")
    inputs = prepare_picture(build("llava-clip"), processor, Image.new("RGB", (28, 28)))
    assert (inputs["input_ids"] == processor.image_token_id).sum() == NUM_PATCHES


def watch(model: PreTrainedModel) -> None:
    """Run a pass that a monitor watches."""
    NormMonitor(model).watch()
    model(**inputs("llava-clip"))


def scale_embeddings(model: PreTrainedModel) -> None:
    """Run a pass with scaled image tokens."""
    with scaled(model, inputs("llava-clip")["input_ids"][0] == IMAGE, 2.0):
        model(**inputs("llava-clip"))


def scale_weights(model: PreTrainedModel) -> None:
    """Scale the projector."""
    scale_projector(model, CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28))


@pytest.mark.parametrize("measure", [watch, scale_embeddings, scale_weights])
def test_a_decoder_with_several_states_for_each_token_is_refused(measure: Callable[[PreTrainedModel], Any]) -> None:
    """Gemma 3n's layers take four. The figures would be wrong in silence."""
    model = build("llava-clip")

    def stack_four(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return (args[0].expand(4, *args[0].shape), *args[1:]), kwargs

    find_decoder(model).layers[0].register_forward_pre_hook(stack_four, with_kwargs=True)
    with pytest.raises(DiagnosticsError, match=r"take a tensor of shape \(4, 1, .*, not one hidden state for"):
        measure(model)
