"""Tests of the measures of attention and of the projector's norm module, against values known by construction."""

import dataclasses

import pytest
import torch

from families import build, inputs, record_sample
from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.diagnostics.measures import measure_attention, measure_projector_norm
from normllava.diagnostics.table import Summary


def test_norms_of_gain_and_bias_are_those_worked_out_by_hand(model: NormLlavaForConditionalGeneration) -> None:
    """The gain and the bias have 32 entries each. Half of the gain's entries rise, and the other half fall."""
    norm = model.model.multi_modal_projector.norm
    # The gain's entries start equal, and their L2 norm is the target.
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

    # Over many random tokens, the root mean square of their norms is √(gain_l2² + bias_l2²).
    tokens = norm(torch.randn(20_000, 32))
    squared_norms = tokens.square().sum(dim=-1)
    root_mean_square = squared_norms.mean().sqrt().item()
    expected = (values["gain_l2"] ** 2 + values["bias_l2"] ** 2) ** 0.5
    assert root_mean_square == pytest.approx(expected, rel=0.02)


def test_a_projector_without_a_norm_at_its_end_is_not_measured() -> None:
    assert measure_projector_norm(build("qwen3_vl")) is None


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", ["llava-siglip", "llava_next", "paligemma", "gemma3"])
@torch.no_grad()
def test_queries_of_zero_attend_to_all_visible_keys_evenly(name: str, padding: int) -> None:
    """In PaliGemma a query sees the keys of the whole prompt, in other families the keys up to its own position.

    The padding is on the left, and no query sees it.
    """
    model = build(name)
    sample = inputs(name, padding)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.zero_()
    record = record_sample(model, sample)

    if name == "paligemma":
        prompt_length = len(sample["input_ids"][0]) - padding
        num_visible = [prompt_length] * len(record.queries)
    else:
        query_positions = record.queries  # counted from 0, with the padding
        num_visible = (query_positions + 1 - padding).tolist()
    visible_in_layer_0 = record.visible[0]  # [num_queries, num_tokens]
    assert visible_in_layer_0.sum(dim=1).tolist() == num_visible

    rows = measure_attention([record])
    assert rows is not None
    shares = rows.set_index("measure")["value"]  # the index repeats each measure, once for each layer
    for suffix in ("", "_without_sinks"):
        measured = shares[f"attention{suffix}"].tolist()
        even = shares[f"attention_even{suffix}"].tolist()
        assert measured == pytest.approx(even, abs=1e-6)


def test_attention_is_measured_with_sinks_and_without() -> None:
    """All attention goes to three tokens: an image token that is a sink, another image token and a text token."""
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    tokens = record.tokens_with_sinks
    image_positions = tokens.image.nonzero()[:, 0]
    text_positions = tokens.text.nonzero()[:, 0]
    sink = image_positions[0]
    image_token = image_positions[1]
    text_token = text_positions[0]

    probabilities = torch.zeros(1, len(record.queries), len(tokens.image))  # [num_heads, num_queries, num_tokens]
    probabilities[..., sink] = 0.6
    probabilities[..., image_token] = 0.1
    probabilities[..., text_token] = 0.3
    is_sink = torch.zeros_like(tokens.image)
    is_sink[sink] = True
    tokens_without_sink = tokens.exclude("sink", is_sink)  # "sink" is the reason why the token is left out
    changed_record = dataclasses.replace(record, attention={0: probabilities}, tokens=tokens_without_sink)

    measured = measure_attention([changed_record])
    assert measured is not None
    summary = Summary.of(measured)
    assert summary.look("attention").mean == pytest.approx(0.6 + 0.1)
    assert summary.look("attention_without_sinks").mean == pytest.approx(0.1 / (0.1 + 0.3))
