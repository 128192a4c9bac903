"""Key adapters: what they compute, that they get the image tokens however the model is called, and loading."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_modeling_normllava import FRESH_PROCESS, inputs_for
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_normllava import (
    NormLlavaConfig,
    NormLlavaForConditionalGeneration,
    NormLlavaKeyAdapterConfig,
    NormLlavaKeyAdapterForConditionalGeneration,
)
from modeling_normllava.key_adapters import KeyAdapter
from training.add_key_adapters import add_key_adapters, main


RANK = 4
ALPHA = 6.0
FAMILIES = ("qwen2", "gemma3")


def with_random_adapters(folder: Path) -> NormLlavaForConditionalGeneration:
    """A model whose key adapters have random weights, so large that the logits show them."""
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa")
    model = add_key_adapters(model, RANK, ALPHA, dropout=0.0).eval()

    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".key_adapter." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    for layer in model.model.language_model.layers:
        # A random model attends to all tokens almost alike, so that its keys hardly matter.
        layer.self_attn.q_proj.weight.data *= 20
    return model


@pytest.fixture
def model(composed: Callable[..., Path]) -> NormLlavaForConditionalGeneration:
    return with_random_adapters(composed())


@pytest.fixture
def processor(composed: Callable[..., Path]) -> Any:
    return AutoProcessor.from_pretrained(composed())


@pytest.fixture
def batch(processor: Any, picture: Image.Image) -> dict[str, torch.Tensor]:
    """Three rows, padded on the left: with a picture, with two pictures and with none."""
    other = picture.transpose(Image.Transpose.ROTATE_180)
    texts = ["Say.", "What is this picture of?", "A text alone."]
    return inputs_for(processor, [[picture], [picture, other], []], texts)


def by_formula(adapter: KeyAdapter, states: torch.Tensor, is_image_token: torch.Tensor) -> torch.Tensor:
    """The updates `(alpha / r) g_m B_m A_m h` of hidden states `h`, token by token."""
    updates = []
    for h, is_image in zip(states.flatten(0, -2), is_image_token.flatten(), strict=True):
        m = int(is_image)  # the modality
        gate = 1 / (1 + torch.exp(-(adapter.gate_weight[m] @ h + adapter.gate_bias[m])))
        updates.append(ALPHA / RANK * gate * (adapter.up[m].T @ (adapter.down[m] @ h)))
    return torch.stack(updates).reshape(*states.shape[:-1], -1)


@pytest.mark.parametrize("text", FAMILIES)
def test_new_adapters_change_nothing(composed: Callable[..., Path], picture: Image.Image, text: str) -> None:
    folder = composed(text=text)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = inputs_for(processor, [[picture]], ["What?"])
    plain = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    logits = plain(**inputs).logits
    answer = plain.generate(**inputs, max_new_tokens=5, do_sample=False)

    adapted = add_key_adapters(plain, RANK, ALPHA, dropout=0.5)
    assert torch.equal(adapted.train()(**inputs).logits, logits)
    assert torch.equal(adapted.eval()(**inputs).logits, logits)
    assert torch.equal(adapted.generate(**inputs, max_new_tokens=5, do_sample=False), answer)


def test_a_new_adapters_a_is_not_zero(composed: Callable[..., Path]) -> None:
    """With A and B both zero, neither would get a gradient."""
    plain = NormLlavaForConditionalGeneration.from_pretrained(composed())
    adapted = add_key_adapters(plain, RANK, ALPHA, dropout=0.0)
    for layer in adapted.model.language_model.layers:
        assert layer.self_attn.k_proj.key_adapter.down.abs().max() > 0


def test_a_checkpoint_without_adapters_is_refused(composed: Callable[..., Path]) -> None:
    """Their weights would not be initialised."""
    fields = NormLlavaConfig.from_pretrained(composed()).to_dict()
    del fields["model_type"]
    config = NormLlavaKeyAdapterConfig(**fields)
    with pytest.raises(ValueError, match=r"Weights missing: .* of language_model"):
        NormLlavaKeyAdapterForConditionalGeneration.from_pretrained(composed(), config=config)


def test_keys_and_gradients_are_the_formulas(model: NormLlavaForConditionalGeneration) -> None:
    projection = model.double().model.language_model.layers[0].self_attn.k_proj
    states = torch.randn(2, 5, 32, dtype=torch.double, requires_grad=True)
    is_image_token = torch.rand(2, 5) < 0.5
    states.visual_token_mask = is_image_token
    keys = projection(states)
    expected = projection.base(states) + by_formula(projection.key_adapter, states, is_image_token)
    torch.testing.assert_close(keys, expected, rtol=1e-13, atol=1e-13)

    weights = torch.randn_like(keys)
    leaves = [states, *projection.key_adapter.parameters()]
    gradients = torch.autograd.grad((keys * weights).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("text", FAMILIES)
def test_a_padded_batch_tells_image_tokens(composed: Callable[..., Path], picture: Image.Image, text: str) -> None:
    folder = composed(text=text)
    model = with_random_adapters(folder)
    processor = AutoProcessor.from_pretrained(folder)
    batch = inputs_for(processor, [[picture], [picture, picture], []], ["Say.", "What is this picture of?", "Text."])
    is_image_token = batch["input_ids"] == model.config.image_token_id
    assert is_image_token.sum(1).tolist() == [4, 8, 0]

    calls: list[Any] = []  # module, arguments and output of each call
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda *call: calls.append(call))
    with torch.no_grad():
        model(**batch)
    assert len(calls) == len(model.model.language_model.layers)
    for projection, (states,), keys in calls:
        assert torch.equal(states.visual_token_mask, is_image_token)
        expected = projection.base(states) + by_formula(projection.key_adapter, states, is_image_token)
        torch.testing.assert_close(keys, expected, rtol=1e-4, atol=1e-4)


def test_other_ways_to_call_the_model(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    input_ids = batch["input_ids"]
    pixel_values = batch["pixel_values"]
    attention = {"attention_mask": batch["attention_mask"]}
    is_image_token = input_ids == model.config.image_token_id
    mask = {"visual_token_mask": is_image_token}
    embeddings = model.get_input_embeddings()(input_ids)
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state
        encoded = {"image": model.get_image_features(pixel_values, return_dict=True)}
        merged = embeddings.masked_scatter(is_image_token[..., None], torch.cat(encoded["image"].pooler_output))
        for output in (
            model.model(input_ids, pixel_values, **attention),
            model.model(inputs_embeds=embeddings, pixel_values=pixel_values, **attention, **mask),
            model.model(input_ids=input_ids, mm_encoder_outputs=encoded, **attention),
            model.model(inputs_embeds=merged, **attention, **mask),
            model.model.language_model(inputs_embeds=merged, **attention, **mask),
        ):
            torch.testing.assert_close(output.last_hidden_state, expected)

        # Without a picture, ids of image tokens are text.
        no_image = {"visual_token_mask": torch.zeros_like(is_image_token)}
        as_text = model.model(inputs_embeds=embeddings, **attention, **no_image)
        without_picture = model.model(input_ids=input_ids, **attention)
        torch.testing.assert_close(without_picture.last_hidden_state, as_text.last_hidden_state)

    no_mask: dict[str, torch.Tensor] = {}
    short_mask = {"visual_token_mask": is_image_token[:, 1:]}
    for wrong_mask in (no_mask, short_mask):
        with pytest.raises(ValueError, match=r"call the NormLlava model .* visual_token_mask, .* \(3, \d+\)"):
            model.model.language_model(inputs_embeds=merged, **wrong_mask)


def test_packed_rows_are_as_separate_ones(
    model: NormLlavaForConditionalGeneration, processor: Any, picture: Image.Image
) -> None:
    rows = [inputs_for(processor, [images], ["What?"]) for images in ([picture], [], [picture, picture])]
    packed = {
        "input_ids": torch.cat([row["input_ids"] for row in rows], dim=1),
        "position_ids": torch.cat([torch.arange(row["input_ids"].shape[1]) for row in rows])[None],
        "pixel_values": torch.cat([row["pixel_values"] for row in rows if "pixel_values" in row]),
    }
    with torch.no_grad():
        separate = torch.cat([model(**row).logits for row in rows], dim=1)
        torch.testing.assert_close(model(**packed, use_cache=False).logits, separate, rtol=1e-4, atol=1e-4)


def test_generation_with_a_cache_is_generation_without(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}
    # Beam search isn't compared: without a cache, transformers 5.18 loses the pictures of any Llava in it.
    without_cache = model.generate(**batch, **options, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(**batch, **options, do_sample=False), without_cache)


def test_a_static_cache_gives_the_same_answers(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}
    for search in ({}, {"num_beams": 3}):
        expected = model.generate(**batch, **options, **search, do_sample=False)
        static = model.generate(**batch, **options, **search, do_sample=False, cache_implementation="static")
        assert torch.equal(static, expected)


def test_gradients_are_alike_with_checkpointing(
    model: NormLlavaForConditionalGeneration, processor: Any, picture: Image.Image
) -> None:
    model.train()
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.key_adapter.dropout.p = 0.3
    first = inputs_for(processor, [[picture], []], ["What is this picture of?", "Text."])
    # The same batch backwards, so that its image tokens are at other places.
    second = first | {"input_ids": first["input_ids"].flip(1), "attention_mask": first["attention_mask"].flip(1)}

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        # Both forward passes come before the backward pass, which must not take one's mask for the other's.
        first_loss = model(**first, labels=first["input_ids"]).loss
        second_loss = model(**second, labels=second["input_ids"]).loss
        (first_loss + second_loss).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients()
    model.gradient_checkpointing_enable()
    checkpointed = gradients()
    assert checkpointed.keys() == expected.keys()
    for name, gradient in expected.items():
        if ".key_adapter." in name:
            assert gradient.abs().amax(-1).min() > 0, name  # each row, of text and of image tokens, has a gradient
        torch.testing.assert_close(checkpointed[name], gradient, msg=name)


def test_a_saved_folder_loads_without_this_repository(
    model: NormLlavaForConditionalGeneration, processor: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "saved")
    processor.save_pretrained(tmp_path / "saved")
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "saved"), str(tmp_path / "again")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    inputs = inputs_for(processor, [[Image.new("RGB", (40, 30), (10, 200, 30))]], ["What?"])
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, torch.load(tmp_path / "again" / "logits.pt"))


def test_the_command_adds_adapters_and_changes_no_weight(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16)
    start.save_pretrained(tmp_path / "start")
    AutoProcessor.from_pretrained(composed()).save_pretrained(tmp_path / "start")

    options = ["--model", tmp_path / "start", "--rank", 4, "--alpha", 6, "--dropout", 0.1, "--seed", 7]
    monkeypatch.setattr(sys, "argv", ["add", *map(str, options), "--output_dir", str(tmp_path / "keys")])
    main()
    assert {path.name for path in (tmp_path / "keys").glob("*.py")} == {
        "configuration_normllava.py", "key_adapters.py", "modeling_normllava.py"
    }  # fmt: skip

    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "keys", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.key_adapter_alpha == 6
    assert model.config.key_adapter_dropout == 0.1
    weights = {name.replace("k_proj.base.", "k_proj."): weight for name, weight in model.state_dict().items()}
    for name, weight in start.state_dict().items():
        assert torch.equal(weights[name], weight)
