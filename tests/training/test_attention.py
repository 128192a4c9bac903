"""Attention "varlen" computes what sdpa does, calls the kernel with the right arguments, and refuses what it can't."""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    NemotronConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    set_seed,
)

from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import collate
from training.arguments import RunArguments, TrainingConfig
from training.attention import attend_by_kernel, default_attention, kernel_supports
from training.loading import load_base


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "vocab_size": 320,
}  # fmt: skip
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# Qwen2's and Gemma3's layers have a window that is shorter than the longest samples, or none.
DECODERS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=GEMMA3_LAYERS),
}
# Lengths of a packed row's samples. Two are equal, and the four of length 1 are the tokens of a blank picture.
LENGTHS = [9, 9, 1, 1, 1, 1, 17, 3, 12]


def decoder(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """A small random language model in float64."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float64)
    return model.train()


def packed_row(lengths: list[int]) -> dict[str, Any]:
    """A packed row of random tokens, as the collator gives it."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(SIZES["vocab_size"], (1, sum(lengths)), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def loss_and_gradients(
    model: PreTrainedModel, rows: list[dict[str, Any]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss, the sum of the squares of the rows' logits, and its gradients."""
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        loss = loss + model(**row, use_cache=False).logits.square().sum()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", DECODERS)
def test_packed_rows_have_the_loss_and_gradients_of_masked_ones(family: str, checkpointing: bool) -> None:
    """With sdpa, transformers makes the mask of a packed row, from `position_ids` alone."""
    rows = [packed_row(LENGTHS), packed_row([20])]
    expected_loss, expected_gradients = loss_and_gradients(decoder(DECODERS[family], "sdpa"), rows)

    model = decoder(DECODERS[family], "varlen")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, gradients = loss_and_gradients(model, rows)

    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for name, expected in expected_gradients.items():
        assert (gradients[name] - expected).norm() <= 1e-12 * expected.norm() + 1e-12, name


@pytest.mark.parametrize("family", DECODERS)
def test_packed_rows_have_the_loss_and_gradients_of_separate_ones(family: str) -> None:
    separate = [{"input_ids": ids} for ids in packed_row(LENGTHS)["input_ids"].split(LENGTHS, dim=1)]
    expected_loss, expected_gradients = loss_and_gradients(decoder(DECODERS[family], "eager"), separate)
    loss, gradients = loss_and_gradients(decoder(DECODERS[family], "varlen"), [packed_row(LENGTHS)])
    # Norms compute in float32 whatever the model's dtype, and round differently for tensors of other shapes.
    torch.testing.assert_close(loss, expected_loss, rtol=1e-7, atol=0)
    for name, expected in expected_gradients.items():
        assert (gradients[name] - expected).norm() <= 1e-6 * expected.norm() + 1e-9, name


def test_a_blank_picture_keeps_the_loss_and_gradients(composed: Callable[..., Path]) -> None:
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "An answer."}]
    rows = [{"images": [], "conversations": turns, "source": "row"}] * 2
    batch = collate(composed(), rows, packed=True)
    batch["pixel_values"] = batch["pixel_values"].double()
    del batch["labels"]

    def logits_and_projector_gradients(attention: str) -> dict[str, torch.Tensor]:
        model = NormLlavaForConditionalGeneration.from_pretrained(
            composed(), dtype=torch.float64, attn_implementation={"text_config": attention, "vision_config": "sdpa"}
        )
        logits = model(**batch, use_cache=False).logits
        logits.square().sum().backward()
        results = {"logits": logits}
        for name, parameter in model.model.multi_modal_projector.named_parameters():
            results[name] = parameter.grad
        return results

    results = logits_and_projector_gradients("varlen")
    for name, expected in logits_and_projector_gradients("sdpa").items():
        torch.testing.assert_close(results[name], expected, rtol=1e-12, atol=1e-12)


