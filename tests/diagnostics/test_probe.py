"""One forward pass through hooks: every family, against transformers' own outputs; and a model set by hand."""

import copy
import dataclasses
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from hand_made import TEXT_NORMS, UPDATE, VISUAL_NORM, set_by_hand
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diagnostics.attention import measure_attention
from diagnostics.embeddings import vocabulary_norms
from diagnostics.gradients import measure_gradients
from diagnostics.interface import input_scale, measure_interface
from diagnostics.key_space import measure_space
from diagnostics.layers import measure_layers
from diagnostics.parts import DiagnosticsError, NoVisualTokensError, decoder_layers, find_projector
from diagnostics.probe import Probe, Record
from families import FAMILIES, IMAGE, answered, build, inputs, record_sample, tokens_of


Inputs = dict[str, torch.Tensor]
# What the projector returns does not enter the decoder as it is: a newline feature, scaling, tiles put together.
CHANGED_AFTER_PROJECTOR = ("llava_next", "llava_onevision", "paligemma")
# Embeddings are scaled, or positions added to them, before the first layer.
CHANGED_BEFORE_DECODER = ("granite_docling", "blip-2", "instructblip")
# Visual tokens without a place: a resampler's queries, patches in an order that the inputs don't tell, no rows.
WITHOUT_GRID = ("aria", "idefics2", "blip-2", "instructblip", "gemma4", "fuyu")
# Visual features are added to the hidden states between layers.
ADDED_BETWEEN_LAYERS = {"qwen3_vl": "0, 1", "granite_docling": "0"}
ONE, TWO = np.zeros(1, dtype=int), np.arange(2)  # samples of so many pictures
# Layers without keys: no attention, or a norm behind the rotation.
WITHOUT_KEYS = {"lfm2_vl": {1}, "qwen3_5": {1}, "hunyuan_vl": {0, 1, 2}, "llama4": {0, 1}}


def states_of(model: PreTrainedModel, sample: Inputs) -> tuple[torch.Tensor, ...]:
    return decoder_outputs(model, sample, output_hidden_states=True).hidden_states


