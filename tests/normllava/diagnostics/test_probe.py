"""Tests of what a probe records: transformers' own outputs in each family, and numbers known by construction.

The sample of each family is BOS, three words, a picture and nine words: see `families.inputs`. In shapes, `S` is the
number of tokens of the sample, including padding.
"""

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families import FAMILIES, IMAGE, build, inputs, record_sample, tokens_of
from normllava.diagnostics.attention_call import before_rotation
from normllava.diagnostics.measures import measure_attention, measure_interface, measure_layers
from normllava.diagnostics.probe import Probe
from normllava.diagnostics.table import Summary
from normllava.norms import vocabulary_norms
from normllava.parts import DiagnosticsError, find_decoder


# In these families the projector's output does not enter the decoder as it is: a newline feature is added, the output
# is scaled, or tiles are put together.
CHANGED_AFTER_PROJECTOR = ("llava_next", "llava_onevision", "paligemma")
# Families that end each of the four rows of a picture with a newline feature.
WITH_NEWLINES = ("llava_next", "llava_onevision")
# By family, the number of a layer that has no attention, and so no keys.
LAYER_WITHOUT_KEYS = {"lfm2_vl": 1, "qwen3_5": 1}
# Norms in the model that `set_by_hand` makes.
IMAGE_NORM = 40.0  # of image tokens that enter the decoder
EVEN_NORM = 2.0  # of the embeddings of even token ids
ODD_NORM = 6.0  # of the embeddings of odd token ids
UPDATE = 3.0  # of what each layer adds to each token


