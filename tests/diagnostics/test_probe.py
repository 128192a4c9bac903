"""One forward pass through hooks: every family, against transformers' own outputs; and a model set by hand."""

import copy
import re
import sys
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from hand_made import TEXT_NORMS, UPDATE, VISUAL_NORM, set_by_hand
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diagnostics.hooks import InterfaceHooks
from diagnostics.measures import input_scale, measure_attention, measure_interface, measure_layers
from diagnostics.norms import vocabulary_norms
from diagnostics.parts import DiagnosticsError, NoVisualTokensError, find_decoder
from diagnostics.probe import Probe, Record
from diagnostics.table import Summary
from families import FAMILIES, IMAGE, build, inputs, record_sample, tokens_of


Inputs = dict[str, torch.Tensor]
# What the projector returns does not enter the decoder as it is: a newline feature, scaling, tiles put together.
CHANGED_AFTER_PROJECTOR = ("llava_next", "llava_onevision", "paligemma")
# Layers that are no attention.
WITHOUT_KEYS = {"lfm2_vl": {1}, "qwen3_5": {1}}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_measured_and_its_logits_stay(name: str) -> None:
    model, sample = build(name), inputs(name, padding=3)
    with torch.no_grad():
        logits = model(**sample).logits
        with Probe(model, sample, tokens_of(model, sample)) as probe:
            assert torch.equal(model(**sample).logits, logits)
        assert torch.equal(model(**sample).logits, logits)
    record = probe.record()

    ids = sample["input_ids"][0]
    newlines = int(record.tokens.excluded.get("newline", torch.zeros(1)).sum())
    assert newlines == (4 if name in ("llava_next", "llava_onevision") else 0)
    assert record.tokens.visual.sum() == (ids == IMAGE).sum() - newlines
    assert record.tokens.text.sum() == 12
    assert record.tokens.excluded["padding"].sum() == 3
    assert record.tokens.excluded["special"].sum() == 1 + 2 * FAMILIES[name].boundaries
    assert {"projector_input", "projector_output", "encoder_output"} <= set(record.interface)
    if name not in CHANGED_AFTER_PROJECTOR:
        after, before = record.interface["projector_output"], record.layer_norms[0, record.tokens.visual]
        assert torch.allclose(after.sort().values, before.sort().values, rtol=1e-5)
    summary = Summary.of(measure_interface([record], vocabulary_norms(model)))
    entering, prompt = (summary.look(place, "text").mean for place in ("at_decoder", "in_prompt"))
    assert entering == pytest.approx(prompt, rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_those_of_the_hidden_states(name: str) -> None:
    model, sample = build(name), inputs(name)
    record = record_sample(model, sample)
    with torch.no_grad():
        states = model(**sample, output_hidden_states=True).hidden_states
    # What Qwen3-VL adds to visual tokens between layers is not in the hidden states.
    seen = record.tokens.text if name == "qwen3_vl" else torch.ones_like(record.tokens.text)
    norms = torch.stack([state[0, seen].norm(dim=-1) for state in states[:-1]])  # the last is past the final norm
    assert torch.allclose(record.layer_norms[:-1, seen], norms, rtol=1e-5)
    for number in range(len(states) - 2):
        before, after = states[number][0, seen].double(), states[number + 1][0, seen].double()
        cosines = torch.cosine_similarity(before, after, dim=-1)
        assert torch.allclose(record.cosines[number, seen].double(), cosines, atol=1e-6)
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
    for rows, expected in zip(record.attention.values(), attentions, strict=True):
        assert rows.shape[1] == len(record.queries) < 16
        assert torch.allclose(rows, expected[0][:, record.queries], atol=1e-5)


def rotated_by_functions(model: PreTrainedModel, sample: Inputs, patch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """By layer, the keys that the family's own function for rotary embedding was given, `(num_heads, S, size)`."""
    length = sample["input_ids"].shape[1]
    given: dict[int, list[torch.Tensor]] = {}
    now: list[int] = []
    for number, layer in enumerate(find_decoder(model).layers):
        layer.register_forward_pre_hook(lambda *_, number=number: now.append(number))
        source = sys.modules[type(layer).__module__]
        for name in [name for name in dir(source) if re.fullmatch(r"apply_\w*rotary\w*", name)]:
            rotate = getattr(source, name)
            if getattr(rotate, "seen_by_test", False):
                continue

            def see(*args: object, rotate: Callable[..., object] = rotate) -> object:
                states = [arg[0] for arg in args if isinstance(arg, torch.Tensor) and arg.ndim == 4 and len(arg) == 1]
                given.setdefault(now[-1] if now else -1, []).extend(states)
                return rotate(*args)

            see.seen_by_test = True
            patch.setattr(source, name, lambda *args, see=see, **kwargs: see(*args, *kwargs.values()))
            getattr(source, name).seen_by_test = True
    with torch.no_grad():
        model(**sample)
    keys = {number: states[1] for number, states in given.items() if number >= 0}  # queries come first
    return {number: key if key.shape[1] == length else key.transpose(0, 1) for number, key in keys.items()}


def handed_to_sdpa(model: PreTrainedModel, sample: Inputs) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By layer, the keys and values that the attention function gets, `(num_heads, S, size)`."""
    numbers = {id(part): number for number, layer in enumerate(find_decoder(model).layers) for part in layer.modules()}
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: torch.nn.Module, query: torch.Tensor, *args: torch.Tensor, **kwargs: object) -> object:
        if id(module) in numbers:
            seen[numbers[id(module)]] = (args[0][0], args[1][0])
        return sdpa(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        with torch.no_grad():
            model(**sample)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_are_what_is_rotated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what the family's own rotation is given; where nothing is rotated, against what attention is given."""
    model, sample = build(name), inputs(name, padding=3)
    record = record_sample(model, sample)
    handed = handed_to_sdpa(model, sample)
    rotated = rotated_by_functions(model, sample, monkeypatch)
    assert set(record.keys) == {0, 1, 2} - WITHOUT_KEYS.get(name, set())
    assert set(record.values) == set(record.attention) == set(handed)
    for number, keys in record.keys.items():
        key = handed[number][0]
        if number not in rotated:
            assert torch.equal(keys, key)
            continue
        assert torch.equal(keys, rotated[number])
        assert not torch.allclose(keys, key, atol=1e-6)
    for number, values in record.values.items():
        assert torch.equal(values, handed[number][1])
    assert [note[:15] for note in record.notes] == ["keys of layer 1"] * (name in WITHOUT_KEYS)


def test_a_model_set_by_hand_gives_the_numbers_on_paper(hand_made: tuple[PreTrainedModel, Inputs]) -> None:
    model, sample = hand_made
    record = record_sample(model, sample)
    text_norms = np.array([TEXT_NORMS[int(token) % 2] for token in sample["input_ids"][0][record.tokens.text]])
    assert 0 < (text_norms == TEXT_NORMS[0]).mean() < 0.5  # so that mean and median are two things
    visual_norms = np.full(16, VISUAL_NORM)
    summary = Summary.of(
        pd.concat([measure_interface([record] * 2, vocabulary_norms(model)), measure_layers([record] * 2)])
    )
    for place, modality, norms in (
        ("projector_output", "visual", visual_norms),
        ("at_decoder", "visual", visual_norms),
        ("at_decoder", "text", text_norms),
        ("in_prompt", "text", text_norms),
        ("vocabulary", "text", np.array(TEXT_NORMS)),  # ten rows of the table are all zero
    ):
        assert summary.look(place, modality).mean == pytest.approx(norms.mean())
    assert summary.look("ratio").mean == pytest.approx(VISUAL_NORM / text_norms.mean())
    assert summary.look("ratio_to_vocabulary").mean == pytest.approx(VISUAL_NORM / np.mean(TEXT_NORMS))
    turning = {}
    for modality, starts in (("visual", visual_norms), ("text", text_norms)):
        norms = np.sqrt(starts**2 + np.arange(4)[:, None] * UPDATE**2)  # [num_layers + 1, num_tokens]
        turning[modality] = 1 - (norms[:-1] / norms[1:]).mean(1)
        for measure, expected in (
            ("norm", norms.mean(1)),
            ("turning", turning[modality]),
            ("update_ratio", (UPDATE / norms[:-1]).mean(1)),
            ("update_cosine", np.zeros(3)),
        ):
            found = summary.curve(measure, modality)["mean"].tolist()
            assert found == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6), measure
        assert summary.look("turning", modality).mean == pytest.approx(turning[modality].mean(), abs=1e-6)
    gaps = turning["text"] - turning["visual"]
    assert summary.curve("gap")["mean"].tolist() == pytest.approx(gaps.tolist(), abs=1e-6)
    assert summary.look("gap, last third") == pytest.approx([gaps[2]] * 3, abs=1e-6)


def test_one_sink_is_left_out_and_named(hand_made: tuple[PreTrainedModel, Inputs]) -> None:
    model, sample = hand_made
    expected = Summary.of(measure_layers([record_sample(model, sample)]))
    position = 10  # a visual token
    record = record_sample(set_by_hand(build("llava-siglip"), massive=(position,)), sample)
    assert record.tokens.excluded["sink"].nonzero().flatten().tolist() == [position]
    assert record.tokens.visual.sum() == record.with_sinks.visual.sum() - 1
    measured = Summary.of(measure_layers([record]))
    for place in (("norm", "visual"), ("gap",)):
        means = [summary.curve(*place)["mean"].tolist() for summary in (measured, expected)]
        assert means[0] == pytest.approx(means[1], abs=1e-6)


def test_a_decoder_that_multiplies_its_input_has_the_same_ratios() -> None:
    """Granite's does so with text and pictures alike; LLaVA-NeXT's newlines are found all the same."""
    factor = 12.0
    plain, sample = build("llava_next"), inputs("llava_next")
    fields = {**plain.config.text_config.to_dict(), "model_type": "granite", "embedding_multiplier": factor}
    fields |= {"attention_multiplier": plain.config.text_config.head_dim**-0.5}
    scaled = copy.deepcopy(plain)
    scaled.model.language_model = AutoModel.from_config(CONFIG_MAPPING["granite"](**fields)).eval()
    scaled.model.language_model.load_state_dict(plain.model.language_model.state_dict())
    vocabulary = vocabulary_norms(plain)
    records = record_sample(plain, sample), record_sample(scaled, sample)
    assert [int(record.tokens.excluded["newline"].sum()) for record in records] == [4, 4]
    before, after = (measure_interface([record], vocabulary) for record in records)
    is_scaled = before["measure"].isin(["at_decoder", "in_prompt", "vocabulary"])
    expected = before["value"] * np.where(is_scaled, factor, 1)
    assert after["value"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_one_text_token_tells_no_factor() -> None:
    assert input_scale(torch.tensor([3.0]), torch.tensor([2.0])) == 1
    assert input_scale(torch.tensor([3.0, 3.0]), torch.zeros(2)) == 1
    assert input_scale(torch.tensor([3.0, 6.0]), torch.tensor([2.0, 4.0])) == 1.5
    assert input_scale(torch.tensor([3.0, 5.0]), torch.tensor([2.0, 4.0])) == 1


def test_patches_that_pad_a_tile_are_no_encoders_output() -> None:
    """LFM2-VL pads the smaller of two tiles. Its projector gets slots for the padding too, its decoder does not."""
    model = build("lfm2_vl")
    ids = torch.tensor([[1, 20, *[IMAGE] * 4, 21, *[IMAGE] * 2, 22, 23, 24]])
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 8:] = 0
    shapes = torch.tensor([[4, 4], [2, 4]])
    sample = {"input_ids": ids, "pixel_values": torch.randn(2, 16, 147), "spatial_shapes": shapes}
    sample |= {"pixel_attention_mask": mask, "attention_mask": torch.ones_like(ids)}
    record = record_sample(model, sample)
    assert len(record.interface["encoder_output"]) == 24
    assert record.tokens.visual.sum() == 6


def test_what_enters_the_decoder_can_be_changed() -> None:
    """Visual tokens multiplied by a number are so for every measure, and the model is itself again afterwards."""
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    before, visual = record_sample(model, sample), tokens_of(model, sample).visual

    def triple(place: str, features: torch.Tensor) -> torch.Tensor | None:
        return torch.where(visual[None, :, None], 3 * features, features) if place == "decoder" else None

    with InterfaceHooks(model, triple):
        changed = record_sample(model, sample)
    assert torch.allclose(changed.layer_norms[0, visual], 3 * before.layer_norms[0, visual])
    assert torch.equal(changed.layer_norms[0, ~visual], before.layer_norms[0, ~visual])
    assert torch.equal(record_sample(model, sample).cosines, before.cosines)


def test_hooks_are_gone_after_a_failure() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    with pytest.raises(RuntimeError, match="stop"), Probe(model, sample, tokens_of(model, sample)):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.get_decoder().config._attn_implementation == "sdpa"


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


def test_another_attention_is_said_and_not_measured() -> None:
    config = copy.deepcopy(FAMILIES["llava-siglip"].config)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    record: Record = record_sample(model, inputs("llava-siglip"))
    assert record.attention == {}
    assert measure_attention([record]) is None
    assert any("runs with eager" in note for note in record.notes)


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 32}
