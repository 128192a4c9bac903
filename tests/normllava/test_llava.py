"""A Llava gets the norm in memory, and a small gain is kept when the model is saved and loaded."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from families import build, inputs
from modeling_normllava import NormLlavaForConditionalGeneration
from normllava import add_norm
from normllava.errors import UserError
from normllava.norms import text_norm_target, vocabulary_norms


def test_a_llava_becomes_a_normllava_that_starts_at_the_texts_norm() -> None:
    llava = build("llava-siglip")
    model = add_norm(llava, target_ratio=2.0)
    assert isinstance(model, NormLlavaForConditionalGeneration)
    assert model.model.vision_tower is llava.model.vision_tower  # the Llava's weights, not copies

    assert model.name_or_path == ""  # or adapters and reference models would be made from the Llava
    llava.train()
    llava.model.vision_tower.eval()
    assert add_norm(llava).training
    assert not llava.model.vision_tower.training  # the Llava's modules keep their modes

    target = 2 * text_norm_target(vocabulary_norms(llava))
    gain = model.model.multi_modal_projector.norm.weight
    torch.testing.assert_close(gain, torch.full_like(gain, target / len(gain) ** 0.5))


def test_without_a_norm_the_logits_are_those_of_the_llava() -> None:
    llava = build("llava-clip")
    sample = inputs("llava-clip")
    with torch.no_grad():
        expected = llava(**sample).logits
        logits = add_norm(llava, projector_norm="none")(**sample).logits
    assert torch.equal(logits, expected)


def test_weights_of_any_origin_are_kept() -> None:
    """transformers initializes modules anew when a model is built of them, unless `from_pretrained` marked them."""
    trained = build("llava-siglip")
    with no_init_weights():
        llava = type(trained)(trained.config)
    llava.load_state_dict(trained.state_dict())
    with_norm = add_norm(llava)
    for name, weight in trained.state_dict().items():
        assert torch.equal(with_norm.state_dict()[name], weight), name


def test_loading_never_resets_a_small_gain(tmp_path: Path) -> None:
    model = add_norm(build("llava-siglip"))
    norm = model.model.multi_modal_projector.norm
    with torch.no_grad():
        norm.weight.fill_(0.0134)  # the smallest gain of the paper (Table 1)
        norm.bias.fill_(0.002)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype)
        assert torch.equal(loaded.model.multi_modal_projector.norm.weight, norm.weight)
        assert torch.equal(loaded.model.multi_modal_projector.norm.bias, norm.bias)


@pytest.mark.parametrize("name", ["idefics3", "llava_next", "normllava"])
def test_other_families_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"its own class would drop the norm's weights.* scale_projector scales any"):
        add_norm(build(name))
