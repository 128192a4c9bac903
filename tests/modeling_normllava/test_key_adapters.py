"""Key adapters: what they compute, that every way to run the model tells them which tokens are visual, and loading."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from test_modeling_normllava import FRESH_PROCESS, prompt
from transformers import AutoProcessor, Phi3Config, Phi3Model

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from modeling_normllava.modeling_normllava import AdaptedKeyProjection, KeyAdapter
from training.compose import add_key_adapters


RANK, ALPHA = 4, 6.0
FAMILIES = ("qwen2", "qwen3", "llama", "gemma3")


def untrained(folder: Path) -> NormLlavaForConditionalGeneration:
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa")
    return add_key_adapters(model, RANK, ALPHA, dropout=0.0).eval()


def trained(folder: Path) -> NormLlavaForConditionalGeneration:
    """A model whose key adapters are at random, and large enough to tell in the logits."""
    model = untrained(folder)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".key_adapter." in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    for layer in model.model.language_model.layers:
        layer.self_attn.q_proj.weight.data *= 20  # attention of random models is all but even
    return model


@pytest.fixture
def model(composed: Callable[..., Path]) -> NormLlavaForConditionalGeneration:
    return trained(composed())


@pytest.fixture
def processor(composed: Callable[..., Path]) -> Any:
    return AutoProcessor.from_pretrained(composed())


def inputs_for(processor: Any, images: list[list[Image.Image]], texts: list[str]) -> dict[str, torch.Tensor]:
    prompts = [prompt(processor, len(of_row), text) for of_row, text in zip(images, texts, strict=True)]
    nested = images if any(images) else None
    return dict(processor(images=nested, text=prompts, padding=True, return_tensors="pt"))


@pytest.fixture
def batch(processor: Any, picture: Image.Image) -> dict[str, torch.Tensor]:
    """Padded on the left: a picture, two pictures, none."""
    other = picture.transpose(Image.Transpose.ROTATE_180)
    texts = ["Say.", "What is this picture of?", "A text alone."]
    return inputs_for(processor, [[picture], [picture, other], []], texts)


def by_formula(adapter: KeyAdapter, states: torch.Tensor, is_visual: torch.Tensor) -> torch.Tensor:
    """`(alpha / r) [m g_v B_v A_v h + (1 - m) g_t B_t A_t h]`, token by token."""
    updates = []
    for h, visual in zip(states.flatten(0, -2), is_visual.flatten(), strict=True):
        of = int(visual)
        gate = 1 / (1 + torch.exp(-(adapter.gate_weight[of] @ h + adapter.gate_bias[of])))
        updates.append(ALPHA / RANK * gate * (adapter.up[of].T @ (adapter.down[of] @ h)))
    return torch.stack(updates).reshape(*states.shape[:-1], -1)


class Watched:
    """What each `k_proj` was given, which tokens it took for visual, and what it made of them, call by call."""

    def __init__(self, model: NormLlavaForConditionalGeneration) -> None:
        self.calls: list[tuple[AdaptedKeyProjection, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for layer in model.model.language_model.layers:
            layer.self_attn.k_proj.register_forward_hook(self._see)

    def _see(self, projection: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.calls.append((projection, args[0], args[0].visual_token_mask, output))

    def check(self, expected: torch.Tensor) -> None:
        """All calls had this mask, and gave W h and the formula."""
        for projection, states, is_visual, keys in self.calls:
            assert torch.equal(is_visual, expected)
            update = by_formula(projection.key_adapter, states, expected)
            torch.testing.assert_close(keys, projection.base(states) + update, rtol=1e-4, atol=1e-4)
        assert self.calls


@pytest.mark.parametrize("text", FAMILIES)
def test_new_adapters_change_nothing(composed: Callable[..., Path], picture: Image.Image, text: str) -> None:
    folder = composed(text=text)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = inputs_for(processor, [[picture]], ["What?"])
    plain = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    assert not any("key_adapter" in name or ".k_proj.base." in name for name in plain.state_dict())
    expected = plain(**inputs).logits, plain.generate(**inputs, max_new_tokens=5, do_sample=False)
    adapted = add_key_adapters(plain, RANK, ALPHA, dropout=0.5)
    for training in (True, False):
        assert torch.equal(adapted.train(training)(**inputs).logits, expected[0])
    assert torch.equal(adapted.generate(**inputs, max_new_tokens=5, do_sample=False), expected[1])
    assert all(parameter.abs().max() > 0 for name, parameter in adapted.named_parameters() if name.endswith(".down"))


def test_keys_and_gradients_are_the_formulas(model: NormLlavaForConditionalGeneration) -> None:
    projection = model.double().model.language_model.layers[0].self_attn.k_proj
    states = torch.randn(2, 5, 32, dtype=torch.double, requires_grad=True)
    is_visual = torch.rand(2, 5) < 0.5
    states.visual_token_mask = is_visual
    leaves = [states, *projection.key_adapter.parameters()]
    found, expected = (
        projection(states),
        projection.base(states) + by_formula(projection.key_adapter, states, is_visual),
    )
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((keys * weights).sum(), leaves) for keys in (found, expected)]
    for ours, plain in zip(*gradients, strict=True):
        assert plain.abs().max() > 1e-3
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)


def test_dropout_stands_in_front_of_the_update_alone(model: NormLlavaForConditionalGeneration) -> None:
    adapter = model.model.language_model.layers[0].self_attn.k_proj.key_adapter.train()
    adapter.dropout.p = 0.5
    states, is_visual = torch.randn(1, 6, 32), torch.arange(6)[None] < 3
    torch.manual_seed(0)
    found = adapter(states, is_visual)
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(states, 0.5)
    gates = (states @ adapter.gate_weight.T + adapter.gate_bias).sigmoid()
    for number, of in enumerate(is_visual[0].int()):
        update = ALPHA / RANK * gates[0, number, of] * (dropped[0, number] @ adapter.down[of].T @ adapter.up[of])
        torch.testing.assert_close(found[0, number], update, rtol=1e-4, atol=1e-4)


def test_adapters_have_the_models_dtype_and_may_have_another(composed: Callable[..., Path]) -> None:
    plain = NormLlavaForConditionalGeneration.from_pretrained(composed(), dtype=torch.bfloat16)
    model = add_key_adapters(plain, RANK, ALPHA, dropout=0.0)
    adapters = [module for module in model.modules() if isinstance(module, KeyAdapter)]
    for adapter in adapters:
        assert {parameter.dtype for parameter in adapter.parameters()} == {torch.bfloat16}
        limit = 32**-0.5  # LoRA's for 32 inputs
        assert 0.9 * limit < adapter.down.abs().max() <= limit
        adapter.float()  # as in training, here without autocast
    states = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    states.visual_token_mask = torch.tensor([[1, 0, 0]])  # numbers too, as token types have them
    projection = model.model.language_model.layers[0].self_attn.k_proj
    torch.nn.init.normal_(projection.key_adapter.up)
    keys = projection(states)
    assert keys.dtype == torch.bfloat16
    update = by_formula(projection.key_adapter, states.float(), states.visual_token_mask)
    torch.testing.assert_close(keys.float(), projection.base(states).float() + update, rtol=0.02, atol=0.02)


def test_threads_do_not_see_each_others_tokens(model: NormLlavaForConditionalGeneration) -> None:
    attention = model.model.language_model.layers[0].self_attn
    first, second = torch.randn(2, 1, 4, 32)
    masks = torch.tensor([[True, False, False, False]]), torch.tensor([[False, True, True, True]])
    projection = attention.k_proj
    inside = []

    def interrupt(module: Any, args: Any) -> None:  # what another thread may do at any time
        if not inside:
            inside.append(True)
            positions = attention_arguments(model, second)
            attention(hidden_states=second, visual_token_mask=masks[1], **positions)

    hook = projection.register_forward_pre_hook(interrupt)
    watched = Watched(model)
    attention(hidden_states=first, visual_token_mask=masks[0], **attention_arguments(model, first))
    hook.remove()
    assert [call[2].tolist() for call in watched.calls] == [masks[1].tolist(), masks[0].tolist()]
    for projection, states, is_visual, keys in watched.calls:
        expected = projection.base(states) + by_formula(projection.key_adapter, states, is_visual)
        torch.testing.assert_close(keys, expected, rtol=1e-4, atol=1e-4)


def attention_arguments(model: NormLlavaForConditionalGeneration, states: torch.Tensor) -> dict[str, Any]:
    decoder = model.model.language_model
    positions = decoder.rotary_emb(states, torch.arange(states.shape[1])[None])
    return {"position_embeddings": positions, "attention_mask": None}


@pytest.mark.parametrize("text", FAMILIES)
def test_a_padded_batch_tells_visual_tokens(composed: Callable[..., Path], picture: Image.Image, text: str) -> None:
    folder = composed(text=text)
    model, processor = trained(folder), AutoProcessor.from_pretrained(folder)
    batch = inputs_for(processor, [[picture], [picture, picture], []], ["Say.", "What is this picture of?", "Text."])
    watched = Watched(model)
    with torch.no_grad():
        model(**batch)
    is_visual = batch["input_ids"] == model.config.image_token_id
    assert is_visual.sum(1).tolist() == [4, 8, 0]
    watched.check(is_visual)


def test_other_ways_to_call_it(model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]) -> None:
    input_ids, pixel_values = batch["input_ids"], batch["pixel_values"]
    is_visual = input_ids == model.config.image_token_id
    embeddings = model.get_input_embeddings()(input_ids)
    attention = {"attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state
        encoded = {"image": model.get_image_features(pixel_values, return_dict=True)}
        merged = embeddings.masked_scatter(is_visual[..., None], torch.cat(encoded["image"].pooler_output))
        mask = {"visual_token_mask": is_visual}
        for found in (
            model.model(input_ids, pixel_values, **attention),
            model.model(inputs_embeds=embeddings, pixel_values=pixel_values, **attention),
            model.model(input_ids=input_ids, mm_encoder_outputs=encoded, **attention),
            model.model(inputs_embeds=merged, **attention, **mask),
            model.model.language_model(inputs_embeds=merged, **attention, **mask),
        ):
            torch.testing.assert_close(found.last_hidden_state, expected)
        # Placeholders into which nothing is put are text, like the tokens of a chat that was answered before.
        watched = Watched(model)
        model(input_ids=input_ids, **attention)
    watched.check(torch.zeros_like(is_visual))
    for wrong in ({}, {"visual_token_mask": is_visual[:, 1:]}):
        with pytest.raises(ValueError, match=r"call the NormLlava model, or give .* visual_token_mask, .* \(3, \d+\)"):
            model.model.language_model(inputs_embeds=merged, **wrong)


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
    model: NormLlavaForConditionalGeneration, processor: Any, batch: dict[str, torch.Tensor]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}
    # Not with beams: transformers 5.18 loses the pictures of any Llava in beam search without a cache.
    alone = model.generate(**batch, **options, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(**batch, **options, do_sample=False), alone)
    for search in ({}, {"num_beams": 3}):
        expected = model.generate(**batch, **options, **search, do_sample=False)
        static = model.generate(**batch, **options, **search, do_sample=False, cache_implementation="static")
        assert torch.equal(static, expected)
    plain = copy.deepcopy(model)
    for name, parameter in plain.named_parameters():
        if name.endswith("key_adapter.up"):
            parameter.data.zero_()
    assert not torch.equal(plain(**batch).logits, model(**batch).logits)  # the copy has adapters of its own


def test_what_is_generated_is_text(model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]) -> None:
    image_token = model.config.image_token_id
    with torch.no_grad():
        first = model(**batch, use_cache=True)
        watched = Watched(model)
        attention_mask = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
        drawn = torch.full((3, 1), image_token)  # as a model may, which has a row for it
        model(input_ids=drawn, attention_mask=attention_mask, past_key_values=first.past_key_values)
    watched.check(torch.zeros(3, 1, dtype=torch.bool))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("text", ["qwen2", "qwen3"])
def test_gradients_are_alike_with_checkpointing(
    composed: Callable[..., Path], picture: Image.Image, text: str, use_reentrant: bool
) -> None:
    folder = composed(text=text)
    model, processor = trained(folder).train(), AutoProcessor.from_pretrained(folder)
    for layer in model.model.language_model.layers:
        layer.self_attn.k_proj.key_adapter.dropout.p = 0.3
    first = inputs_for(processor, [[picture], []], ["What is this picture of?", "Text."])
    second = {**first, "input_ids": first["input_ids"].flip(1), "attention_mask": first["attention_mask"].flip(1)}

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        # Both forward passes before the backward pass: neither must see the other's tokens.
        (model(**first, labels=first["input_ids"]).loss + model(**second, labels=second["input_ids"]).loss).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    actual = gradients()
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert ".key_adapter." not in name or gradient.abs().amax(-1).min() > 0, name  # of either modality
        torch.testing.assert_close(actual[name], gradient, msg=name)


def test_the_compiled_model_gives_the_same(
    model: NormLlavaForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> None:
    model(**batch)  # transformers puts its hooks into the vision encoder in the first pass, under a lock
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)
        text = {"input_ids": batch["input_ids"][2:], "attention_mask": batch["attention_mask"][2:]}
        torch.testing.assert_close(compiled(**text).logits, model(**text).logits)


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


def test_a_checkpoint_loads_with_its_own_rank_alone(
    model: NormLlavaForConditionalGeneration, composed: Callable[..., Path], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Weights missing: \d+ of language_model, first .*k_proj\.bias"):
        NormLlavaForConditionalGeneration.from_pretrained(tmp_path, key_adapter_rank=0)
    with pytest.raises(ValueError, match=r"Weights missing: \d+ of language_model, first .*k_proj\.base\.bias"):
        NormLlavaForConditionalGeneration.from_pretrained(composed(), key_adapter_rank=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key_adapter_rank": -1}, "key_adapter_rank must be 0 or more"),
        ({"key_adapter_alpha": 0.0}, "key_adapter_alpha must be a finite number above 0"),
        ({"key_adapter_dropout": 1.0}, "key_adapter_dropout must be at least 0 and below 1"),
    ],
)
def test_wrong_config_values_fail_at_construction(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        NormLlavaConfig(**wrong)


def test_decoders_that_cannot_have_them(model: NormLlavaForConditionalGeneration) -> None:
    fused = Phi3Model(
        Phi3Config(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            vocab_size=64,
            pad_token_id=0,
        )
    )
    config = NormLlavaConfig(
        vision_config=model.config.vision_config, text_config=fused.config, image_token_index=3, key_adapter_rank=4
    )
    with pytest.raises(ValueError, match=r"layers have a linear self_attn.k_proj; those of Phi3Model have none"):
        NormLlavaForConditionalGeneration(config, language_model=fused)
