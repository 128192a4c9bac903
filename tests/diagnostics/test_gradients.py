"""The loss and its gradients: on what training sees, and as backward gives them."""

import dataclasses

import pytest
import torch
from peft import LoraConfig
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diagnostics.gradients import measure_gradients
from families import IMAGE, TEXT, answered
from modeling_normllava import NormLlavaForConditionalGeneration


def test_gradients_are_those_of_backward_and_compensation_divides_by_the_mean_gain(
    model: NormLlavaForConditionalGeneration,
) -> None:
    ids = torch.tensor([[10, 11, *[model.config.image_token_id] * 4, 12, 13, 14, 15]])
    sample = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)}
    gradients = measure_gradients(model, [answered(model, sample, 7)])
    assert gradients is not None
    assert (gradients.num_samples, gradients.num_targets) == (1, 3)
    measured = gradients.norms
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())

    labels = ids.clone()
    labels[:, :7] = -100
    entering: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].retain_grad()
        entering.append(args[0])

    with model.model.multi_modal_projector.register_forward_pre_hook(keep):
        loss = model(**sample, labels=labels).loss
    loss.backward()
    encoder = nn.utils.get_total_norm([p.grad for p in model.model.vision_tower.parameters() if p.grad is not None])
    assert measured["compensated"].loss == pytest.approx(loss.item())
    assert measured["compensated"].projector_input == pytest.approx(entering[0].grad.norm().item(), rel=1e-4)
    assert measured["compensated"].vision_encoder == pytest.approx(encoder.item(), rel=1e-4)

    # In a batch of the same sample twice each token has half the gradient, and weights have the sum of both halves.
    both = measure_gradients(model, [answered(model, sample, 7)] * 2)
    assert both is not None
    twice = both.norms["compensated"]
    assert twice.vision_encoder == pytest.approx(measured["compensated"].vision_encoder, rel=1e-4)
    for name in ("projector_input", "visual_embeddings", "text_embeddings"):
        assert getattr(twice, name) == pytest.approx(getattr(measured["compensated"], name) / 2**0.5, rel=1e-4)

    compensated, plain = measured["compensated"], measured["plain"]
    factor = 1 / model.model.multi_modal_projector.norm.weight.abs().mean().item()
    for name in ("projector_input", "vision_encoder"):
        assert getattr(compensated, name) / getattr(plain, name) == pytest.approx(factor, rel=1e-4)
    for name in ("loss", "visual_embeddings", "text_embeddings"):
        assert getattr(compensated, name) == pytest.approx(getattr(plain, name), rel=1e-5)


def test_compensation_is_switched_where_peft_has_wrapped_the_projector(
    model: NormLlavaForConditionalGeneration,
) -> None:
    model.add_adapter(
        LoraConfig(target_modules=r".*language_model.*q_proj", modules_to_save=["multi_modal_projector"])
    )
    assert isinstance(model.model.multi_modal_projector, ModulesToSaveWrapper)
    names = set(model.state_dict())
    ids = torch.tensor([[10, 11, *[model.config.image_token_id] * 4, 12, 13, 14, 15]])
    gradients = measure_gradients(
        model, [answered(model, {"input_ids": ids, "pixel_values": torch.ones(1, 3, 28, 28)}, 7)]
    )
    assert gradients is not None
    factor = 1 / model.model.multi_modal_projector.norm.weight.abs().mean().item()
    ratio = gradients.norms["compensated"].projector_input / gradients.norms["plain"].projector_input
    assert ratio == pytest.approx(factor, rel=1e-4)
    assert set(model.state_dict()) == names


def test_gradients_need_something_to_predict(model: NormLlavaForConditionalGeneration) -> None:
    picture = [model.config.image_token_id] * 4
    pixels = torch.randn(1, 3, 28, 28)
    last = {"input_ids": torch.tensor([[10, 11, *picture]]), "pixel_values": pixels}
    followed = {"input_ids": torch.tensor([[10, *picture, 12, 13]]), "pixel_values": pixels}
    nothing, something = answered(model, last, 3), answered(model, followed, 5)
    assert measure_gradients(model, [nothing]) is None
    assert measure_gradients(model, [nothing, something]) == measure_gradients(model, [something])


def test_a_model_without_an_encoder_has_no_gradient_of_one() -> None:
    config = CONFIG_MAPPING["fuyu"](
        text_config={**TEXT, "model_type": "persimmon"}, hidden_size=32, vocab_size=200, image_size=8, patch_size=4,
        num_channels=3, image_token_id=IMAGE, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config).eval()
    sample = {
        "input_ids": torch.tensor([[1, 20, IMAGE, IMAGE, 21, 22]]),
        "image_patches": torch.randn(1, 2, 48),
        "image_patches_indices": torch.tensor([[-1, -1, 0, 1, -1, -1]]),
    }
    measured = measure_gradients(model, [answered(model, sample, 4)])
    assert measured is not None
    norms = dataclasses.asdict(measured.norms["no norm"])
    assert {name for name, norm in norms.items() if norm is not None} == {
        "loss",
        "visual_embeddings",
        "text_embeddings",
    }
    assert norms["visual_embeddings"] > 0