def decoder_outputs(model: PreTrainedModel, sample: Inputs, **options: bool) -> ModelOutput:
    with torch.no_grad():
        outputs = model(**sample, **options)
    return getattr(outputs, "language_model_outputs", outputs)  # BLIP-2 has them inside


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_measured_and_its_logits_stay(name: str, family_table: dict[str, str]) -> None:
    padding = 3
    model, sample = build(name), inputs(name, padding)
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
    assert record.tokens.excluded["padding"].sum() == padding
    assert record.tokens.excluded["special"].sum() == 1 + 2 * FAMILIES[name].boundaries
    count = FAMILIES[name].image_tokens
    square = None if name in WITHOUT_GRID else (count**0.5, count**0.5)
    assert record.grid == {36 + 16: None, 10: None, 6: (2, 3)}.get(count, square)
    places = ["projector_input", "projector_output"] + ["encoder_output"] * (name != "fuyu")
    assert all(place in record.interface for place in places)
    added = [note for note in record.notes if "are added after layer" in note]
    assert len(added) == (name in ADDED_BETWEEN_LAYERS)
    assert all(f"after layer {ADDED_BETWEEN_LAYERS[name]}," in note for note in added)
    if name not in (*CHANGED_AFTER_PROJECTOR, *CHANGED_BEFORE_DECODER):
        after, before = record.interface["projector_output"][0], record.layer_norms[0, record.tokens.visual]
        assert torch.allclose(after.sort().values, before.sort().values, rtol=1e-5)

    vocabulary = vocabulary_norms(model)
    interface = measure_interface([record], ONE, vocabulary, 32)
    layers, attention = measure_layers([record], ONE), measure_attention([record], ONE)
    if name not in ("blip-2", "instructblip"):  # their positions are added
        assert interface.text_at_decoder.mean == pytest.approx(interface.text_in_prompt.mean, rel=1e-5)
    assert attention is not None
    keys = measure_space([record.keys] * 2, [record] * 2, TWO, {})
    start = int((ids == IMAGE).nonzero()[-1, 0]) + 1
    gradients = measure_gradients(model, [answered(model, sample, start)])
    assert gradients is not None
    assert set(gradients.norms) == ({"compensated", "plain"} if name.startswith("normllava") else {"no norm"})
    measured = [value for norms in gradients.norms.values() for value in dataclasses.astuple(norms)]
    assert all(value > 0 for value in measured if value is not None)
    assert (None in measured) == (name == "fuyu")  # no encoder, and pixels enter its projector
    mmd = "few tokens" if keys is None else f"{keys.mmd.mean[0]:.3f}"
    left_out = {reason: int(mask.sum()) for reason, mask in record.tokens.excluded.items() if mask.any()}
    family_table[name] = (
        f"{name:17}{interface.visual_at_decoder.mean:8.3f}{interface.text_at_decoder.mean:6.2f}"
        f"{interface.ratio.mean:9.3f}{layers.visual.update_rate.mean:9.4f}"
        f"{layers.text.update_rate.mean:9.4f}{attention.with_sinks.mass.mean[0]:7.2f}"
        f"{mmd:>12}  {left_out} {'; '.join(record.notes)}"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_those_of_the_hidden_states(name: str) -> None:
    model, sample = build(name), inputs(name)
    record, states = record_sample(model, sample), states_of(model, sample)
    for number, state in enumerate(states[:-1]):  # the last one is past the final norm
        # What is added to visual tokens between layers is not in the hidden states.
        with_added = name in ADDED_BETWEEN_LAYERS and number > 0
        seen = record.tokens.text if with_added else torch.ones_like(record.tokens.text)
        assert torch.allclose(record.layer_norms[number, seen], state[0, seen].norm(dim=-1), rtol=1e-5)
        if number + 2 == len(states):
            break
        before, after = states[number][0, seen].double(), states[number + 1][0, seen].double()
        cosines = torch.cosine_similarity(before, after, dim=-1)
        assert torch.allclose(record.cosines[number, seen].double(), cosines, atol=1e-6)
        # Equation 8 from ‖u‖/‖h‖ and cos(u, h) gives the angle between before and after.
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
    attentions = decoder_outputs(eager, sample, output_attentions=True).attentions
    for rows, expected in zip(record.attention.values(), attentions, strict=True):
        assert rows.shape[1] == len(record.queries) < 16
        assert torch.allclose(rows, expected[0][:, record.queries], atol=1e-5)


def rotated_by_functions(model: PreTrainedModel, sample: Inputs, patch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """By layer, the keys that the family's own function for rotary embedding was given, `(num_heads, S, size)`."""
    length = sample["input_ids"].shape[1]
    given: dict[int, list[torch.Tensor]] = {}
    now: list[int] = []
    for number, layer in enumerate(decoder_layers(model)):
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
    numbers = {id(part): number for number, layer in enumerate(decoder_layers(model)) for part in layer.modules()}
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
        if name == "kimi_k25" or number not in rotated:  # multi-head latent attention rotates other dimensions
            assert torch.equal(keys, key[..., : keys.shape[-1]])
            continue
        before = rotated[number]
        assert torch.equal(keys[..., : before.shape[-1]], before)  # Persimmon rotates some of them alone
        assert torch.equal(keys[..., before.shape[-1] :], key[..., before.shape[-1] :])
        assert not torch.allclose(keys, key, atol=1e-6)
    for number, values in record.values.items():
        assert torch.equal(values, handed[number][1])
    told = [note for note in record.notes if "keys of layer" in note or "keys and values" in note]
    assert len(told) == (name in WITHOUT_KEYS)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_layer_decodes_to_the_models_own_logits(name: str) -> None:
    model, sample = build(name), inputs(name)
    record = record_sample(model, sample, lens=True)
    with torch.no_grad():
        logits = model(**sample).logits[0, record.with_sinks.visual].float()
    assert set(record.decoded) == {0, 1, 2}
    ids, probabilities = record.decoded[2]
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.allclose(probabilities, logits.softmax(-1).amax(-1), atol=1e-6)
    assert not torch.equal(record.decoded[0][1], probabilities)
    assert record_sample(model, sample).decoded == {}


def test_without_a_final_norm_nothing_is_decoded() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    decoder = model.get_decoder()
    decoder.last = decoder.__dict__["_modules"].pop("norm")
    decoder.__dict__["norm"] = decoder.last
    record = record_sample(model, sample, lens=True)
    assert record.decoded == {}
    assert any("logit lens: not recorded, no part of the decoder is called norm," in note for note in record.notes)


def test_a_model_set_by_hand_gives_the_numbers_on_paper(hand_made: tuple[PreTrainedModel, Inputs]) -> None:
    model, sample = hand_made
    record = record_sample(model, sample)
    text_norms = np.array([TEXT_NORMS[int(token) % 2] for token in sample["input_ids"][0][record.tokens.text]])
    assert 0 < (text_norms == TEXT_NORMS[0]).mean() < 0.5  # so that mean and median are two things
    visual_norms = np.full(16, VISUAL_NORM)
    interface = measure_interface([record, record], TWO, vocabulary_norms(model), 32)
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

    layers = measure_layers([record, record], TWO)
    for modality, starts in (("visual", visual_norms), ("text", text_norms)):
        norms = np.sqrt(starts**2 + np.arange(4)[:, None] * UPDATE**2)  # [num_layers + 1, num_tokens]
        cosines = norms[:-1] / norms[1:]
        measured = layers.of(modality)
        assert measured.norm.mean == pytest.approx(norms.mean(1))
        assert measured.cosine.mean == pytest.approx(cosines.mean(1), abs=1e-6)
        assert measured.update_ratio.mean == pytest.approx((UPDATE / norms[:-1]).mean(1))
        assert measured.update_cosine.mean == pytest.approx([0, 0, 0], abs=1e-6)
        assert measured.update_rate.mean == pytest.approx(1 - cosines.mean(), abs=1e-6)
    gaps = [v - t for v, t in zip(layers.visual.cosine.mean, layers.text.cosine.mean, strict=True)]
    assert layers.gap.mean == pytest.approx(gaps)
    assert layers.gap.overall.mean == pytest.approx(sum(gaps) / 3)
    assert layers.gap.overall.interval == pytest.approx([sum(gaps) / 3] * 2)


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
    expected = measure_layers([record_sample(model, sample)], ONE)
    position = 10  # a visual token
    record = record_sample(set_by_hand(build("llava-siglip"), massive=(position,)), sample)
    assert record.tokens.excluded["sink"].nonzero().flatten().tolist() == [position]
    assert record.tokens.visual.sum() == record.with_sinks.visual.sum() - 1
    measured = measure_layers([record], ONE)
    assert measured.visual.norm.mean == pytest.approx(expected.visual.norm.mean)
    assert measured.gap.mean == pytest.approx(expected.gap.mean, abs=1e-6)


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
    before, after = (measure_interface([record], ONE, vocabulary, 32) for record in records)
    assert after.ratio.mean == pytest.approx(before.ratio.mean, rel=1e-5)
    assert after.ratio_to_vocabulary.mean == pytest.approx(before.ratio_to_vocabulary.mean, rel=1e-5)
    for place in ("visual_at_decoder", "text_at_decoder", "text_in_prompt", "vocabulary"):
        assert getattr(after, place).mean == pytest.approx(factor * getattr(before, place).mean, rel=1e-5)


def test_one_text_token_tells_no_factor() -> None:
    assert input_scale(torch.tensor([3.0]), torch.tensor([2.0])) == 1
    assert input_scale(torch.tensor([3.0, 3.0]), torch.zeros(2)) == 1
    assert input_scale(torch.tensor([3.0, 6.0]), torch.tensor([2.0, 4.0])) == 1.5
    assert input_scale(torch.tensor([3.0, 5.0]), torch.tensor([2.0, 4.0])) == 1


def test_tiles_that_pass_one_by_one_all_count() -> None:
    """LFM2-VL projects each tile by itself, and pads the smaller one with patches that no token is made of."""
    model = build("lfm2_vl")
    ids = torch.tensor([[1, 20, *[IMAGE] * 4, 21, *[IMAGE] * 2, 22, 23, 24]])
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 8:] = 0
    shapes = torch.tensor([[4, 4], [2, 4]])
    sample = {"input_ids": ids, "pixel_values": torch.randn(2, 16, 147), "spatial_shapes": shapes}
    sample |= {"pixel_attention_mask": mask, "attention_mask": torch.ones_like(ids)}
    record = record_sample(model, sample, num_images=2)
    counted = {place: len(norms) for place, (norms, _) in record.interface.items()}
    assert counted == {"encoder_output": 24, "projector_input": 24, "projector_output": 6}
    assert torch.allclose(record.interface["projector_output"][0], record.layer_norms[0, record.tokens.visual])
    measured = measure_gradients(model, [answered(model, sample, 9)])
    assert measured is not None
    sizes = []
    projector = find_projector(model)
    assert projector is not None
    hook = projector.register_forward_pre_hook(lambda module, args: sizes.append(args[0].retain_grad() or args[0]))
    with torch.enable_grad():
        logits = model(**sample).logits[0]
        torch.nn.functional.cross_entropy(logits[8:-1], ids[0, 9:]).backward()
    hook.remove()
    expected = torch.stack([features.grad.norm() for features in sizes]).norm().item()
    assert len(sizes) == 2
    assert measured.norms["no norm"].projector_input == pytest.approx(expected, rel=1e-4)


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
    assert measure_attention([record], ONE) is None
    assert any("runs with eager" in note for note in record.notes)


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 32}
