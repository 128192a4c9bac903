"""Attention "varlen" computes what sdpa does, gives its kernel the right arguments, and refuses some decoders."""

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
from training.folders.loading import load_base
from training.modules.attention import attend_by_kernel, default_attention, kernel_supports, unread_mask
from training.options.arguments import RunArguments, TrainingConfig


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "vocab_size": 320,
}  # fmt: skip
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# In "qwen2" and "gemma3" some layers have a sliding window, which is shorter than the longest samples of a row.
DECODERS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=GEMMA3_LAYERS),
}
# Lengths of the samples in a packed row. The four samples of length 1 are the tokens of a blank picture.
LENGTHS = [9, 9, 1, 1, 1, 1, 17, 3, 12]


def make_decoder(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """A small random language model in float64, in training mode. Its weights are the same for each attention."""
    set_seed(0)
    config = copy.deepcopy(config)  # the model writes its attention into this copy
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float64)
    return model.train()


def packed_row(lengths: list[int]) -> dict[str, Any]:
    """A packed row of random tokens in the collator's format, for samples of these lengths."""
    # The start of each sample, and the end of the last sample.
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(SIZES["vocab_size"], (1, sum(lengths)), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def loss_and_gradients(
    model: PreTrainedModel, rows: list[dict[str, Any]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the squares of all rows' logits, as a loss, and the gradients by the parameters' names."""
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits = model(**row, use_cache=False).logits
        loss = loss + logits.square().sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True], ids=["no checkpointing", "checkpointing"])
@pytest.mark.parametrize("family", DECODERS)
def test_varlen_and_sdpa_give_the_same_loss_and_gradients_of_packed_rows(family: str, checkpointing: bool) -> None:
    """With sdpa, transformers makes a packed row's mask from its `position_ids`."""
    rows = [packed_row(LENGTHS), packed_row([20])]  # of several samples, and of one sample
    sdpa = make_decoder(DECODERS[family], "sdpa")
    expected_loss, expected_gradients = loss_and_gradients(sdpa, rows)

    varlen = make_decoder(DECODERS[family], "varlen")
    if checkpointing:
        varlen.gradient_checkpointing_enable({"use_reentrant": False})
    loss, gradients = loss_and_gradients(varlen, rows)

    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for name, expected in expected_gradients.items():
        assert (gradients[name] - expected).norm() <= 1e-12 * expected.norm() + 1e-12, name


@pytest.mark.parametrize("family", DECODERS)
def test_a_packed_row_has_the_loss_and_gradients_of_its_samples_by_themselves(family: str) -> None:
    row = packed_row(LENGTHS)
    samples = [{"input_ids": ids} for ids in row["input_ids"].split(LENGTHS, dim=1)]
    eager = make_decoder(DECODERS[family], "eager")
    expected_loss, expected_gradients = loss_and_gradients(eager, samples)

    varlen = make_decoder(DECODERS[family], "varlen")
    loss, gradients = loss_and_gradients(varlen, [row])

    # The tolerance is not 1e-12 as above, because norm layers compute in float32, and round differently for tensors of
    # other shapes.
    torch.testing.assert_close(loss, expected_loss, rtol=1e-7, atol=0)
    for name, expected in expected_gradients.items():
        assert (gradients[name] - expected).norm() <= 1e-6 * expected.norm() + 1e-9, name


def test_a_packed_row_with_a_blank_picture_has_the_same_logits_and_gradients_as_with_sdpa(
    make_model_folder: Callable[..., Path],
) -> None:
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "An answer."}]
    rows = [{"images": [], "conversations": turns, "source": "row"}] * 2
    batch = collate(
        make_model_folder(), rows, packed=True
    )  # the collator adds a blank picture, since no row has a picture
    batch["pixel_values"] = batch["pixel_values"].double()
    del batch["labels"]

    def logits_and_projector_gradients(attention: str) -> dict[str, torch.Tensor]:
        model = NormLlavaForConditionalGeneration.from_pretrained(
            make_model_folder(),
            dtype=torch.float64,
            attn_implementation={"text_config": attention, "vision_config": "sdpa"},
        )
        logits = model(**batch, use_cache=False).logits
        logits.square().sum().backward()
        results = {"logits": logits}
        for name, parameter in model.model.multi_modal_projector.named_parameters():
            results[name] = parameter.grad
        return results

    results = logits_and_projector_gradients("varlen")
    expected_results = logits_and_projector_gradients("sdpa")
    for name, expected in expected_results.items():
        torch.testing.assert_close(results[name], expected, rtol=1e-12, atol=1e-12)


# Attention masks of two rows of 20 positions. In the padded masks, the second row has 13 tokens.
MASKS: dict[str, torch.Tensor | None] = {
    "padded on the left": torch.tensor([[1] * 20, [0] * 7 + [1] * 13]),
    "padded on the right": torch.tensor([[1] * 20, [1] * 13 + [0] * 7]),
    "without padding": torch.ones(2, 20, dtype=torch.long),
    "without a mask": None,
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_varlen_and_sdpa_give_the_same_logits_and_texts_of_rows_that_are_not_packed(family: str, kind: str) -> None:
    mask = MASKS[kind]
    input_ids = torch.randint(SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    sdpa = make_decoder(DECODERS[family], "sdpa")
    varlen = make_decoder(DECODERS[family], "varlen")
    logits = varlen(**inputs, use_cache=False).logits
    expected_logits = sdpa(**inputs, use_cache=False).logits

    # Padding is left out, since its logits have no meaning.
    is_token = torch.ones_like(input_ids, dtype=torch.bool)
    if mask is not None:
        is_token = mask.bool()
    torch.testing.assert_close(logits[is_token], expected_logits[is_token], rtol=1e-12, atol=1e-12)

    if kind != "padded on the right":  # transformers generates only after padding on the left
        generated_ids = varlen.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
        expected_ids = sdpa.eval().generate(**inputs, max_new_tokens=8, do_sample=False)
        assert torch.equal(generated_ids, expected_ids)


def test_a_packed_row_without_cu_seq_lens_gets_a_mask_by_its_positions() -> None:
    row = packed_row(LENGTHS)
    inputs = {"input_ids": row["input_ids"], "position_ids": row["position_ids"], "use_cache": False}
    logits = make_decoder(DECODERS["llama"], "varlen")(**inputs).logits
    expected_logits = make_decoder(DECODERS["llama"], "sdpa")(**inputs).logits
    torch.testing.assert_close(logits, expected_logits, rtol=1e-12, atol=1e-12)


# Decoders for which "varlen" would give wrong results, and a pattern of the error, which names the attention to use
# instead: sdpa or eager.
REFUSED_DECODERS = {
    "a decoder that has its window only in the mask": (
        DogeConfig(**SIZES, sliding_window=5),
        "DogeAttention doesn't tell its sliding window.*: sdpa",
    ),
    "soft caps": (Gemma2Config(**SIZES), "Gemma2Attention has soft caps or attention sinks.*: eager"),
    "sinks": (GptOssConfig(**SIZES, num_local_experts=2), "GptOssAttention has soft caps or attention sinks.*: eager"),
}


@pytest.mark.parametrize("kind", REFUSED_DECODERS)
def test_decoders_that_cannot_use_varlen_are_refused_by_name(kind: str) -> None:
    config, message = REFUSED_DECODERS[kind]
    model = make_decoder(config, "varlen")
    with pytest.raises(ValueError, match=message):
        model(**packed_row(LENGTHS), use_cache=False)


def test_a_decoder_that_does_not_pass_cu_seq_lens_on_is_refused() -> None:
    model = make_decoder(NemotronConfig(**SIZES), "varlen")
    mask = unread_mask(torch.device("cpu"))  # which training gives with packed rows
    with pytest.raises(ValueError, match=r"NemotronAttention isn't told .* sdpa"):
        model(**packed_row(LENGTHS), attention_mask=mask, use_cache=False)


def test_varlen_is_the_default_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = DECODERS["llama"]
    cpu = torch.device("cpu")
    assert default_attention(llama, cpu) == "varlen"
    # StableLM computes attention in its own code, which varlen can't replace.
    assert default_attention(StableLmConfig(), cpu) == "sdpa"

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # Hopper, which has the kernel
    assert default_attention(llama, gpu) == "varlen"
    monkeypatch.setattr(torch.version, "hip", "7.0")  # AMD's GPUs, on which the kernel was never run
    assert default_attention(llama, gpu) == "sdpa"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # Turing, which lacks the kernel
    assert default_attention(llama, gpu) == "sdpa"


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
    """Stands for the kernel, `aten::_flash_attention_forward`, which needs a GPU.

    The parameters have the kernel's names and order. The function checks what the kernel requires of the arguments,
    and computes what FlashAttention documents.

    `query`, `key`, `value` and the first output are `(num_tokens, num_heads, head_dim)`. Attention doesn't read the
    kernel's four other outputs.
    """
    assert query.dtype == key.dtype == value.dtype
    assert all(states.stride(-1) == 1 for states in (query, key, value))
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    assert max_q == cum_seq_q.diff().max()
    assert max_k == cum_seq_k.diff().max()
    assert dropout_p == 0

    # In grouped-query attention, a group of query heads shares a head of keys and values, which is repeated here.
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)

    # Samples don't see each other. A sample goes from one entry of `cum_seq_q` to the next.
    outputs = []
    for start, end in pairwise(cum_seq_q.tolist()):
        positions = torch.arange(end - start)
        distance = positions[:, None] - positions  # [query, key], positive for keys before the query
        is_hidden = torch.zeros_like(distance, dtype=torch.bool)
        if is_causal:
            is_hidden |= distance < 0
        if window_size_left >= 0:
            is_hidden |= distance > window_size_left
        if window_size_right >= 0:
            is_hidden |= distance < -window_size_right

        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * scale
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[start:end]))

    empty = torch.empty(0)
    return torch.cat(outputs), empty, empty, empty, empty