@pytest.mark.parametrize("name", FAMILIES)
def test_a_probe_leaves_logits_unchanged(name: str) -> None:
    model = build(name)
    sample = inputs(name, padding=3)
    with torch.no_grad():
        logits = model(**sample).logits
        with Probe(model, sample, tokens_of(model, sample)):
            logits_in_probe = model(**sample).logits
        logits_afterwards = model(**sample).logits
    assert torch.equal(logits_in_probe, logits)
    assert torch.equal(logits_afterwards, logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_token_of_a_family_gets_its_type(name: str) -> None:
    sample = inputs(name, padding=3)
    tokens = record_sample(build(name), sample).tokens

    num_newlines = 0
    if name in WITH_NEWLINES:
        num_newlines = 4
        assert tokens.excluded["newline"].sum() == num_newlines
    else:
        assert "newline" not in tokens.excluded

    num_image_ids = (sample["input_ids"] == IMAGE).sum()  # newline features stand at image ids too
    assert tokens.image.sum() == num_image_ids - num_newlines
    assert tokens.text.sum() == 3 + 9  # the words before and after the picture
    assert tokens.excluded["padding"].sum() == 3

    num_boundaries = 2 if FAMILIES[name].has_boundaries else 0
    assert tokens.excluded["special"].sum() == 1 + num_boundaries  # the 1 is BOS


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_on_the_way_into_the_decoder_agree(name: str) -> None:
    model = build(name)
    record = record_sample(model, inputs(name, padding=3))

    assert {"projector_input", "projector_output", "encoder_output"} <= set(record.interface)
    if name not in CHANGED_AFTER_PROJECTOR:
        # Sorted, because the decoder may get the features in another order.
        projected = record.interface["projector_output"].sort().values
        entering = record.layer_norms[0, record.tokens.image].sort().values
        assert torch.allclose(projected, entering, rtol=1e-5)

    # Text embeddings enter the decoder as they are.
    summary = Summary.of(measure_interface([record], vocabulary_norms(model)))
    at_decoder = summary.look("at_decoder", "text").mean
    in_prompt = summary.look("in_prompt", "text").mean
    assert at_decoder == pytest.approx(in_prompt, rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_and_cosines_are_those_of_the_hidden_states(name: str) -> None:
    model = build(name)
    sample = inputs(name)
    record = record_sample(model, sample)
    with torch.no_grad():
        all_states = model(**sample, output_hidden_states=True).hidden_states
    # The last entry is left out, because the decoder's final norm module has been applied to it.
    states = all_states[:-1]  # input of each layer, [1, S, hidden_size]

    checked = torch.ones_like(record.tokens.text)  # a mask of all tokens
    if name == "qwen3_vl":
        # This family adds picture features to image tokens between layers, after transformers has kept the states.
        checked = record.tokens.text
    norms = torch.stack([state[0, checked].norm(dim=-1) for state in states])
    assert torch.allclose(record.layer_norms[:-1, checked], norms, rtol=1e-5)

    for layer in range(len(states) - 1):
        before = states[layer][0, checked].double()
        after = states[layer + 1][0, checked].double()
        cosines = torch.cosine_similarity(before, after, dim=-1)
        assert torch.allclose(record.cosines[layer, checked].double(), cosines, atol=1e-6)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_that_of_the_eager_model(name: str, padding: int) -> None:
    model = build(name)
    sample = inputs(name, padding)
    record = record_sample(model, sample)

    config = copy.deepcopy(model.config)
    eager = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attentions = eager(**sample, output_attentions=True).attentions

    assert len(record.queries) == 9  # the nine words after the picture
    for probabilities, attention in zip(record.attention.values(), attentions, strict=True):
        expected = attention[0][:, record.queries]  # [num_heads, num_queries, S]
        assert probabilities.shape == expected.shape
        assert torch.allclose(probabilities, expected, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_are_those_before_rotation_and_values_those_in_attention(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are compared with the input of the family's function for rotary embedding, values with the input of sdpa.

    For this, the two functions are replaced by functions that also keep their input.
    """
    model = build(name)
    sample = inputs(name, padding=3)
    record = record_sample(model, sample)
    layers = find_decoder(model).layers

    queries_and_keys: list[torch.Tensor] = []  # queries of layer 0, keys of layer 0, queries of layer 1, ...
    values: list[torch.Tensor] = []  # of each layer

    # The vision encoder may have called the same functions when the decoder's first layer starts.
    def forget_vision_encoder(*hook_args: object) -> None:
        queries_and_keys.clear()
        values.clear()

    layers[0].register_forward_pre_hook(forget_vision_encoder)

    def keep_and_rotate(*args: Any, rotate: Callable[..., Any], **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            # Queries and keys have the shape (1, num_heads, S, head_dim). Other arguments are sines and cosines.
            if isinstance(argument, torch.Tensor) and argument.ndim == 4 and len(argument) == 1:
                queries_and_keys.append(argument[0])
        return rotate(*args, **kwargs)

    # The function is called `apply_rotary_pos_emb`, `apply_multimodal_rotary_pos_emb` or the like.
    modeling_file = sys.modules[type(layers[0]).__module__]
    for function_name in dir(modeling_file):
        if re.match(r"apply_\w*rotary", function_name):
            rotate = getattr(modeling_file, function_name)
            monkeypatch.setattr(modeling_file, function_name, partial(keep_and_rotate, rotate=rotate))

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def keep_and_attend(module: Any, query: Any, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        values.append(value[0])
        return sdpa(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", keep_and_attend)
    with torch.no_grad():
        model(**sample)

    layers_with_keys = [0, 1, 2]
    if name in LAYER_WITHOUT_KEYS:
        layers_with_keys.remove(LAYER_WITHOUT_KEYS[name])
    assert list(record.keys) == layers_with_keys
    assert list(record.values) == layers_with_keys

    keys = queries_and_keys[1::2]  # of each layer
    for layer, expected_keys, expected_values in zip(layers_with_keys, keys, values, strict=True):
        if expected_keys.shape != record.keys[layer].shape:  # in some families the axis of tokens is first
            expected_keys = expected_keys.transpose(0, 1)
        assert torch.equal(record.keys[layer], expected_keys)
        assert torch.equal(record.values[layer], expected_values)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_without_keys_is_noted(name: str) -> None:
    record = record_sample(build(name), inputs(name))
    # Some models also have a note on pictures that enter later layers, which is left out here.
    notes = [note for note in record.notes if "later layers" not in note]
    if name in LAYER_WITHOUT_KEYS:
        (note,) = notes
        assert note.startswith("keys of layer 1: not recorded")
    else:
        assert notes == []


def test_the_keys_of_a_decoder_with_yarn_are_recorded() -> None:
    model = build("llava-siglip")
    # YaRN multiplies rotated queries and keys by such a factor.
    find_decoder(model).rotary_emb.attention_scaling = 1.14
    record = record_sample(model, inputs("llava-siglip"))
    assert list(record.keys) == [0, 1, 2]
    assert record.notes == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_was_rotated_is_taken_for_keys(dtype: torch.dtype) -> None:
    """`before_rotation` returns a projection's output only if the keys in attention can be a rotation of this output.

    Rotary embedding keeps the norm of each key, or multiplies all norms by one factor (YaRN). Another projection, or a
    norm module in between, doesn't.
    """
    torch.manual_seed(0)
    keys = torch.randn(2, 12, 8).to(dtype)  # [num_heads, S, head_dim]
    unrelated = torch.randn(2, 12, 8).to(dtype)

    # Rotate dimensions 0 and 2, and dimensions 1 and 3, as rotary embedding does. The last four dimensions stay.
    positions = torch.arange(12)[:, None]
    angles = positions / torch.tensor([1.0, 10.0])  # [S, 2]
    cos = angles.cos()
    sin = angles.sin()
    first, second, rest = keys.float().split([2, 2, 4], dim=-1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    rotated = torch.cat([rotated_first, rotated_second, rest], dim=-1).to(dtype)

    tokens_first = keys.transpose(0, 1)  # [S, num_heads, head_dim]
    heads_joined = tokens_first.flatten(1)  # [S, num_heads * head_dim]
    for projected in (keys, tokens_first, heads_joined):
        assert torch.equal(before_rotation(projected, rotated), keys)
        assert torch.equal(before_rotation(projected, 1.1 * rotated), keys)
        assert before_rotation(projected, 3 * rotated) is None

    normalized_keys = keys / keys.norm(dim=-1, keepdim=True)
    keys_of_one_head = keys[:1]
    for projected in (unrelated, normalized_keys, keys_of_one_head, None):
        assert before_rotation(projected, rotated) is None


class AddUpdate(nn.Module):
    """A decoder layer that adds the same vector to every token: `UPDATE` along one axis of the hidden states."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update = torch.zeros_like(hidden_states)
        update[..., self.axis] = UPDATE
        return hidden_states + update


@torch.no_grad()
def set_by_hand(model: PreTrainedModel) -> PreTrainedModel:
    """Set a model's weights and layers so that all its hidden states are known.

    Every token enters the decoder along axis 0: image tokens with norm `IMAGE_NORM`, text tokens with norm `EVEN_NORM`
    or `ODD_NORM`. Layer n adds `UPDATE` along axis n + 1, which is orthogonal to the layer's input.
    """
    projector = model.model.multi_modal_projector
    projector.linear_2.weight.zero_()
    projector.linear_2.bias.zero_()
    projector.linear_2.bias[0] = IMAGE_NORM

    # The first ten embeddings stay zero, like those that pad a vocabulary. No word of the sample has such an id.
    embeddings = model.get_input_embeddings().weight
    embeddings.zero_()
    embeddings[10::2, 0] = EVEN_NORM
    embeddings[11::2, 0] = ODD_NORM

    decoder = model.get_decoder()
    decoder.layers = nn.ModuleList(AddUpdate(axis=number + 1) for number in range(len(decoder.layers)))
    return model


def test_a_model_set_by_hand_has_the_norms_it_was_given() -> None:
    model = set_by_hand(build("llava-siglip"))
    sample = inputs("llava-siglip")
    record = record_sample(model, sample)

    text_ids = sample["input_ids"][0, record.tokens.text]
    text_norm = np.where(text_ids % 2 == 0, EVEN_NORM, ODD_NORM).mean()
    vocabulary_norm = (EVEN_NORM + ODD_NORM) / 2
    # The sample has more odd ids than even ids, so the mean norm of its text tokens differs from the vocabulary's.
    assert vocabulary_norm < text_norm < ODD_NORM

    summary = Summary.of(measure_interface([record], vocabulary_norms(model)))
    assert summary.look("projector_output", "image").mean == pytest.approx(IMAGE_NORM)
    assert summary.look("at_decoder", "image").mean == pytest.approx(IMAGE_NORM)
    assert summary.look("at_decoder", "text").mean == pytest.approx(text_norm)
    assert summary.look("in_prompt", "text").mean == pytest.approx(text_norm)
    assert summary.look("vocabulary", "text").mean == pytest.approx(vocabulary_norm)
    assert summary.look("ratio").mean == pytest.approx(IMAGE_NORM / text_norm)
    assert summary.look("ratio_to_vocabulary").mean == pytest.approx(IMAGE_NORM / vocabulary_norm)


def test_a_model_set_by_hand_turns_its_tokens_as_computed_on_paper() -> None:
    model = set_by_hand(build("llava-siglip"))
    sample = inputs("llava-siglip")
    record = record_sample(model, sample)
    two_records = [record, record]  # one picture would give no interval
    summary = Summary.of(measure_layers(two_records))

    text_ids = sample["input_ids"][0, record.tokens.text]
    norms_at_entrance = {
        "image": np.full(16, IMAGE_NORM),
        "text": np.where(text_ids % 2 == 0, EVEN_NORM, ODD_NORM),
    }
    turning = {}
    for modality, entering in norms_at_entrance.items():
        # Updates are orthogonal, so by Pythagoras a token has the norm √(entering² + n · UPDATE²) before layer n.
        num_updates = np.arange(3 + 1)[:, None]  # before each of the three layers, and after the last
        norms = np.sqrt(entering**2 + num_updates * UPDATE**2)  # [num_layers + 1, num_tokens]
        norms_before = norms[:-1]  # [num_layers, num_tokens]
        norms_after = norms[1:]
        # The cosine of a layer's input and output is the ratio of their norms.
        turning[modality] = 1 - (norms_before / norms_after).mean(axis=1)

        expected_means = {
            "norm": norms.mean(axis=1),
            "turning": turning[modality],
        }
        for measure, expected in expected_means.items():
            means = summary.curve(measure, modality)["mean"].tolist()
            assert means == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6), measure
        # If no layer is named, a summary gives the mean over layers.
        assert summary.look("turning", modality).mean == pytest.approx(turning[modality].mean(), abs=1e-6)

    gaps = turning["text"] - turning["image"]
    assert summary.curve("gap")["mean"].tolist() == pytest.approx(gaps.tolist(), abs=1e-6)
    # The last of the three layers is the last third. Both records are the same, so the interval has no width.
    last_gap = summary.look("gap, last third")
    assert last_gap.mean == pytest.approx(gaps[2], abs=1e-6)
    assert last_gap.low == pytest.approx(gaps[2], abs=1e-6)
    assert last_gap.high == pytest.approx(gaps[2], abs=1e-6)


def test_a_decoder_that_multiplies_its_input_has_the_same_ratios() -> None:
    """Granite multiplies text and image tokens alike by `embedding_multiplier`.

    The plain model is a LLaVA-NeXT. The other is a copy of it with the same weights, but a Granite as its decoder.
    """
    factor = 12.0
    plain = build("llava_next")
    sample = inputs("llava_next")

    text_config = plain.config.text_config
    fields = text_config.to_dict() | {
        "model_type": "granite",
        "embedding_multiplier": factor,
        "attention_multiplier": text_config.head_dim**-0.5,  # as in the plain model
    }
    multiplying = copy.deepcopy(plain)
    multiplying.model.language_model = AutoModel.from_config(CONFIG_MAPPING["granite"](**fields)).eval()
    multiplying.model.language_model.load_state_dict(plain.model.language_model.state_dict())

    vocabulary = vocabulary_norms(plain)
    plain_record = record_sample(plain, sample)
    multiplied_record = record_sample(multiplying, sample)
    # All newline features are found, although Granite multiplies them too.
    assert plain_record.tokens.excluded["newline"].sum() == 4
    assert multiplied_record.tokens.excluded["newline"].sum() == 4

    plain_rows = measure_interface([plain_record], vocabulary)
    multiplied_rows = measure_interface([multiplied_record], vocabulary)
    # The norms up to the projector, and the ratios, are not multiplied.
    is_multiplied = plain_rows["measure"].isin(["at_decoder", "in_prompt", "vocabulary"])
    expected = plain_rows["value"] * np.where(is_multiplied, factor, 1)
    assert multiplied_rows["value"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_hooks_are_gone_after_a_failure() -> None:
    model = build("llava-siglip")
    sample = inputs("llava-siglip")
    probe = Probe(model, sample, tokens_of(model, sample))
    with pytest.raises(RuntimeError, match="stop"), probe:
        raise RuntimeError("stop")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert model.get_decoder().config._attn_implementation == "sdpa"


def test_a_model_whose_decoder_gets_only_placeholders_is_refused() -> None:
    """Mllama is such a model: its decoder sees pictures by cross-attention.

    Here the model is a Llava without pixels, whose decoder gets only placeholders too.
    """
    sample = inputs("llava-siglip")
    del sample["pixel_values"]
    with pytest.raises(DiagnosticsError, match="the embedding of a placeholder"):
        record_sample(build("llava-siglip"), sample)


def test_hidden_states_that_overflow_are_refused() -> None:
    model = build("llava-siglip")
    with torch.no_grad():
        model.get_decoder().layers[1].mlp.down_proj.weight.fill_(torch.inf)
    with pytest.raises(DiagnosticsError, match=r"overflow in torch.float32: load the model with --dtype"):
        record_sample(model, inputs("llava-siglip"))


@pytest.mark.parametrize("implementation", ["eager", "varlen"])  # packed training uses "varlen"
def test_attention_other_than_sdpa_is_noted_and_not_measured(implementation: str) -> None:
    config = copy.deepcopy(FAMILIES["llava-siglip"].config)
    of_decoder = {"text_config": implementation}  # the vision encoder keeps sdpa
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=of_decoder).eval()
    record = record_sample(model, inputs("llava-siglip"))

    assert record.attention == {}
    assert measure_attention([record]) is None
    assert f"runs with {implementation}" in " ".join(record.notes)
