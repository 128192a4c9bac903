"""Each measure against a value known beforehand: by construction, by a formula, or by a slower way."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.attention import attention_map, attention_numbers, bottom_rows, measure_attention
from diagnostics.attraction import attraction_towards, compare_updates, measure_attractions
from diagnostics.embeddings import measure_embeddings, vocabulary_norms
from diagnostics.norms import text_norm_target
from diagnostics.projector_norm import measure_projector_norm
from diagnostics.tokens import Tokens
from families import build, inputs, record_sample
from modeling_normllava import NormLlavaForConditionalGeneration


ONE = np.zeros(1, dtype=int)  # one sample of one picture


def test_a_target_needs_embeddings() -> None:
    with pytest.raises(ValueError, match="All text embeddings are zero"):
        text_norm_target(torch.zeros(4))


class OneLetterTokenizer:
    def __len__(self) -> int:
        return 5

    def decode(self, ids: list[int]) -> str:
        return "ab|<\n"[ids[0]]


def test_embeddings_leave_zero_rows_out_and_name_the_longest() -> None:
    model = build("llava-siglip")
    table = model.get_input_embeddings()
    table.weight = nn.Parameter(torch.zeros(7, 32))
    table.num_embeddings = 7
    with torch.no_grad():
        for row, norm in ((0, 1.0), (1, 3.0), (4, 5.0), (6, 9.0)):
            table.weight[row, row] = norm
    measured = measure_embeddings(vocabulary_norms(model), OneLetterTokenizer(), top_k=3)  # type: ignore[arg-type]
    assert measured.mean == 4.5
    assert measured.std == pytest.approx(np.std([1, 3, 5, 9]))
    assert measured.max == 9
    assert (measured.num_embeddings, measured.num_zero) == (7, 3)
    assert [entry.token for entry in measured.top] == ["id 6, not in the tokenizer", r"'\n'", "'b'"]
    assert [entry.norm for entry in measured.top] == [9, 5, 3]


def test_embeddings_are_measured_as_they_are_returned() -> None:
    model = build("gemma3")  # multiplies its table by the root of its width
    norms = vocabulary_norms(model)
    assert torch.allclose(norms, model.get_input_embeddings().weight.norm(dim=-1) * 32**0.5, rtol=1e-3)


def test_gain_and_bias_by_hand(model: NormLlavaForConditionalGeneration) -> None:
    norm = model.model.multi_modal_projector.norm
    start = model.config.projector_norm_target / 32**0.5
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([start + 0.3] * 16 + [start - 0.4] * 16))
        norm.bias.fill_(0.25)
    measured = measure_projector_norm(model)
    assert measured is not None
    assert measured.gain_start == pytest.approx(start)
    assert measured.gain_drift == pytest.approx(2.0)  # √(16 · 0.09 + 16 · 0.16)
    assert measured.gain_drift_relative == pytest.approx(2.0 / model.config.projector_norm_target, rel=1e-6)
    assert measured.bias_l2 == pytest.approx(2**0.5)
    assert measured.bias_mean_abs == 0.25
    assert measured.gain_mean_abs == pytest.approx((abs(start + 0.3) + abs(start - 0.4)) / 2)
    # White input of many tokens comes out at the norm that gain and bias yield.
    tokens = norm(torch.randn(20_000, 32))
    assert measured.yields == pytest.approx(tokens.square().sum(-1).mean().sqrt().item(), rel=0.02)
    assert measure_projector_norm(build("qwen3_vl")) is None


def tokens_of(visual: list[int], text: list[int]) -> Tokens:
    nothing = torch.zeros(len(visual), dtype=torch.bool)
    return Tokens(torch.tensor(visual).bool(), torch.tensor(text).bool(), {"padding": nothing, "special": nothing})


def test_attention_by_hand() -> None:
    tokens = tokens_of([1] * 6 + [0, 0], [0] * 6 + [1, 1])
    everything = torch.ones(8, dtype=torch.bool)
    bottom = torch.zeros(8, dtype=torch.bool)
    bottom[:6] = bottom_rows((3, 2))
    assert bottom.nonzero().flatten().tolist() == [4, 5]
    one = torch.zeros(1, 1, 8)
    one[..., 4] = 1
    seen = everything[None]
    assert attention_numbers(one, seen, tokens, everything, bottom) == pytest.approx(
        {"mass": 1, "entropy": 0, "bottom_third": 1}
    )
    even = torch.full((2, 3, 8), 1 / 8)
    assert attention_numbers(even, seen.expand(3, 8), tokens, everything, bottom) == pytest.approx(
        {"mass": 6 / 8, "entropy": 1, "bottom_third": 1 / 3}
    )
    # A key that is not counted takes nothing from the others.
    sunk = torch.tensor([0.05] * 6 + [0.6, 0.1]).reshape(1, 1, 8)
    without = torch.tensor([1] * 6 + [0, 1]).bool()
    assert attention_numbers(sunk, seen, tokens, without, None)["mass"] == pytest.approx(0.3 / 0.4)
    assert bottom_rows((4, 1)).tolist() == [False, False, False, True]


def test_a_window_without_the_picture_has_no_entropy() -> None:
    """It counted as 0, all on one token."""
    tokens = tokens_of([1] * 4 + [0] * 4, [0] * 4 + [1] * 4)
    everything = torch.ones(8, dtype=torch.bool)
    visible = torch.tensor([[1] * 8, [0] * 4 + [1] * 4]).bool()  # of two queries one sees the picture
    rows = visible[None] / visible.sum(-1)[:, None]
    bottom = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0]).bool()
    half = attention_numbers(rows, visible, tokens, everything, bottom)
    assert half == pytest.approx({"mass": 0.25, "entropy": 1, "bottom_third": 0.5})
    blind = attention_numbers(rows[:, 1:], visible[1:], tokens, everything, bottom)
    assert blind == pytest.approx({"mass": 0, "entropy": math.nan, "bottom_third": math.nan}, nan_ok=True)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", ["llava-siglip", "llava_next", "paligemma", "gemma3"])
@torch.no_grad()
def test_blind_queries_look_everywhere_alike(name: str, padding: int) -> None:
    """PaliGemma's prefix sees itself in both directions, and so do Gemma 3's pictures."""
    model, sample = build(name), inputs(name, padding)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.zero_()
    record = record_sample(model, sample)
    measured = measure_attention([record], ONE)
    assert measured is not None
    length = len(sample["input_ids"][0]) - padding
    if name == "paligemma":
        assert record.visible[0].sum(1).tolist() == [length] * len(record.queries)
    else:
        assert record.visible[0].sum(1).tolist() == (record.queries + 1 - padding).tolist()
    for kind in ("with_sinks", "without_sinks"):
        gaze = getattr(measured, kind)
        even = gaze.evenly_spread
        for of in ("mass", "entropy", *(("bottom_third",) if record.grid is not None else ())):
            assert getattr(gaze, of).mean == pytest.approx(getattr(even, of).mean, abs=1e-6)
        assert even.entropy.mean == pytest.approx([1] * 3, abs=1e-6)
    assert measured.without_sinks.evenly_spread.mass != measured.with_sinks.evenly_spread.mass
    if record.grid is not None:
        rows = bottom_rows(record.grid).double().mean().item()
        assert measured.with_sinks.evenly_spread.bottom_third.mean == pytest.approx([rows] * 3)
    else:
        assert measured.with_sinks.bottom_third is None


def test_a_sink_is_counted_or_not(hand_made: tuple[PreTrainedModel, dict[str, torch.Tensor]]) -> None:
    record = record_sample(build("llava-siglip"), hand_made[1])
    visual = record.with_sinks.visual.nonzero()[:, 0]
    text = record.with_sinks.text.nonzero()[:, 0]
    rows = torch.zeros(1, len(record.queries), len(record.with_sinks.visual))
    rows[..., visual[0]], rows[..., visual[1]], rows[..., text[0]] = 0.6, 0.1, 0.3
    sink = torch.zeros_like(record.with_sinks.visual)
    sink[visual[0]] = True
    sunk = dataclasses.replace(record, attention={0: rows}, tokens=record.with_sinks.without("sink", sink))
    measured = measure_attention([sunk], ONE)
    assert measured is not None
    assert measured.with_sinks.mass.mean == pytest.approx([0.7])
    assert measured.without_sinks.mass.mean == pytest.approx([0.1 / 0.4])
    assert measured.with_sinks.bottom_third.mean == pytest.approx([0])


def test_a_map_lies_as_the_picture_does() -> None:
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    rows = torch.zeros(2, len(record.queries), len(record.with_sinks.visual))
    rows[1, -1, record.with_sinks.visual] = torch.arange(16.0)
    shown = dataclasses.replace(record, attention={5: rows})
    assert torch.equal(attention_map(shown, 5), torch.arange(16.0).reshape(4, 4) / 2)
    assert torch.equal(attention_map(shown, 5, heads=[1]), torch.arange(16.0).reshape(4, 4))
    assert not attention_map(shown, 5, heads=[0]).any()
    assert not attention_map(shown, 5, query=-2).any()
    assert attention_map(dataclasses.replace(shown, grid=None), 5) is None


def test_attraction_and_correlation_of_updates_set_by_hand(
    hand_made: tuple[PreTrainedModel, dict[str, torch.Tensor]],
) -> None:
    model, sample = hand_made
    record = record_sample(model, sample)
    measured = measure_attractions([record.attractions], ONE)
    # Every token gets the same update, so they correlate fully. The first is across all tokens, which are parallel.
    assert measured.update_correlation.mean == pytest.approx([1, 1, 1])
    assert measured.attraction_visual_to_text.mean[0] == pytest.approx(0, abs=1e-6)

    class Attract(nn.Module):
        """Turns every visual token straight towards axis 5, where the text tokens are."""

        attention_type = "full_attention"

        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            turned = hidden_states.clone()
            turned[:, record.tokens.visual, 5] += 1
            return turned

    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()[10:, 5] = 2
    model.get_decoder().layers = nn.ModuleList([Attract()])
    turned = measure_attractions([record_sample(model, sample).attractions], ONE)
    assert turned.attraction_visual_to_text.mean == pytest.approx([1])

    class Flee(nn.Module):
        """Turns every text token, and an outlier by far more, straight away from axis 0, where the pictures are."""

        attention_type = "full_attention"

        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            turned = hidden_states.clone()
            turned[:, record.tokens.text, 0] -= 1
            return turned

    model.get_decoder().layers = nn.ModuleList([Flee()])
    turned = measure_attractions([record_sample(model, sample).attractions], ONE)
    assert turned.attraction_text_to_visual.mean == pytest.approx([-1])
    assert turned.attraction_visual_to_text.mean == pytest.approx([0])


def test_attraction_is_read_off_an_update_that_was_made_with_it() -> None:
    torch.manual_seed(0)
    token, other = torch.randn(2, 64, dtype=torch.float64)
    unit = token / token.norm()
    towards = other - (other @ unit) * unit
    towards /= towards.norm()
    across = torch.randn(64, dtype=torch.float64)
    across -= (across @ unit) * unit + (across @ towards) * towards
    update = 0.6 * towards + 0.8 * across / across.norm() + 3 * unit  # what goes along the token does not count
    measured = attraction_towards(token[None], (token + update)[None], other[None])
    assert measured.item() == pytest.approx(0.6, abs=1e-5)


def test_updates_of_outliers_are_not_compared() -> None:
    before = torch.zeros(8, 4)
    before[:4, 0], before[4:, 1] = 1, 1
    after = before.clone()
    after[:, 2] += 1
    visual = torch.tensor([1] * 4 + [0] * 4).bool()
    expected = compare_updates(before, after, visual, ~visual)
    assert expected[0] == pytest.approx(1)
    before[0, 0], after[0] = 1e4, torch.tensor([1e4, 0, -9, 0])
    assert torch.equal(compare_updates(before, after, visual, ~visual), expected)


def test_newline_features_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def watch(before: torch.Tensor, after: torch.Tensor, visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        compared.append(int(visual.sum()))
        return compare_updates(before, after, visual, text)

    monkeypatch.setattr("diagnostics.probe.compare_updates", watch)
    record = record_sample(build("llava_next"), inputs("llava_next"))
    assert compared == [48] * 3 == [int(record.tokens.visual.sum())] * 3