@pytest.fixture
def kernel_on_cpu() -> Iterator[None]:
    """Lets torch call `plain_kernel` on the CPU in place of the kernel on a GPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", plain_kernel, "CPU")
        yield


def random_states(num_heads: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random queries, keys or values of a packed row, `(1, num_heads, sequence_length, head_dim)`.

    As in an attention layer, the tensor is transposed, and so not contiguous.
    """
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(1, sum(LENGTHS), num_heads, SIZES["head_dim"], generator=generator)
    return states.to(dtype).transpose(1, 2)


@pytest.mark.usefixtures("kernel_on_cpu")
@pytest.mark.parametrize("sliding_window", [None, 1, 5, 17])
def test_the_kernel_gets_the_samples_the_window_and_the_scale(sliding_window: int | None) -> None:
    query = random_states(4, seed=0)
    key = random_states(2, seed=1)
    value = random_states(2, seed=2)
    row = packed_row(LENGTHS)
    samples = {"cu_seq_lens": row["cu_seq_lens_q"], "max_length": row["max_length_q"]}
    with torch.no_grad():
        output = attend_by_kernel(query, key, value, scaling=0.3, sliding_window=sliding_window, **samples)

    # A query sees the keys of its own sample, up to itself and within the window.
    sample_of_token = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    is_same_sample = sample_of_token[:, None] == sample_of_token  # [query, key]
    positions = torch.arange(sum(LENGTHS))
    distance = positions[:, None] - positions  # [query, key], positive for keys before the query
    is_seen = is_same_sample & (distance >= 0)
    if sliding_window is not None:
        is_seen &= distance < sliding_window
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=is_seen, scale=0.3, enable_gqa=True
    )
    expected = expected.transpose(1, 2)  # to [1, sequence_length, num_heads, head_dim], as layers expect it
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("kernel_on_cpu")
def test_the_kernel_gets_one_dtype_where_autocast_gives_two() -> None:
    """Under autocast the rotary embedding returns queries and keys in float32, while values are bfloat16."""
    query = random_states(4, seed=0, dtype=torch.float32)
    key = random_states(2, seed=1, dtype=torch.float32)
    value = random_states(2, seed=2, dtype=torch.bfloat16)
    row = packed_row(LENGTHS)
    samples = {"cu_seq_lens": row["cu_seq_lens_q"], "max_length": row["max_length_q"]}
    with torch.no_grad():
        output = attend_by_kernel(query, key, value, scaling=0.3, sliding_window=None, **samples)
    assert output.dtype == torch.bfloat16


