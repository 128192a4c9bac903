"""Norms and cosines by layer, against the hidden states that transformers itself returns."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from diagnostics.norms import text_norm_target
from diagnostics.update_rate import measure_dynamics
from modeling_normllava import NormLlavaForConditionalGeneration


def test_dynamics_are_those_of_the_hidden_states(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    texts = ["<|image_pad|> and a good many words", "<|image_pad|>?"]
    inputs = processor(images=[[picture], [picture]], text=texts, padding=True, return_tensors="pt")
    measured = measure_dynamics(model, inputs)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states  # the last one is past the final norm
    is_image = inputs["input_ids"] == model.config.image_token_id
    masks = {"visual": is_image, "text": ~is_image & inputs["attention_mask"].bool()}
    for name, mask in masks.items():
        dynamics = measured[name]
        assert dynamics.num_tokens == mask.sum()
        assert len(dynamics.norms) == len(states) == len(dynamics.cosines) + 1
        expected = [state[mask].norm(dim=-1).mean().item() for state in states[:-1]]
        assert dynamics.norms[:-1] == pytest.approx(expected, rel=1e-5)
        turned = torch.cosine_similarity(states[0][mask], states[1][mask], dim=-1).mean().item()
        assert dynamics.cosines[0] == pytest.approx(turned, rel=1e-4)
        assert dynamics.update_rate == pytest.approx(1 - sum(dynamics.cosines) / len(dynamics.cosines))


def test_a_batch_without_pictures_is_refused(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path]
) -> None:
    inputs = AutoProcessor.from_pretrained(composed())(text=["words"], return_tensors="pt")
    with pytest.raises(ValueError, match="holds no visual tokens"):
        measure_dynamics(model, inputs)


def test_a_target_needs_embeddings() -> None:
    with pytest.raises(ValueError, match="All text embeddings are zero"):
        text_norm_target(torch.zeros(4))
