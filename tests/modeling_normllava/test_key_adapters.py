"""Key adapters compute their formula, get the mask of image tokens in every call, and can be saved and loaded."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_modeling_normllava import RELOADING_PROGRAM, inputs_for
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_normllava import (
    NormLlavaConfig,
    NormLlavaForConditionalGeneration,
    NormLlavaKeyAdapterConfig,
    NormLlavaKeyAdapterForConditionalGeneration,
)
from modeling_normllava.key_adapters import KeyAdapter
from training.add_key_adapters import add_key_adapters, main


# Settings of the key adapters.
RANK = 4
ALPHA = 6.0
# Families of language models.
FAMILIES = ("qwen2", "gemma3")


def load_with_random_adapters(folder: Path) -> NormLlavaForConditionalGeneration:
    """Load a model, and add key adapters with random weights so large that the logits show their effect."""
    model = NormLlavaForConditionalGeneration.from_pretrained(folder)
    model = add_key_adapters(model, RANK, ALPHA, dropout=0.0).eval()

    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".key_adapter." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    # A random model attends to all tokens almost alike. With larger queries the keys matter.
    for layer in model.model.language_model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    return model


@pytest.fixture
def model(make_model_folder: Callable[..., Path]) -> NormLlavaForConditionalGeneration:
    return load_with_random_adapters(make_model_folder())


@pytest.fixture
def processor(make_model_folder: Callable[..., Path]) -> Any:
    return AutoProcessor.from_pretrained(make_model_folder())


@pytest.fixture
def batch(processor: Any, picture: Image.Image) -> dict[str, torch.Tensor]:
    """Three prompts, padded on the left: with a picture, with two pictures and with none."""
    turned_picture = picture.transpose(Image.Transpose.ROTATE_180)
    texts = ["Say.", "What is this picture of?", "A text alone."]
    return inputs_for(processor, [[picture], [picture, turned_picture], []], texts)


def updates_by_formula(adapter: KeyAdapter, states: torch.Tensor, is_image_token: torch.Tensor) -> torch.Tensor:
    """The updates `(alpha / rank) * g_m * B_m A_m h` of keys, computed token by token.

    Args:
        adapter: The key adapter, with the parameters of both modalities.
        states: The hidden states, `(batch_size, sequence_length, hidden_size)`.
        is_image_token: Boolean, `(batch_size, sequence_length)`.
    """
    updates = []
    for h, is_image in zip(states.flatten(0, 1), is_image_token.flatten(), strict=True):
        m = int(is_image)  # the modality: 0 for text, 1 for image
        gate = 1 / (1 + torch.exp(-(adapter.gate_weight[m] @ h + adapter.gate_bias[m])))
        low_rank = adapter.down[m] @ h  # A_m h
        up = adapter.up[m].T  # B_m, which the adapter stores transposed
        updates.append(ALPHA / RANK * gate * (up @ low_rank))
    batch_size, sequence_length, _ = states.shape
    return torch.stack(updates).reshape(batch_size, sequence_length, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_change_nothing(
    make_model_folder: Callable[..., Path], picture: Image.Image, family: str
) -> None:
    folder = make_model_folder(text=family)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = inputs_for(processor, [[picture]], ["What?"])
    plain_model = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    logits = plain_model(**inputs).logits
    answer = plain_model.generate(**inputs, max_new_tokens=5, do_sample=False)

    adapted_model = add_key_adapters(plain_model, RANK, ALPHA, dropout=0.5)
    adapted_model.train()
    assert torch.equal(adapted_model(**inputs).logits, logits)
    adapted_model.eval()
    assert torch.equal(adapted_model(**inputs).logits, logits)
    assert torch.equal(adapted_model.generate(**inputs, max_new_tokens=5, do_sample=False), answer)


def test_the_matrix_a_of_new_adapters_is_not_zero(make_model_folder: Callable[..., Path]) -> None:
    """With A and B both zero, neither would get a gradient."""
    plain_model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
    adapted_model = add_key_adapters(plain_model, RANK, ALPHA, dropout=0.0)
    for layer in adapted_model.model.language_model.layers:
        assert layer.self_attn.k_proj.key_adapter.down.abs().max() > 0


def test_a_checkpoint_without_adapters_is_refused(make_model_folder: Callable[..., Path]) -> None:
    """Otherwise the adapters' weights would be uninitialised."""
    fields = NormLlavaConfig.from_pretrained(make_model_folder()).to_dict()
    del fields["model_type"]  # NormLlavaKeyAdapterConfig has its own
    config = NormLlavaKeyAdapterConfig(**fields)
    with pytest.raises(ValueError, match=r"Weights missing: .* of language_model"):
        NormLlavaKeyAdapterForConditionalGeneration.from_pretrained(make_model_folder(), config=config)


