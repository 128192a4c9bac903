"""Each measure against a value known beforehand: by construction, by a formula, or by a slower way."""

import dataclasses

import pytest
import torch

from diagnostics.measures import measure_attention, measure_projector_norm
from diagnostics.table import Summary
from families import build, inputs, record_sample
from modeling_normllava import NormLlavaForConditionalGeneration


def test_gain_and_bias_by_hand(model: NormLlavaForConditionalGeneration) -> None:
    norm = model.model.multi_modal_projector.norm
    start = model.config.projector_norm_target / 32**0.5
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([start + 0.3] * 16 + [start - 0.4] * 16))
        norm.bias.fill_(0.25)
    measured = measure_projector_norm(model)
    assert measured is not None
    numbers = dict(zip(measured["measure"], measured["value"], strict=True))
    assert numbers["gain_drift"] == pytest.approx(2.0)  # √(16 · 0.09 + 16 · 0.16)
    assert numbers["bias_l2"] == pytest.approx(2**0.5)
    # White input of many tokens comes out at the norm that gain and bias yield.
    tokens = norm(torch.randn(20_000, 32))
    yields = (numbers["gain_l2"] ** 2 + numbers["bias_l2"] ** 2) ** 0.5
    assert yields == pytest.approx(tokens.square().sum(-1).mean().sqrt().item(), rel=0.02)
    assert measure_projector_norm(build("qwen3_vl")) is None


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", ["llava-siglip", "llava_next", "paligemma", "gemma3"])
@torch.no_grad()
def test_blind_queries_look_everywhere_alike(name: str, padding: int) -> None:
    """PaliGemma's prefix sees itself in both directions, and so do Gemma 3's pictures."""
    model, sample = build(name), inputs(name, padding)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.zero_()
    record = record_sample(model, sample)
    length = len(sample["input_ids"][0]) - padding
    seen = [length] * len(record.queries) if name == "paligemma" else (record.queries + 1 - padding).tolist()
    assert record.visible[0].sum(1).tolist() == seen
    rows = measure_attention([record])
    assert rows is not None
    found = rows.set_index("measure")["value"]
    for kind in ("", "_without_sinks"):
        even = found[f"attention_even{kind}"].tolist()
        assert found[f"attention{kind}"].tolist() == pytest.approx(even, abs=1e-6)


def test_a_sink_is_counted_or_not() -> None:
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    visual = record.with_sinks.visual.nonzero()[:, 0]
    text = record.with_sinks.text.nonzero()[:, 0]
    rows = torch.zeros(1, len(record.queries), len(record.with_sinks.visual))
    rows[..., visual[0]], rows[..., visual[1]], rows[..., text[0]] = 0.6, 0.1, 0.3
    sink = torch.zeros_like(record.with_sinks.visual)
    sink[visual[0]] = True
    sunk = dataclasses.replace(record, attention={0: rows}, tokens=record.with_sinks.without("sink", sink))
    measured = measure_attention([sunk])
    assert measured is not None
    summary = Summary.of(measured)
    assert summary.look("attention").mean == pytest.approx(0.7)
    assert summary.look("attention_without_sinks").mean == pytest.approx(0.1 / 0.4)
