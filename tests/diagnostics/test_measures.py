"""Measures of attention and of the projector's norm, against values that are known by construction."""

import dataclasses

import pytest
import torch

from diagnostics.measures import measure_attention, measure_projector_norm
from diagnostics.table import Summary
from families import build, inputs, record_sample
from modeling_normllava import NormLlavaForConditionalGeneration


def test_gain_and_bias_by_hand(model: NormLlavaForConditionalGeneration) -> None:
    norm = model.model.multi_modal_projector.norm
    gain_at_start = model.config.projector_norm_target / 32**0.5
    with torch.no_grad():
        norm.weight[:16] = gain_at_start + 0.3
        norm.weight[16:] = gain_at_start - 0.4
        norm.bias.fill_(0.25)

    measured = measure_projector_norm(model)
    assert measured is not None
    values = dict(zip(measured["measure"], measured["value"], strict=True))
    assert values["gain_drift"] == pytest.approx(2.0)  # √(16 · 0.3² + 16 · 0.4²)
    assert values["bias_l2"] == pytest.approx(2**0.5)  # √(32 · 0.25²)

    # The root mean square of the norms of many random tokens is √(gain_l2² + bias_l2²).
    tokens = norm(torch.randn(20_000, 32))
    root_mean_square = tokens.square().sum(dim=-1).mean().sqrt().item()
    expected = (values["gain_l2"] ** 2 + values["bias_l2"] ** 2) ** 0.5
    assert root_mean_square == pytest.approx(expected, rel=0.02)


def test_a_projector_without_a_norm_at_its_end_is_not_measured() -> None:
    assert measure_projector_norm(build("qwen3_vl")) is None


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", ["llava-siglip", "llava_next", "paligemma", "gemma3"])
@torch.no_grad()
def test_queries_of_zero_attend_to_all_visible_keys_evenly(name: str, padding: int) -> None:
    """PaliGemma's tokens see the whole prompt. In the other families a query sees the keys up to its own."""
    model = build(name)
    sample = inputs(name, padding)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.zero_()
    record = record_sample(model, sample)

    if name == "paligemma":
        length = len(sample["input_ids"][0]) - padding
        num_visible = [length] * len(record.queries)
    else:
        num_visible = (record.queries + 1 - padding).tolist()
    assert record.visible[0].sum(dim=1).tolist() == num_visible

    rows = measure_attention([record])
    assert rows is not None
    shares = rows.set_index("measure")["value"]
    for suffix in ("", "_without_sinks"):
        even = shares[f"attention_even{suffix}"].tolist()
        assert shares[f"attention{suffix}"].tolist() == pytest.approx(even, abs=1e-6)


def test_attention_is_measured_with_sinks_and_without() -> None:
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    types = record.tokens_with_sinks
    sink, image_token = types.visual.nonzero()[:2, 0]
    text_token = types.text.nonzero()[0, 0]

    probabilities = torch.zeros(1, len(record.queries), len(types.visual))
    probabilities[..., sink] = 0.6
    probabilities[..., image_token] = 0.1
    probabilities[..., text_token] = 0.3
    is_sink = torch.zeros_like(types.visual)
    is_sink[sink] = True
    record = dataclasses.replace(record, attention={0: probabilities}, tokens=types.exclude("sink", is_sink))

    measured = measure_attention([record])
    assert measured is not None
    summary = Summary.of(measured)
    assert summary.look("attention").mean == pytest.approx(0.6 + 0.1)
    assert summary.look("attention_without_sinks").mean == pytest.approx(0.1 / (0.1 + 0.3))