def test_the_kernel_has_a_backward_pass_and_one_graph_for_rows_of_any_length() -> None:
    """The tensors are on the meta device, where the kernel computes only shapes, and so needs no GPU."""
    graphs = []

    def record_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def empty_states(num_heads: int, num_tokens: int) -> torch.Tensor:
        shape = (1, num_heads, num_tokens, 64)
        return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)

    compiled = torch.compile(attend_by_kernel, fullgraph=True, dynamic=True, backend=record_graph)
    for lengths in ([9, 5], [30, 7, 11, 2]):
        num_tokens = sum(lengths)
        query = empty_states(4, num_tokens)
        key = empty_states(2, num_tokens)
        value = empty_states(2, num_tokens)
        boundaries = torch.empty(len(lengths) + 1, device="meta", dtype=torch.int32)
        options = {"cu_seq_lens": boundaries, "max_length": max(lengths), "scaling": 0.3, "sliding_window": 3}
        output = compiled(query, key, value, **options)
        assert output.shape == (1, num_tokens, 4, 64)

        output.sum().backward()
        for states in (query, key, value):
            assert states.grad.shape == states.shape
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, torch.bfloat16), (80, torch.bfloat16), (256, torch.bfloat16), (256, torch.float16)]
)
def test_the_kernel_supports_16_bits_and_dimensions_up_to_256(dim: int, dtype: torch.dtype) -> None:
    query = torch.empty(1, 2, 4, dim)  # may be float32, as under autocast
    value = torch.empty(1, 2, 4, dim, dtype=dtype)
    assert kernel_supports(query, value, dropout=0.0)


