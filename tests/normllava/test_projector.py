"""A projector is scaled in place, found by running the model, and put back to the bit where that doesn't do."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, BaseImageProcessor, PreTrainedModel

from families import FAMILIES, IMAGE, VISION, Family, build, inputs, make_config, text_config
from normllava import scale_projector
from normllava.diagnostics import measure
from normllava.errors import UserError
from normllava.norms import text_norm_target, vocabulary_norms


# What each family multiplies beside the weights of its last linear layer.
MORE = {"llava_next": "model.image_newline", "llava_onevision": "model.image_newline"}


class FamilyPictures(BaseImageProcessor):
    """Stands for the image processor of a family's small model, which has none: each picture becomes random values."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def __call__(self, images: Image.Image, return_tensors: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(sum(images.tobytes()[:1000]))
        return self._family.make_picture()


def image_states(model: PreTrainedModel, name: str) -> torch.Tensor:
    """The image embeddings that enter the decoder for the family's sample, `(num_image_tokens, hidden_size)`."""
    states: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).clone())

    sample = inputs(name)
    layers = next(module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    with layers[0].register_forward_pre_hook(keep, with_kwargs=True), torch.no_grad():
        model(**sample)
    is_image = sample["input_ids"][0] == IMAGE
    return states[0][0][is_image]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_image_embedding_of_a_family_is_multiplied(name: str) -> None:
    model = build(name)
    before = image_states(model, name)
    others = {key: value.clone() for key, value in model.state_dict().items()}
    scaled = scale_projector(model, FamilyPictures(FAMILIES[name]), target_ratio=2.5)

    torch.testing.assert_close(image_states(model, name), scaled.factor * before, rtol=1e-3, atol=1e-5)
    assert scaled.ratio_after == pytest.approx(2.5, rel=1e-3)
    assert scaled.has_deep_features == (name == "qwen3_vl")

    # One module is scaled, with newline features where a family has them, and nothing else changes.
    modules = {parameter.rpartition(".")[0] for parameter in scaled.parameters if parameter != MORE.get(name)}
    assert len(modules) == 1
    assert (MORE.get(name) in scaled.parameters) == (name in MORE)
    for key, value in model.state_dict().items():
        is_changed = key in scaled.parameters and bool(value.any())  # zeros stay zeros
        assert torch.equal(value, others[key]) != is_changed, key


def test_a_module_that_holds_others_is_passed_over_if_it_computes_nothing_at_its_end() -> None:
    """Idefics2's resampler begins with parameters of its own, and ends with the norm inside of it."""
    perceiver = {
        "hidden_size": 32,
        "resampler_n_latents": 4,
        "resampler_depth": 2,
        "resampler_n_heads": 2,
        "resampler_head_dim": 16,
        "num_key_value_heads": 1,
    }
    text = text_config("mistral", head_dim=8)
    config = make_config(
        "idefics2", vision_config=VISION, text_config=text, perceiver_config=perceiver, image_token_id=IMAGE
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    family = Family(config, lambda: {"pixel_values": torch.rand(1, 1, 3, 28, 28)}, num_image_tokens=4)
    scaled = scale_projector(model, FamilyPictures(family))
    assert scaled.parameters == ["model.connector.perceiver_resampler.norm.weight"]
    assert scaled.ratio_after == pytest.approx(1, rel=1e-3)


@pytest.fixture
def llava(make_model_folder: Callable[..., Path]) -> tuple[PreTrainedModel, Any]:
    """A small NormLlava without a norm, and its processor."""
    folder = make_model_folder(projector_norm="none")
    return AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)


def test_the_ratio_is_that_of_the_diagnostics(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    pictures = [Image.new("RGB", (60, 40), colour) for colour in ("red", "white", "black")]
    (report,) = measure(model, processor, pictures).report.models
    scaled = scale_projector(model, processor, pictures)
    assert scaled.ratio_before == pytest.approx(report.summary.look("ratio_to_vocabulary").mean, rel=1e-5)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_ones_own_pictures_are_measured_beside_noise(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    pictures = [Image.new("RGB", (60, 40), colour) for colour in ("red", "white", "black")]
    scaled = scale_projector(model, processor, pictures)
    assert scaled.num_pictures == 3
    assert scaled.ratio_after == pytest.approx(1, rel=1e-4)
    assert scaled.ratio_on_noise != scaled.ratio_before
    assert re.match(
        rf"Image embeddings had {scaled.ratio_before:.3g} times the norm of text on your 3 pictures "
        rf"\({scaled.ratio_on_noise:.3g} on noise\), and have 1 times now\.\nMultiplied by ",
        str(scaled),
    )


def test_the_processor_is_that_of_the_models_folder(make_model_folder: Callable[..., Path]) -> None:
    folder = make_model_folder(projector_norm="none")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert scale_projector(model).ratio_after == pytest.approx(1, rel=1e-4)

    with pytest.raises(UserError, match="give its processor too"):
        scale_projector(build("llava-clip"))


def test_in_bfloat16_the_ratio_is_right_but_for_rounding(make_model_folder: Callable[..., Path]) -> None:
    folder = make_model_folder(projector_norm="none")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    assert scale_projector(model).ratio_after == pytest.approx(1, rel=0.01)


def test_the_mode_of_each_module_stays(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    model.train()
    model.model.vision_tower.eval()
    scale_projector(model, processor)
    assert model.model.language_model.training
    assert not model.model.vision_tower.training


def test_with_peft_the_base_and_the_trained_copy_are_scaled(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["multi_modal_projector"])
    adapted = get_peft_model(model, config)
    before = weights_of(adapted)
    scaled = scale_projector(adapted, processor)

    after = weights_of(adapted)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert len(changed) == 4  # weight and bias, of the original and of the copy
    assert {name.removeprefix("base_model.model.") for name in changed} == set(scaled.parameters)
    for name in changed:
        torch.testing.assert_close(after[name], scaled.factor * before[name])


def test_lora_on_the_projector_is_told(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    adapted = get_peft_model(model, LoraConfig(target_modules=["linear_2"]))
    with pytest.raises(UserError, match="The projector has LoRA adapters: scale the model before adapters are added"):
        scale_projector(adapted, processor)


def test_embeddings_that_are_not_finite_are_refused(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    with torch.no_grad():
        model.model.multi_modal_projector.linear_1.weight[0, 0] = torch.nan
    before = weights_of(model)
    with pytest.raises(UserError, match="Image embeddings have nan times the norm of text"):
        scale_projector(model, processor)
    assert all(torch.equal(p.nan_to_num(), before[name].nan_to_num()) for name, p in model.named_parameters())


class NormedProjector(nn.Module):
    """A projector followed by a norm without a gain."""

    def __init__(self, projector: nn.Module) -> None:
        super().__init__()
        self.projector = projector

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        projected = self.projector(features)
        return projected / projected.norm(dim=-1, keepdim=True)


def test_a_ratio_that_is_fixed_by_construction_is_told(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    target = text_norm_target(vocabulary_norms(model))
    model.model.multi_modal_projector = NormedProjector(model.model.multi_modal_projector)
    before = weights_of(model)
    message = f"a norm without a gain follows. So image embeddings have {1 / target:.3g} times the norm of text"
    with pytest.raises(UserError, match=re.escape(message)):
        scale_projector(model, processor)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


class ShiftedProjector(nn.Module):
    """A projector whose output is moved by a constant, which no parameter of its last module scales."""

    def __init__(self, projector: nn.Module) -> None:
        super().__init__()
        self.projector = projector

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.projector(features) + 3.0


def test_weights_are_put_back_to_the_bit_if_the_embeddings_do_not_follow(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    model.model.multi_modal_projector = ShiftedProjector(model.model.multi_modal_projector)
    before = weights_of(model)
    with pytest.raises(
        UserError, match=r"didn't follow a multiplication by .* of .*linear_2.weight, .*linear_2.bias; nor of"
    ):
        scale_projector(model, processor)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_weights_that_cannot_be_multiplied_are_refused(llava: tuple[PreTrainedModel, Any]) -> None:
    model, processor = llava
    linear = model.model.multi_modal_projector.linear_2
    whole = linear.weight.data
    linear.weight.requires_grad_(False)
    linear.weight.data = whole.to(torch.int8)
    linear.forward = lambda features: nn.functional.linear(features, whole, linear.bias)
    with pytest.raises(UserError, match=r"linear_2.weight is quantized: load the model without quantization"):
        scale_projector(model, processor)

    linear.weight = nn.Parameter(whole)
    linear.weight.quant_state = object()  # as bitsandbytes stores four bits in numbers of 16
    with pytest.raises(UserError, match=r"linear_2.weight is quantized: load the model without quantization"):
        scale_projector(model, processor)

    linear.weight = nn.Parameter(torch.empty_like(whole, device="meta"))  # as accelerate offloads it
    with pytest.raises(UserError, match=r"linear_2.weight has no data here: load the model without device_map"):
        scale_projector(model, processor)

    linear.weight = nn.Parameter(torch.empty(0))  # as DeepSpeed's ZeRO-3 leaves it
    with pytest.raises(UserError, match=r"linear_2.weight is sharded: scale it in a process of its own, save it, and"):
        scale_projector(model, processor)
    with torch.device("meta"), pytest.raises(UserError, match="The model has no data in this process"):
        scale_projector(AutoModelForImageTextToText.from_config(model.config), processor)

    with pytest.raises(UserError, match="pictures is empty"):
        scale_projector(build("llava-clip"), FamilyPictures(FAMILIES["llava-clip"]), pictures=[])
    with pytest.raises(UserError, match="target_ratio 0: it is a number above 0"):
        scale_projector(model, processor, target_ratio=0)


LOADING_PROGRAM = """
import sys
sys.modules["normllava"] = None  # importing it fails
import torch
from transformers import AutoModelForImageTextToText
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1])
print(type(model).__name__, model.model.multi_modal_projector.linear_2.weight.double().norm().item())
"""


def test_a_saved_model_is_loaded_by_its_own_class(tmp_path: Path) -> None:
    model = build("llava-clip")
    scale_projector(model, FamilyPictures(FAMILIES["llava-clip"]))
    model.save_pretrained(tmp_path)
    program = [sys.executable, "-c", LOADING_PROGRAM, str(tmp_path)]
    completed = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    name, norm = completed.stdout.split()
    assert name == "LlavaForConditionalGeneration"
    assert float(norm) == model.model.multi_modal_projector.linear_2.weight.double().norm().item()
