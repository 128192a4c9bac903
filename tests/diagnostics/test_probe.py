"""One forward pass through hooks: every family, against transformers' own outputs; and a model set by hand."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from hand_made import TEXT_NORMS, UPDATE, VISUAL_NORM, set_by_hand
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diagnostics.attention import measure_attention
from diagnostics.embeddings import vocabulary_norms
from diagnostics.gradients import measure_gradients
from diagnostics.interface import measure_interface
from diagnostics.key_space import measure_key_space
from diagnostics.layers import measure_layers
from diagnostics.parts import DiagnosticsError, NoVisualTokensError
from diagnostics.probe import Probe, Record
from families import FAMILIES, IMAGE, answered, build, inputs, record_sample, tokens_of


Inputs = dict[str, torch.Tensor]
# What the projector returns does not enter the decoder as it is: a newline feature, scaling, tiles put together.
CHANGED_AFTER_PROJECTOR = ("llava_next", "paligemma")
GRIDS = {
    "qwen2_5_vl": (2, 3), "qwen3_vl": (2, 3), "glm4v": (2, 3), "kimi_k25": (2, 3), "llava_next": None,
    "gemma3": (2, 2), "idefics3": (2, 2), "smolvlm": (2, 2), "internvl": (2, 2), "mistral3": (2, 2),
}  # fmt: skip


def states_of(model: PreTrainedModel, sample: Inputs) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return model(**sample, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_measured_and_its_logits_stay(name: str, padding: int, family_table: dict[str, str]) -> None:
    model, sample = build(name), inputs(name, padding)
    with torch.no_grad():
        logits = model(**sample).logits
        with Probe(model, sample, tokens_of(model, sample)) as probe:
            assert torch.equal(model(**sample).logits, logits)
        assert torch.equal(model(**sample).logits, logits)
    record = probe.record()

    ids = sample["input_ids"][0]
    newlines = int(record.tokens.excluded.get("newline", torch.zeros(1)).sum())
    assert newlines == (4 if name == "llava_next" else 0)
    assert record.tokens.visual.sum() == (ids == IMAGE).sum() - newlines
    assert record.tokens.text.sum() == 12
    assert record.tokens.excluded["padding"].sum() == padding
    assert record.tokens.excluded["special"].sum() == 1 + 2 * FAMILIES[name].boundaries
    assert record.grid == GRIDS.get(name, (4, 4))
    assert all(place in record.interface for place in ("encoder_output", "projector_input", "projector_output"))
    assert any("added after layer 0, 1" in note for note in record.notes) == (name == "qwen3_vl")
    if name not in CHANGED_AFTER_PROJECTOR:
        after, before = record.interface["projector_output"][0], record.layer_norms[0, record.tokens.visual]
        assert torch.allclose(after.sort().values, before.sort().values, rtol=1e-5)

    vocabulary = vocabulary_norms(model)
    interface = measure_interface([record], vocabulary, 32)
    layers, attention = measure_layers([record]), measure_attention([record])
    assert interface.text_at_decoder.mean == pytest.approx(interface.text_in_prompt.mean, rel=1e-5)
    assert attention is not None
    keys = measure_key_space([record] * 2, {})
    start = int((ids == IMAGE).nonzero()[-1, 0]) + 1
    gradients = measure_gradients(model, [answered(model, sample, start)])
    assert gradients is not None
    assert set(gradients) == ({"compensated", "plain"} if name == "normllava" else {"no norm"})
    assert all(value > 0 for norms in gradients.values() for value in dataclasses.astuple(norms))
    left_out = {reason: int(mask.sum()) for reason, mask in record.tokens.excluded.items() if mask.any()}
    family_table[name] = (
        f"{name:14}{interface.visual_at_decoder.mean:8.3f}{interface.text_at_decoder.mean:6.2f}"
        f"{interface.ratio.mean:9.3f}{layers.visual.update_rate.mean:9.4f}"
        f"{layers.text.update_rate.mean:9.4f}{attention.with_sinks.mass.mean[0]:7.2f}"
        f"{'few tokens' if keys is None else format(keys.mmd[0], '.3f'):>12}  {left_out} {'; '.join(record.notes)}"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_those_of_the_hidden_states(name: str) -> None:
    model, sample = build(name), inputs(name)
    record, states = record_sample(model, sample), states_of(model, sample)
    for number, state in enumerate(states[:-1]):  # the last one is past the final norm
        # What Qwen3-VL adds to visual tokens between layers is not in its hidden states.
        seen = record.tokens.text if name == "qwen3_vl" and number > 0 else torch.ones_like(record.tokens.text)
        assert torch.allclose(record.layer_norms[number, seen], state[0, seen].norm(dim=-1), rtol=1e-5)
        if number + 2 == len(states):
            break
        before, after = states[number][0, seen].double(), states[number + 1][0, seen].double()
        cosines = torch.cosine_similarity(before, after, dim=-1)
        assert torch.allclose(record.cosines[number, seen].double(), cosines, atol=1e-6)
        # Equation 8 from ‖u‖/‖h‖ and cos(u, h) gives the angle between before and after.
        assert torch.allclose(record.angles[number, seen].double().cos(), cosines, atol=1e-5)
        ratios = (after - before).norm(dim=-1) / before.norm(dim=-1)
        assert torch.allclose(record.update_ratios[number, seen].double(), ratios, rtol=1e-4)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_that_of_the_eager_model(name: str, padding: int) -> None:
    model, sample = build(name), inputs(name, padding)
    record = record_sample(model, sample)
    config = copy.deepcopy(model.config)
    eager = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attentions = eager(**sample, output_attentions=True).attentions
    for number, rows in record.attention.items():
        assert rows.shape[1] == len(record.queries) < 16
        assert torch.allclose(rows, attentions[number][0][:, record.queries], atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_are_those_before_rotation(name: str) -> None:
    """Rotation keeps norms, so the keys that attention gets have the same ones, and other directions."""
    model, sample = build(name), inputs(name)
    seen: list[torch.Tensor] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    decoder_modules = {id(module) for module in model.get_decoder().modules()}

    def attend(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        if id(module) in decoder_modules:
            seen.append(key[0])
        return sdpa(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        with torch.no_grad():
            model(**sample)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    record = record_sample(model, sample)
    for number, keys in record.keys.items():
        rotated = seen[number][..., : keys.shape[-1]]  # multi-head latent attention rotates other dimensions
        assert keys.shape == rotated.shape
        assert torch.allclose(keys.norm(dim=-1), rotated.norm(dim=-1), rtol=1e-4)
        assert torch.allclose(keys, rotated, atol=1e-6) == (name == "kimi_k25")


def test_a_model_set_by_hand_gives_the_numbers_on_paper(hand_made: tuple[PreTrainedModel, Inputs]) -> None:
    model, sample = hand_made
    record = record_sample(model, sample)
    text_norms = np.array([TEXT_NORMS[int(token) % 2] for token in sample["input_ids"][0][record.tokens.text]])
    assert 0 < (text_norms == TEXT_NORMS[0]).mean() < 0.5  # so that mean and median are two things
    visual_norms = np.full(16, VISUAL_NORM)
    interface = measure_interface([record, record], vocabulary_norms(model), 32)
    for place, norms in (
        ("projector_output", visual_norms),
        ("visual_at_decoder", visual_norms),
        ("text_at_decoder", text_norms),
        ("text_in_prompt", text_norms),
        ("vocabulary", np.repeat(TEXT_NORMS, 95)),  # ten rows are all zero
    ):
        entry = getattr(interface, place)
        assert entry.mean == pytest.approx(norms.mean())
        assert entry.median == pytest.approx(np.median(norms))
        assert entry.p95 == pytest.approx(np.quantile(np.tile(norms, 2), 0.95))
        assert entry.std == pytest.approx(norms.std(), abs=1e-5)
        assert entry.rms == pytest.approx(norms.mean() / 32**0.5)
        assert entry.width == 32
        assert entry.num_tokens == len(norms) * (1 if place == "vocabulary" else 2)
    assert interface.ratio.mean == pytest.approx(VISUAL_NORM / text_norms.mean())
    assert interface.ratio_to_vocabulary.mean == pytest.approx(VISUAL_NORM / np.mean(TEXT_NORMS))

    layers = measure_layers([record, record])
    for modality, starts in (("visual", visual_norms), ("text", text_norms)):
        norms = np.sqrt(starts**2 + np.arange(4)[:, None] * UPDATE**2)  # [num_layers + 1, num_tokens]
        cosines = norms[:-1] / norms[1:]
        measured = layers.of(modality)
        assert measured.norm.mean == pytest.approx(norms.mean(1))
        assert measured.cosine.mean == pytest.approx(cosines.mean(1), abs=1e-6)
        assert measured.update_ratio.mean == pytest.approx((UPDATE / norms[:-1]).mean(1))
        assert measured.update_cosine.mean == pytest.approx([0, 0, 0], abs=1e-6)
        assert measured.angle.mean == pytest.approx(np.degrees(np.arctan(UPDATE / norms[:-1])).mean(1), rel=1e-5)
        assert measured.update_rate.mean == pytest.approx(1 - cosines.mean(), abs=1e-6)
    gaps = [v - t for v, t in zip(layers.visual.cosine.mean, layers.text.cosine.mean, strict=True)]
    assert layers.gap.mean == pytest.approx(gaps)
    assert layers.mean_gap.mean == pytest.approx(sum(gaps) / 3)
    assert layers.mean_gap.interval == pytest.approx([sum(gaps) / 3] * 2)


@pytest.mark.parametrize("name", ["llava-clip", "llava_next", "qwen3_vl", "gemma3"])
def test_offloaded_weights_give_the_same(name: str) -> None:
    sample = inputs(name)
    expected = record_sample(build(name), sample)
    offloaded = record_sample(cpu_offload(build(name), execution_device="cpu"), sample)
    assert torch.equal(offloaded.cosines, expected.cosines)
    assert torch.equal(offloaded.tokens.visual, expected.tokens.visual)
    assert all(torch.equal(offloaded.keys[number], keys) for number, keys in expected.keys.items())


def test_one_sink_is_left_out_and_named(hand_made: tuple[PreTrainedModel, Inputs]) -> None:
    model, sample = hand_made
    expected = measure_layers([record_sample(model, sample)])
    position = 10  # a visual token
    record = record_sample(set_by_hand(build("llava-siglip"), massive=(position,)), sample)
    assert record.tokens.excluded["sink"].nonzero().flatten().tolist() == [position]
    assert record.tokens.visual.sum() == record.with_sinks.visual.sum() - 1
    measured = measure_layers([record])
    assert measured.visual.norm.mean == pytest.approx(expected.visual.norm.mean)
    assert measured.gap.mean == pytest.approx(expected.gap.mean, abs=1e-6)


def test_two_pictures_are_no_grid() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    picture = torch.full((16,), IMAGE)
    ids = torch.cat([torch.tensor([1, 20]), picture, torch.tensor([21]), picture, torch.tensor([22, 23])])[None]
    both = {"input_ids": ids, "pixel_values": sample["pixel_values"].repeat(2, 1, 1, 1)}
    assert record_sample(model, both, num_images=2).grid is None


def test_hooks_are_gone_after_a_failure() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    with pytest.raises(RuntimeError, match="stop"), Probe(model, sample, tokens_of(model, sample)):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_a_probe_inside_of_another_leaves_it_in_place() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    other = {**sample, "pixel_values": -sample["pixel_values"]}
    tokens = tokens_of(model, sample)
    with Probe(model, other, tokens) as outer, torch.no_grad():
        with Probe(model, sample, tokens) as inner:
            model(**sample)
        model(**other)
    assert torch.equal(inner.record().attention[0], record_sample(model, sample).attention[0])
    assert torch.equal(outer.record().attention[0], record_sample(model, other).attention[0])
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_pictures_that_reach_the_decoder_otherwise_are_refused() -> None:
    """Mllama's `input_ids` hold a placeholder, and its pictures enter by cross-attention."""
    text = {**SMALL, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": 1, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
              "intermediate_size": 16, "vision_output_dim": 32, "image_size": 28, "patch_size": 14,
              "intermediate_layers_indices": [1], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}  # fmt: skip
    config = CONFIG_MAPPING["mllama"](text_config=text, vision_config=vision, image_token_index=30)
    model = AutoModelForImageTextToText.from_config(config).eval()
    sample = {
        "input_ids": torch.tensor([[1, 30, 20, 21, 22]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
        "pixel_values": torch.randn(1, 1, 1, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 5, 1, 1, dtype=torch.long),
    }
    with pytest.raises(NoVisualTokensError, match="the embedding of a placeholder"):
        record_sample(model, sample)


def test_an_overflow_is_said() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    with torch.no_grad():
        model.get_decoder().layers[1].mlp.down_proj.weight.fill_(torch.inf)
    with pytest.raises(DiagnosticsError, match=r"overflow in torch.float32: load the model with --dtype"):
        record_sample(model, sample)


def test_a_record_needs_a_pass() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    tokens = tokens_of(model, sample)
    with pytest.raises(RuntimeError, match="0 of 3 decoder layers were run"), Probe(model, sample, tokens) as probe:
        probe.record()


def test_another_attention_is_said_and_not_measured() -> None:
    config = FAMILIES["llava-siglip"].config()
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    record: Record = record_sample(model, inputs("llava-siglip"))
    assert record.attention == {}
    assert measure_attention([record]) is None
    assert any("runs with eager" in note for note in record.notes)


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 32}
