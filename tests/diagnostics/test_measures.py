"""Each measure against a value known beforehand: by construction, by a formula, or by a slower way."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diagnostics.attention import attention_map, attention_numbers, bottom_rows, measure_attention
from diagnostics.attraction import attraction_towards, compare_updates, measure_attractions
from diagnostics.embeddings import measure_embeddings, vocabulary_norms
from diagnostics.gradients import measure_gradients
from diagnostics.key_space import (
    BANDWIDTHS,
    PERMUTATIONS,
    js_divergence,
    kernel,
    linear_probe,
    measure_key_space,
    mmd_test,
    unbiased_mmd,
)
from diagnostics.norms import text_norm_target
from diagnostics.probe import Record
from diagnostics.projector_norm import measure_projector_norm
from diagnostics.statistics import curve, ratio, summarize
from diagnostics.tokens import Tokens
from diagnostics.turning import turning_angle
from families import IMAGE, TEXT, answered, build, inputs, record_sample
from modeling_normllava import NormLlavaForConditionalGeneration


def test_means_are_within_samples_first() -> None:
    summary = summarize([torch.tensor([1.0]), torch.tensor([2.0, 4.0, 6.0])], width=4)
    assert summary.mean == 2.5  # of 1 and 4, not of four tokens
    assert summary.median == 3.0
    assert summary.std == pytest.approx(np.std([1, 2, 4, 6]))
    assert summary.p95 == pytest.approx(np.quantile([1, 2, 4, 6], 0.95))
    assert (summary.num_tokens, summary.num_samples) == (4, 2)
    assert (summary.width, summary.rms) == (4, 1.25)
    assert summarize([torch.tensor([1.0, 2.0])], width=4).interval is None


def test_intervals_are_as_wide_as_theory_says() -> None:
    values = np.random.default_rng(0).normal(3, 2, size=(400, 2))
    means = curve(values)
    for column, (mean, interval) in enumerate(zip(means.mean, means.interval, strict=True)):
        assert interval is not None
        half = 1.96 * values[:, column].std() / 20
        assert (interval[0] - mean, interval[1] - mean) == pytest.approx((-half, half), rel=0.1)
    # Numerator and denominator of a sample rise and fall together, so their ratio is certain.
    certain = ratio(3 * values[:, :1], values[:, :1])
    assert certain.mean == pytest.approx(3)
    assert certain.interval == pytest.approx((3, 3))


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
    assert attention_numbers(one, tokens, everything, bottom) == pytest.approx(
        {"mass": 1, "entropy": 0, "bottom_third": 1}
    )
    even = torch.full((2, 3, 8), 1 / 8)
    assert attention_numbers(even, tokens, everything, bottom) == pytest.approx(
        {"mass": 6 / 8, "entropy": 1, "bottom_third": 1 / 3}
    )
    # A key that is not counted takes nothing from the others.
    sunk = torch.tensor([0.05] * 6 + [0.6, 0.1]).reshape(1, 1, 8)
    without = torch.tensor([1] * 6 + [0, 1]).bool()
    assert attention_numbers(sunk, tokens, without, None)["mass"] == pytest.approx(0.3 / 0.4)
    assert bottom_rows((4, 1)).tolist() == [False, False, False, True]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", ["llava-siglip", "llava_next", "paligemma", "gemma3"])
@torch.no_grad()
def test_blind_queries_look_everywhere_alike(name: str, padding: int) -> None:
    """PaliGemma's prefix sees itself in both directions, and so do Gemma 3's pictures."""
    model, sample = build(name), inputs(name, padding)
    for layer in model.get_decoder().layers:
        layer.self_attn.q_proj.weight.zero_()
    record = record_sample(model, sample)
    measured = measure_attention([record])
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
    measured = measure_attention([sunk])
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


def test_mmd_is_the_double_sum_of_its_definition() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 3)), rng.normal(1, 2, size=(7, 3))
    points = np.concatenate([x, y])
    pairs = list(itertools.permutations(range(12), 2))
    scale = np.mean([np.sum((points[i] - points[j]) ** 2) for i, j in pairs])

    def k(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.mean([np.exp(-np.sum((a - b) ** 2) / (s * scale)) for s in BANDWIDTHS]))

    expected = np.mean([k(a, b) for a, b in itertools.permutations(x, 2)])
    expected += np.mean([k(a, b) for a, b in itertools.permutations(y, 2)])
    expected -= 2 * np.mean([k(a, b) for a, b in itertools.product(x, y)])
    labels = np.arange(12) < 5
    assert unbiased_mmd(kernel(x, y), labels[None])[0] == pytest.approx(expected)


def test_equal_and_different_distributions_are_told_apart() -> None:
    rng = np.random.default_rng(1)
    equal = [mmd_test(rng.normal(size=(60, 4)), rng.normal(size=(60, 4)), rng) for _ in range(40)]
    values, p_values = zip(*equal, strict=True)
    assert abs(np.mean(values)) < 3 * np.std(values) / 40**0.5  # unbiased
    assert min(values) < 0
    assert 0.3 < np.mean(p_values) < 0.7  # evenly spread between 0 and 1
    far, p_value = mmd_test(rng.normal(size=(60, 4)), rng.normal(2, 1, size=(60, 4)), rng)
    assert far > 10 * max(values)
    assert p_value == pytest.approx(1 / (1 + PERMUTATIONS))


def test_js_is_one_bit_apart_and_falls_with_n_where_there_is_no_difference() -> None:
    rng = np.random.default_rng(2)
    weights = np.array([0.7, 0.3])
    x = rng.uniform(0, 1, size=(50, 2))
    assert js_divergence(x, x + 10, weights) == pytest.approx(1)
    assert js_divergence(x, x, weights) == 0
    half = js_divergence(np.array([[0.0], [1.0]]), np.array([[1.0], [1.0]]), np.ones(1))
    assert half == pytest.approx(0.311278, abs=1e-6)  # of (½, ½) and (0, 1), on paper
    few, many = (
        np.mean([js_divergence(rng.normal(size=(n, 2)), rng.normal(size=(n, 2)), weights) for _ in range(20)])
        for n in (100, 3000)
    )
    assert 0.03 < few < 0.2
    assert many < few / 10


def test_the_probe_keeps_a_picture_in_one_part() -> None:
    rng = np.random.default_rng(3)
    is_visual = np.arange(200) // 10 % 2 == 0
    samples = np.arange(200) % 10
    assert linear_probe(rng.normal(size=(200, 3)) + 5 * is_visual[:, None], is_visual, samples) == 1
    # Each modality of each picture has a place of its own, which says nothing about another picture's tokens.
    assert 0.3 < linear_probe(np.eye(20)[2 * samples + is_visual], is_visual, samples) < 0.7
    assert np.isnan(linear_probe(rng.normal(size=(8, 3)), np.arange(8) % 2 == 0, np.zeros(8)))


def fabricate(record: Record, visual: torch.Tensor, text: torch.Tensor) -> Record:
    """The record with one layer of one head, whose keys are given."""
    keys = torch.zeros(1, len(record.tokens.visual), visual.shape[-1])
    keys[:, record.with_sinks.visual], keys[:, record.with_sinks.text] = visual, text
    return dataclasses.replace(record, keys={0: keys}, key_positions=torch.arange(keys.shape[1]))


def test_keys_apart_and_alike_and_behind_an_outlier() -> None:
    generator = torch.Generator().manual_seed(0)
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))

    def draw(count: int) -> torch.Tensor:
        return torch.randn(count, 8, generator=generator)

    alike = measure_key_space([fabricate(record, draw(16), draw(12)) for _ in range(8)], {})
    apart_records = [fabricate(record, draw(16) + 3, draw(12)) for _ in range(8)]
    apart = measure_key_space(apart_records, {})
    assert alike is not None
    assert apart is not None
    assert alike.num_tokens == [96]  # all text tokens, and as many visual ones
    assert abs(alike.mmd[0]) < 0.02 < 0.2 < apart.mmd[0]
    assert alike.p_value[0] > 0.05 > apart.p_value[0]
    assert apart.js[0] > 3 * alike.js[0]
    assert abs(alike.js[0] - alike.js_baseline[0]) < 0.1
    assert apart.probe[0] == 1
    assert 0.3 < alike.probe[0] < 0.7

    # One token far out stretches every scale, and the gap is gone; as a sink it is left out.
    for outlier in apart_records:
        outlier.keys[0][0, int(record.tokens.visual.nonzero()[0, 0])] = 1e4
    hidden = measure_key_space(apart_records, {})
    marked = torch.zeros_like(record.tokens.visual)
    marked[record.tokens.visual.nonzero()[0, 0]] = True
    seen = [dataclasses.replace(r, tokens=r.tokens.without("sink", marked)) for r in apart_records]
    found = measure_key_space(seen, {})
    assert hidden is not None
    assert found is not None
    assert hidden.mmd[0] < 0.1 * apart.mmd[0]
    assert found.mmd[0] == pytest.approx(apart.mmd[0], rel=0.2)


def test_numbers_of_keys_are_medians_over_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    records = []
    for _ in range(8):
        keys = torch.randn(3, len(record.tokens.visual), 8, generator=generator)
        keys[2, record.tokens.visual] += 4  # one head of three tells the modalities apart
        records.append(dataclasses.replace(record, keys={0: keys}, key_positions=torch.arange(keys.shape[1])))
    measured = measure_key_space(records, {})
    assert measured is not None
    heads = measured.per_head[0]
    assert heads[2].mmd > 0.2
    for name in ("mmd", "p_value", "js"):
        assert getattr(measured, name)[0] == sorted(getattr(head, name) for head in heads)[1]
    assert measured.mmd[0] < 0.02


def test_the_first_models_components_are_used_again() -> None:
    record = record_sample(build("llava-siglip"), inputs("llava-siglip"))
    bases: dict = {}
    measure_key_space([record] * 2, bases)
    kept = {place: basis.components.copy() for place, basis in bases.items()}
    assert set(kept) == {(layer, head) for layer in range(3) for head in range(2)}
    measure_key_space([record_sample(build("llava-clip"), inputs("llava-clip"))] * 2, bases)
    assert all(np.array_equal(bases[place].components, kept[place]) for place in kept)


def test_gradients_are_those_of_backward_and_compensation_divides_by_the_mean_gain(
    model: NormLlavaForConditionalGeneration,
) -> None:
    ids = torch.tensor([[10, 11, *[model.config.image_token_id] * 4, 12, 13, 14, 15]])
    sample = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)}
    measured = measure_gradients(model, [answered(model, sample, 7)])
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
    twice = measure_gradients(model, [answered(model, sample, 7)] * 2)["compensated"]
    assert twice.vision_encoder == pytest.approx(measured["compensated"].vision_encoder, rel=1e-4)
    for name in ("projector_input", "visual_embeddings", "text_embeddings"):
        assert getattr(twice, name) == pytest.approx(getattr(measured["compensated"], name) / 2**0.5, rel=1e-4)

    compensated, plain = measured["compensated"], measured["plain"]
    factor = 1 / model.model.multi_modal_projector.norm.weight.abs().mean().item()
    for name in ("projector_input", "vision_encoder"):
        assert getattr(compensated, name) / getattr(plain, name) == pytest.approx(factor, rel=1e-4)
    for name in ("loss", "visual_embeddings", "text_embeddings"):
        assert getattr(compensated, name) == pytest.approx(getattr(plain, name), rel=1e-5)


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
    norms = dataclasses.asdict(measured["no norm"])
    assert {name for name, norm in norms.items() if norm is not None} == {
        "loss",
        "visual_embeddings",
        "text_embeddings",
    }
    assert norms["visual_embeddings"] > 0


def test_attraction_and_correlation_of_updates_set_by_hand(
    hand_made: tuple[PreTrainedModel, dict[str, torch.Tensor]],
) -> None:
    model, sample = hand_made
    record = record_sample(model, sample)
    measured = measure_attractions([record.attractions])
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
    turned = measure_attractions([record_sample(model, sample).attractions])
    assert turned.attraction_visual_to_text.mean == pytest.approx([1])

    class Flee(nn.Module):
        """Turns every text token, and an outlier by far more, straight away from axis 0, where the pictures are."""

        attention_type = "full_attention"

        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            turned = hidden_states.clone()
            turned[:, record.tokens.text, 0] -= 1
            return turned

    model.get_decoder().layers = nn.ModuleList([Flee()])
    turned = measure_attractions([record_sample(model, sample).attractions])
    assert turned.attraction_text_to_visual.mean == pytest.approx([-1])
    assert turned.attraction_visual_to_text.mean == pytest.approx([0])


def test_turning_angle_is_the_angle_between_before_and_after() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2000, 16, dtype=torch.float64)
    update = torch.randn_like(hidden) * torch.logspace(-2, 2, 2000, dtype=torch.float64)[:, None]
    cosine = torch.nn.functional.cosine_similarity
    angle = turning_angle(hidden.norm(dim=-1), update.norm(dim=-1), cosine(hidden, update).clamp(-1, 1).acos())
    expected = cosine(hidden, hidden + update).clamp(-1, 1).acos()
    assert (expected > math.pi / 2).any()  # which a plain arctangent gets wrong
    torch.testing.assert_close(angle, expected, rtol=1e-6, atol=1e-6)


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