def test_keys_and_gradients_follow_the_formula(model: NormLlavaForConditionalGeneration) -> None:
    projection = model.double().model.language_model.layers[0].self_attn.k_proj
    states = torch.randn(2, 5, 32, dtype=torch.double, requires_grad=True)  # the decoder's hidden_size is 32
    is_image_token = torch.rand(2, 5) < 0.5
    states.visual_token_mask = is_image_token  # as the hook `hand_over_mask` sets it in a model
    keys = projection(states)
    expected_keys = projection.base(states) + updates_by_formula(projection.key_adapter, states, is_image_token)
    torch.testing.assert_close(keys, expected_keys, rtol=1e-13, atol=1e-13)

    grad_output = torch.randn_like(keys)
    inputs = [states, *projection.key_adapter.parameters()]
    gradients = torch.autograd.grad(keys, inputs, grad_output)
    expected_gradients = torch.autograd.grad(expected_keys, inputs, grad_output)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.abs().max() > 1e-3  # so large that a wrong gradient would show
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_has_its_image_tokens_marked(
    make_model_folder: Callable[..., Path], picture: Image.Image, family: str
) -> None:
    folder = make_model_folder(text=family)
    model = load_with_random_adapters(folder)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = inputs_for(processor, [[picture], [picture, picture], []], ["Say.", "What is this picture of?", "Text."])
    is_image_token = inputs["input_ids"] == model.config.image_token_id
    assert is_image_token.sum(1).tolist() == [4, 8, 0]  # 4 image tokens for each picture

    calls: list[Any] = []  # (module, arguments, output) of each call of a `k_proj`
    layers = model.model.language_model.layers
    for layer in layers:
        layer.self_attn.k_proj.register_forward_hook(lambda *call: calls.append(call))
    with torch.no_grad():
        model(**inputs)
    assert len(calls) == len(layers)
    for projection, (states,), keys in calls:
        assert torch.equal(states.visual_token_mask, is_image_token)
        expected_keys = projection.base(states) + updates_by_formula(projection.key_adapter, states, is_image_token)
        torch.testing.assert_close(keys, expected_keys, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_all_ways_to_give_pictures_and_tokens_give_the_same_states(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    expected = model.model(**batch).last_hidden_state
    input_ids = batch["input_ids"]
    pixel_values = batch["pixel_values"]
    attention = {"attention_mask": batch["attention_mask"]}
    is_image_token = input_ids == model.config.image_token_id
    mask = {"visual_token_mask": is_image_token}

    # The same steps as in the model before it calls the decoder.
    text_embeddings = model.get_input_embeddings()(input_ids)
    encoder_outputs = {"image": model.get_image_features(pixel_values, return_dict=True)}
    image_embeddings = torch.cat(encoder_outputs["image"].pooler_output)  # [num_image_tokens, hidden_size]
    all_embeddings = text_embeddings.masked_scatter(is_image_token[..., None], image_embeddings)

    for output in (
        model.model(input_ids, pixel_values, **attention),
        model.model(inputs_embeds=text_embeddings, pixel_values=pixel_values, **attention, **mask),
        model.model(input_ids=input_ids, mm_encoder_outputs=encoder_outputs, **attention),
        model.model(inputs_embeds=all_embeddings, **attention, **mask),
        model.model.language_model(inputs_embeds=all_embeddings, **attention, **mask),
    ):
        torch.testing.assert_close(output.last_hidden_state, expected)


@torch.no_grad()
def test_in_a_call_without_pictures_all_tokens_are_text(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    input_ids = batch["input_ids"]
    attention = {"attention_mask": batch["attention_mask"]}
    all_text = {"visual_token_mask": torch.zeros_like(input_ids, dtype=torch.bool)}
    embeddings = model.get_input_embeddings()(input_ids)
    expected = model.model(inputs_embeds=embeddings, **attention, **all_text).last_hidden_state
    without_pictures = model.model(input_ids=input_ids, **attention).last_hidden_state
    torch.testing.assert_close(without_pictures, expected)


def test_embeddings_without_a_fitting_mask_are_refused(model: NormLlavaForConditionalGeneration) -> None:
    embeddings = torch.randn(3, 7, 32)
    too_short_mask = torch.zeros(3, 6, dtype=torch.bool)
    message = r"call the NormLlava model .* visual_token_mask, .* \(3, 7\)"
    with pytest.raises(ValueError, match=message):
        model.model.language_model(inputs_embeds=embeddings)
    with pytest.raises(ValueError, match=message):
        model.model.language_model(inputs_embeds=embeddings, visual_token_mask=too_short_mask)


def test_packed_rows_give_the_logits_of_separate_rows(
    model: NormLlavaForConditionalGeneration, processor: Any, picture: Image.Image
) -> None:
    """A packed sequence holds several rows one after the other, and its positions begin at 0 in each row."""
    rows = [inputs_for(processor, [images], ["What?"]) for images in ([picture], [], [picture, picture])]
    positions = [torch.arange(row["input_ids"].shape[1]) for row in rows]
    packed = {
        "input_ids": torch.cat([row["input_ids"] for row in rows], dim=1),
        "position_ids": torch.cat(positions)[None],  # [1, sequence_length]
        "pixel_values": torch.cat([row["pixel_values"] for row in rows if "pixel_values" in row]),
    }
    with torch.no_grad():
        expected = torch.cat([model(**row).logits for row in rows], dim=1)
        logits = model(**packed, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_generation_is_the_same_with_and_without_a_cache(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    """Beam search isn't compared: in transformers 5.18 it loses the pictures of any Llava if there is no cache."""
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    without_cache = model.generate(**batch, **options, use_cache=False)
    with_cache = model.generate(**batch, **options)
    assert torch.equal(with_cache, without_cache)


def test_a_static_cache_gives_the_same_answers(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for num_beams in (1, 3):
        expected = model.generate(**batch, **options, num_beams=num_beams)
        with_static_cache = model.generate(**batch, **options, num_beams=num_beams, cache_implementation="static")
        assert torch.equal(with_static_cache, expected)


def test_gradients_are_the_same_with_checkpointing(
    model: NormLlavaForConditionalGeneration, processor: Any, picture: Image.Image
) -> None:
    model.train()
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.key_adapter.dropout.p = 0.3
    batch = inputs_for(processor, [[picture], []], ["What is this picture of?", "Text."])
    # The same sequences backwards, so that their image tokens have other positions.
    reversed_batch = dict(batch)
    for name in ("input_ids", "attention_mask"):
        reversed_batch[name] = batch[name].flip(1)

    def compute_gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)  # the same dropout each time
        # Both forward passes come before the backward pass, in which checkpointing computes the layers of both again,
        # each with the mask of its own forward pass.
        loss = model(**batch, labels=batch["input_ids"]).loss
        reversed_loss = model(**reversed_batch, labels=reversed_batch["input_ids"]).loss
        (loss + reversed_loss).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = compute_gradients()
    model.gradient_checkpointing_enable()
    with_checkpointing = compute_gradients()
    assert with_checkpointing.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(with_checkpointing[name], gradient, msg=name)

    # Both modalities have been used: in each adapter's gradients, no vector along the last dimension is zero.
    for name, gradient in expected.items():
        if ".key_adapter." in name:
            assert gradient.any(dim=-1).all(), name


def test_a_saved_folder_loads_without_this_repository(
    model: NormLlavaForConditionalGeneration, processor: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "saved")
    processor.save_pretrained(tmp_path / "saved")
    command = [sys.executable, "-c", RELOADING_PROGRAM, str(tmp_path / "saved"), str(tmp_path / "again")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # The picture and the question are those of the program.
    inputs = inputs_for(processor, [[Image.new("RGB", (40, 30), (10, 200, 30))]], ["What?"])
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, torch.load(tmp_path / "again" / "logits.pt"))


def test_the_command_adds_adapters_and_changes_no_weight(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    start = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(), dtype=torch.bfloat16)
    start.save_pretrained(tmp_path / "start")
    AutoProcessor.from_pretrained(make_model_folder()).save_pretrained(tmp_path / "start")

    options = [
        f"--model={tmp_path / 'start'}",
        "--rank=4",
        "--alpha=6",
        "--dropout=0.1",
        "--seed=7",
        f"--output_dir={tmp_path / 'adapted'}",
    ]
    main(options)
    assert {path.name for path in (tmp_path / "adapted").glob("*.py")} == {
        "configuration_normllava.py", "key_adapters.py", "modeling_normllava.py"
    }  # fmt: skip

    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapted", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.key_adapter_alpha == 6
    assert model.config.key_adapter_dropout == 0.1
    # The weights of k_proj in `start` are those of k_proj.base in `model`.
    weights = {name.replace("k_proj.base.", "k_proj."): weight for name, weight in model.state_dict().items()}
    for name, weight in start.state_dict().items():
        assert torch.equal(weights[name], weight)
