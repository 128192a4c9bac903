"""One forward pass through hooks: every family, against transformers' own outputs; and a model set by hand."""

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from diagnostics.attention_call import before_rotation
from diagnostics.measures import measure_attention, measure_interface, measure_layers
from diagnostics.norms import vocabulary_norms
from diagnostics.parts import DiagnosticsError, find_decoder
from diagnostics.probe import Probe, Record
from diagnostics.table import Summary
from families import FAMILIES, IMAGE, build, inputs, record_sample, tokens_of


Inputs = dict[str, torch.Tensor]
# What the projector returns does not enter the decoder as it is: a newline feature, scaling, tiles put together.
CHANGED_AFTER_PROJECTOR = ("llava_next", "llava_onevision", "paligemma")
# Of the model that is set by hand.
VISUAL_NORM, UPDATE = 40.0, 3.0
TEXT_NORMS = (2.0, 6.0)  # of even and of odd token ids
# A layer that is no attention.
WITHOUT_KEYS = {"lfm2_vl": 1, "qwen3_5": 1}


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


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_are_what_is_rotated_and_values_what_attention_gets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what the family's own function for rotary embedding is given, and against what transformers' sdpa is."""
    model, sample = build(name), inputs(name, padding=3)
    record, layers = record_sample(model, sample), find_decoder(model).layers
    rotated: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def clear(*of: object) -> None:  # of what the vision encoder did
        rotated.clear()
        values.clear()

    layers[0].register_forward_pre_hook(clear)
    source = sys.modules[type(layers[0]).__module__]

    def see(*args: Any, rotate: Callable[..., Any], **kwargs: Any) -> Any:
        given = [of for of in (*args, *kwargs.values()) if isinstance(of, torch.Tensor) and of.ndim == 4]
        rotated.extend(of[0] for of in given if len(of) == 1)
        return rotate(*args, **kwargs)

    for function in re.findall(r"\bapply_\w*rotary\w*", " ".join(dir(source))):
        monkeypatch.setattr(source, function, partial(see, rotate=getattr(source, function)))
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(*args: Any, **kwargs: Any) -> Any:  # module, query, key, value, mask
        values.append(args[3][0])
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    with torch.no_grad():
        model(**sample)
    assert list(record.keys) == list(record.values) == [n for n in range(3) if n != WITHOUT_KEYS.get(name)]
    for found, key, value in zip(record.keys.items(), rotated[1::2], values, strict=True):  # queries come first
        number, keys = found
        assert torch.equal(keys, key if key.shape == keys.shape else key.transpose(0, 1))
        assert torch.equal(record.values[number], value)
    said = [note[:15] for note in record.notes if "deepstack" not in note]
    assert said == ["keys of layer 1"] * (name in WITHOUT_KEYS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_are_not_rotated_are_no_keys(dtype: torch.dtype) -> None:
    """Rotation, of all dimensions or some, keeps norms: a norm behind it, or another projection, doesn't."""
    torch.manual_seed(0)
    keys, other = torch.randn(2, 2, 12, 8).to(dtype)  # [num_heads, S, head_dim]
    angles = torch.arange(12)[:, None] / 10 ** torch.arange(2)
    first, second, rest = keys.float().split([2, 2, 4], dim=-1)
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin(), rest]
    rotated = torch.cat(turned, dim=-1).to(dtype)
    for returned in (keys, keys.transpose(0, 1), keys.transpose(0, 1).flatten(1)):
        assert torch.equal(before_rotation(returned, rotated), keys)
    for returned in (other, 1.1 * keys, keys[:1], None):
        assert before_rotation(returned, rotated) is None


class AddUpdate(nn.Module):
    """A decoder layer that adds the same update to every token, across it."""

    attention_type = "full_attention"

    def __init__(self, direction: int) -> None:
        super().__init__()
        self.direction = direction

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update = torch.zeros_like(hidden_states)
        update[..., self.direction] = UPDATE
        return hidden_states + update


@torch.no_grad()
def set_by_hand(model: PreTrainedModel) -> PreTrainedModel:
    """Visual tokens of norm 40 and text tokens of norm 2 or 6 along axis 0; layer n adds 3 along axis n + 1."""
    projector = model.model.multi_modal_projector
    projector.linear_2.weight.zero_()
    projector.linear_2.bias.zero_()
    projector.linear_2.bias[0] = VISUAL_NORM
    embeddings = model.get_input_embeddings().weight
    embeddings.zero_()
    for parity, norm in enumerate(TEXT_NORMS):
        embeddings[10 + parity :: 2, 0] = norm  # rows below stay zero, as in a padded table
    decoder = model.get_decoder()
    decoder.layers = nn.ModuleList(AddUpdate(number + 1) for number in range(len(decoder.layers)))
    return model


def test_a_model_set_by_hand_gives_the_numbers_on_paper() -> None:
    model, sample = set_by_hand(build("llava-siglip")), inputs("llava-siglip")
    record = record_sample(model, sample)
    text_norms = np.array([TEXT_NORMS[int(token) % 2] for token in sample["input_ids"][0][record.tokens.text]])
    assert 0 < (text_norms == TEXT_NORMS[0]).mean() < 0.5  # so that mean and median are two things
    visual_norms = np.full(16, VISUAL_NORM)
    measured = measure_interface([record] * 2, vocabulary_norms(model)), measure_layers([record] * 2)
    summary = Summary.of(pd.concat(measured))
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


def test_hooks_are_gone_after_a_failure() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    with pytest.raises(RuntimeError, match="stop"), Probe(model, sample, tokens_of(model, sample)):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.get_decoder().config._attn_implementation == "sdpa"


def test_pictures_that_reach_the_decoder_otherwise_are_refused() -> None:
    """As Mllama's do, by cross-attention: its `input_ids` hold a placeholder."""
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    del sample["pixel_values"]
    with pytest.raises(DiagnosticsError, match="the embedding of a placeholder"):
        record_sample(model, sample)


def test_an_overflow_is_said() -> None:
    model, sample = build("llava-siglip"), inputs("llava-siglip")
    with torch.no_grad():
        model.get_decoder().layers[1].mlp.down_proj.weight.fill_(torch.inf)
    with pytest.raises(DiagnosticsError, match=r"overflow in torch.float32: load the model with --dtype"):
        record_sample(model, sample)


@pytest.mark.parametrize("attention", ["eager", "varlen"])  # "varlen" is that of packed training
def test_another_attention_is_said_and_not_measured(attention: str) -> None:
    config = copy.deepcopy(FAMILIES["llava-siglip"].config)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation={"text_config": attention}).eval()
    record: Record = record_sample(model, inputs("llava-siglip"))
    assert record.attention == {}
    assert measure_attention([record]) is None
    assert any(f"runs with {attention}" in note for note in record.notes)