MASKS: dict[str, torch.Tensor | None] = {
    "padded on the left": torch.tensor([[1] * 20, [0] * 7 + [1] * 13]),
    "padded on the right": torch.tensor([[1] * 20, [1] * 13 + [0] * 7]),
    "without padding": torch.ones(2, 20, dtype=torch.long),
    "without a mask": None,
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_rows_that_are_not_packed_are_computed_as_by_sdpa(family: str, kind: str) -> None:
    mask = MASKS[kind]
    input_ids = torch.randint(SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    sdpa = decoder(DECODERS[family], "sdpa")
    varlen = decoder(DECODERS[family], "varlen")
    expected_logits = sdpa(**inputs, use_cache=False).logits
    logits = varlen(**inputs, use_cache=False).logits
    is_token = torch.ones_like(input_ids) if mask is None else mask
    is_token = is_token.bool()
    torch.testing.assert_close(logits[is_token], expected_logits[is_token], rtol=1e-12, atol=1e-12)

    if kind != "padded on the right":  # transformers generates only after padding on the left
        expected_ids = sdpa.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
        generated_ids = varlen.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
        assert torch.equal(generated_ids, expected_ids)


def test_a_packed_row_without_cu_seq_lens_is_refused() -> None:
    row = packed_row(LENGTHS)
    with pytest.raises(ValueError, match="isn't told where the samples of a packed row begin"):
        decoder(DECODERS["llama"], "varlen")(row["input_ids"], position_ids=row["position_ids"], use_cache=False)


# Decoders that "varlen" can't serve, and what the error says.
REFUSED_DECODERS = {
    "a decoder that doesn't pass cu_seq_lens on": (NemotronConfig(**SIZES), "NemotronAttention isn't told .* sdpa"),
    "a decoder that has its window only in the mask": (
        DogeConfig(**SIZES, sliding_window=5),
        "DogeAttention doesn't tell its sliding window.*: sdpa",
    ),
    "soft caps": (Gemma2Config(**SIZES), "Gemma2Attention has soft caps or attention sinks.*: eager"),
    "sinks": (GptOssConfig(**SIZES, num_local_experts=2), "GptOssAttention has soft caps or attention sinks.*: eager"),
}


@pytest.mark.parametrize("kind", REFUSED_DECODERS)
def test_decoders_that_cannot_use_it_are_refused_by_name(kind: str) -> None:
    config, message = REFUSED_DECODERS[kind]
    with pytest.raises(ValueError, match=message):
        decoder(config, "varlen")(**packed_row(LENGTHS), use_cache=False)


def test_a_run_without_a_named_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = DECODERS["llama"]
    cpu = torch.device("cpu")
    assert default_attention(llama, packed=True, device=cpu) == "varlen"
    assert default_attention(llama, packed=False, device=cpu) == "sdpa"
    # StableLM computes attention in its own code.
    assert default_attention(StableLmConfig(), packed=True, device=cpu) == "sdpa"

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # Hopper
    assert default_attention(llama, packed=True, device=gpu) == "varlen"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # Turing lacks the kernel
    assert default_attention(llama, packed=True, device=gpu) == "sdpa"


def plain_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Stands in for `aten::_flash_attention_forward`, which needs a GPU.

    It checks what the kernel requires of its arguments, and computes what FlashAttention documents for them.
    """
    assert query.dtype == key.dtype == value.dtype
    assert all(states.stride(-1) == 1 for states in (query, key, value))
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    assert max_q == cum_seq_q.diff().max()
    assert max_k == cum_seq_k.diff().max()
    assert dropout_p == 0

    num_queries_per_key = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(num_queries_per_key, dim=1)
    value = value.repeat_interleave(num_queries_per_key, dim=1)
    outputs = []
    for start, end in pairwise(cum_seq_q.tolist()):
        positions = torch.arange(end - start)
        distance = positions - positions[:, None]  # [query, key], positive for keys after the query
        is_hidden = torch.zeros_like(distance, dtype=torch.bool)
        if is_causal:
            is_hidden |= distance > 0
        if window_size_left >= 0:
            is_hidden |= distance < -window_size_left
        if window_size_right >= 0:
            is_hidden |= distance > window_size_right
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * scale
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[start:end]))
    empty = torch.empty(0)
    return torch.cat(outputs), empty, empty, empty, empty


@pytest.fixture
def kernel_on_cpu() -> Iterator[None]:
    """Registers `plain_kernel` as the operator's implementation on the CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", plain_kernel, "CPU")
        yield


def heads(num_heads: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random queries, keys or values, `(1, num_heads, sequence_length, head_dim)`, with the strides of a layer's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, sum(LENGTHS), num_heads, 8, generator=generator).to(dtype).transpose(1, 2)


@pytest.mark.usefixtures("kernel_on_cpu")
@pytest.mark.parametrize("sliding_window", [None, 1, 5, 17])
def test_the_kernel_is_called_with_the_samples_window_and_scale(sliding_window: int | None) -> None:
    query = heads(4, seed=0)
    key = heads(2, seed=1)
    value = heads(2, seed=2)
    row = packed_row(LENGTHS)
    samples = {"cu_seq_lens": row["cu_seq_lens_q"], "max_length": row["max_length_q"]}
    with torch.no_grad():
        output = attend_by_kernel(query, key, value, scaling=0.3, sliding_window=sliding_window, **samples)

    # A query sees the keys of its own sample, up to itself and within the window.
    samples_of_tokens = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    positions = torch.arange(sum(LENGTHS))
    distance = positions[:, None] - positions  # [query, key], positive for keys before the query
    is_seen = (samples_of_tokens[:, None] == samples_of_tokens) & (distance >= 0)
    if sliding_window is not None:
        is_seen &= distance < sliding_window
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=is_seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("kernel_on_cpu")
def test_the_kernel_gets_one_dtype_where_autocast_gives_two() -> None:
    query = heads(4, seed=0, dtype=torch.float32)
    key = heads(2, seed=1, dtype=torch.float32)
    value = heads(2, seed=2, dtype=torch.bfloat16)
    row = packed_row(LENGTHS)
    samples = {"cu_seq_lens": row["cu_seq_lens_q"], "max_length": row["max_length_q"]}
    with torch.no_grad():
        output = attend_by_kernel(query, key, value, scaling=0.3, sliding_window=None, **samples)
    assert output.dtype == torch.bfloat16


def test_the_kernel_has_a_backward_pass_and_one_graph_for_rows_of_any_length() -> None:
    """The meta device computes shapes only, and so needs no GPU."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend_by_kernel, fullgraph=True, dynamic=True, backend=backend)
    for lengths in ([9, 5], [30, 7, 11, 2]):
        # Queries have four heads, keys and values two.
        shapes = [(1, num_heads, sum(lengths), 64) for num_heads in (4, 2, 2)]
        states = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        starts = torch.empty(len(lengths) + 1, device="meta", dtype=torch.int32)
        options = {"cu_seq_lens": starts, "max_length": max(lengths), "scaling": 0.3, "sliding_window": 3}
        output = compiled(*states, **options)
        assert output.shape == (1, sum(lengths), 4, 64)
        output.sum().backward()
        assert [tuple(state.grad.shape) for state in states] == shapes
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "dropout", "expected"),
    [
        (64, 64, torch.bfloat16, 0.0, True),
        (256, 256, torch.float16, 0.0, True),
        (80, 80, torch.bfloat16, 0.0, True),
        (64, 64, torch.float32, 0.0, False),
        (512, 512, torch.bfloat16, 0.0, False),
        (100, 100, torch.bfloat16, 0.0, False),
        (192, 128, torch.bfloat16, 0.0, False),
        (64, 64, torch.bfloat16, 0.1, False),
    ],
)
def test_what_the_kernel_supports(
    head_dim: int, value_dim: int, dtype: torch.dtype, dropout: float, expected: bool
) -> None:
    query = torch.empty(1, 2, 4, head_dim)
    value = torch.empty(1, 2, 4, value_dim, dtype=dtype)
    assert kernel_supports(query, value, dropout) == expected


@pytest.mark.slow
def test_compiled_layers_compute_what_eager_ones_do() -> None:
    row = packed_row(LENGTHS)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    expected_loss, expected_gradients = loss_and_gradients(decoder(config, "varlen"), [row])
    model = decoder(config, "varlen")
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    loss, gradients = loss_and_gradients(model, [row])
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-6, atol=1e-9)


def test_a_run_uses_it_in_the_language_model_only_and_does_not_save_it(
    composed: Callable[..., Path], tmp_path: Path
) -> None:
    run_args = RunArguments(
        model_name_or_path=str(composed()), dataset_name="", stage="align", attn_implementation="varlen"
    )
    model = load_base(run_args, TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    assert model.model.language_model.config._attn_implementation == "varlen"
    assert model.model.vision_tower.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()
    loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.model.language_model.config._attn_implementation == "sdpa"