@pytest.mark.parametrize(
    ("query_dim", "value_dim", "dtype", "dropout"),
    [
        pytest.param(64, 64, torch.float32, 0.0, id="32 bits"),
        pytest.param(512, 512, torch.bfloat16, 0.0, id="over 256 dimensions"),
        pytest.param(100, 100, torch.bfloat16, 0.0, id="not a multiple of 8 dimensions"),
        pytest.param(192, 128, torch.bfloat16, 0.0, id="values of other dimensions"),
        pytest.param(64, 64, torch.bfloat16, 0.1, id="dropout"),
    ],
)
def test_the_kernel_does_not_support_other_attention(
    query_dim: int, value_dim: int, dtype: torch.dtype, dropout: float
) -> None:
    query = torch.empty(1, 2, 4, query_dim)
    value = torch.empty(1, 2, 4, value_dim, dtype=dtype)
    assert not kernel_supports(query, value, dropout)


def test_the_kernel_does_not_train_heads_of_193_to_224_on_gpus_with_less_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def supports(dim: int, capability: tuple[int, int]) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        states = torch.empty(1, 2, 4, dim, dtype=torch.bfloat16)
        return kernel_supports(states, states, dropout=0.0)

    for capability in ((8, 6), (8, 9), (12, 0)):  # such as an RTX 3090, 4090 and 5090
        assert not supports(200, capability)
        assert not supports(224, capability)
        assert supports(192, capability)
        assert supports(256, capability)
    assert supports(200, (9, 0))


@pytest.mark.slow
def test_a_compiled_layer_computes_what_an_uncompiled_layer_does() -> None:
    row = packed_row(LENGTHS)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    uncompiled = make_decoder(config, "varlen")
    expected_loss, expected_gradients = loss_and_gradients(uncompiled, [row])

    compiled = make_decoder(config, "varlen")
    (layer,) = compiled.model.layers
    layer.forward = torch.compile(layer.forward, backend="eager")
    loss, gradients = loss_and_gradients(compiled, [row])

    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-6, atol=1e-9)


def test_a_run_uses_varlen_in_the_language_model_only_and_does_not_save_it(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    run_args = RunArguments(
        model_name_or_path=str(make_model_folder()), dataset_name="unused", stage="align", attn_implementation="varlen"
    )
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    model = load_base(run_args, args)
    assert model.model.language_model.config._attn_implementation == "varlen"
    assert model.model.vision_tower.config._attn_implementation == "sdpa"

    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()
    loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.model.language_model.config._attn_implementation == "sdpa"
