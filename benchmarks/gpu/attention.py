"""Measures attention over a packed row, forward and backward, with the shapes of Qwen2.5-7B's layers.

There are three kinds of attention:
- "varlen" computes each sample by itself;
- "sdpa, masked" hides other samples from a token by a mask;
- "sdpa, causal" lets a token see all earlier tokens of the row, also those of other samples.

Both kinds of sdpa are measured with and without cuDNN. For every new shape cuDNN builds a plan, and packed rows have a
new length in nearly every step. So the first call at each of several lengths is measured too.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.gpu.results import Arm, Figures
from benchmarks.gpu.stopwatch import Stopwatch
from training.modules.attention import varlen_attention_forward


NUM_HEADS = 28
NUM_KEY_VALUE_HEADS = 4
HEAD_DIM = 128
DTYPE = torch.bfloat16
# Lengths of the samples of a packed row: 8192 tokens in the first case, 8160 in the second.
CASES = {
    "8 long samples": [1011, 1540, 736, 1203, 903, 872, 1127, 800],
    "64 short samples": [96 + number for number in range(64)],
}
# Lengths of packed rows at which the first call is measured: 8152, 8112, ..., 7712 tokens.
NEW_LENGTHS = [8192 - 40 * number for number in range(1, 13)]
# Sliding windows of the first case: below the length of its longest sample, and above.
WINDOWS = (512, 2048)
# The most by which an output or a gradient in bfloat16 may differ from float32's, relative to its norm. On an H200 the
# largest was 0.0035.
TOLERANCE = 0.01
# The kinds of attention that are measured in both `CASES`, and whether cuDNN is allowed.
MEASURED_IN_CASES = [("varlen", False), ("sdpa, masked", True), ("sdpa, masked", False)]
# The kinds of attention whose first call at new lengths is measured, and whether cuDNN is allowed.
MEASURED_AT_NEW_LENGTHS = [
    ("sdpa, masked", True),
    ("sdpa, masked", False),
    ("sdpa, causal", True),
    ("sdpa, causal", False),
    ("varlen", False),
]
# The query, key and value of a row, each [1, heads, num_tokens, head_dim].
States = list[torch.Tensor]
# Computes the output, [1, num_tokens, heads, head_dim].
Attention = Callable[[States], torch.Tensor]


class AttentionLayer(nn.Module):
    """The attributes of a decoder's layer that the attention functions read."""

    config = Qwen2Config()  # without a sliding window
    is_causal = True
    num_key_value_groups = NUM_HEADS // NUM_KEY_VALUE_HEADS


def arms(device: torch.device) -> list[Arm]:
    """The arms of both cases, then the arms of first calls at new lengths. On a CPU all lengths are short."""
    on_gpu = device.type == "cuda"
    shrink = 1 if on_gpu else 128
    repeats = 20 if on_gpu else 2

    all_arms = []
    for case, full_lengths in CASES.items():
        lengths = [max(length // shrink, 2) for length in full_lengths]  # without `max`, some would shrink to 0
        for kind, cudnn in MEASURED_IN_CASES:
            measure = partial(measure_case, kind, cudnn=cudnn, lengths=lengths, repeats=repeats, device=device)
            settings = {"lengths": lengths, "repeats": repeats, "cudnn": cudnn}
            compared_with = None if kind == "varlen" else f"{case}: varlen"
            all_arms.append(Arm(arm_name(case, kind, cudnn), measure, settings, compared_with))

    case, full_lengths = next(iter(CASES.items()))
    lengths = [max(length // shrink, 2) for length in full_lengths]
    for full_window in WINDOWS:
        window = full_window // shrink
        measure = partial(
            measure_case, "varlen", cudnn=False, lengths=lengths, repeats=repeats, device=device, window=window
        )
        settings = {"lengths": lengths, "repeats": repeats, "window": window}
        all_arms.append(Arm(f"{case}: varlen, window {full_window}", measure, settings, f"{case}: varlen"))

    new_lengths = [length // shrink for length in NEW_LENGTHS]
    for kind, cudnn in MEASURED_AT_NEW_LENGTHS:
        measure = partial(measure_first_calls, kind, cudnn=cudnn, row_lengths=new_lengths, device=device)
        settings = {"row_lengths": new_lengths, "cudnn": cudnn}
        all_arms.append(Arm(arm_name("new lengths", kind, cudnn), measure, settings))
    return all_arms


def arm_name(case: str, kind: str, cudnn: bool) -> str:
    """The name of an arm. "varlen" never uses cuDNN, so its name doesn't mention it."""
    if cudnn or kind == "varlen":
        return f"{case}: {kind}"
    return f"{case}: {kind}, without cuDNN"


def measure_case(
    kind: str, cudnn: bool, lengths: list[int], repeats: int, device: torch.device, window: int | None = None
) -> Figures:
    """The median time of a forward and a backward pass, and the errors of the output and of the gradients.

    The errors are differences to a reference in float32. `window` is the number of tokens that a token sees.

    Raises:
        ValueError: if an error is above `TOLERANCE`.
    """
    states = make_states(sum(lengths), device)
    grad_output = torch.randn(1, sum(lengths), NUM_HEADS, HEAD_DIM, device=device, dtype=DTYPE)
    attention = make_attention(kind, lengths, device, window)

    stopwatch = Stopwatch(device)
    with cudnn_attention(cudnn):
        for _ in range(3):  # a warm-up
            forward_and_backward(attention, states, grad_output)

        stopwatch.mark()
        for _ in range(repeats):
            computed_tensors = forward_and_backward(attention, states, grad_output)
            stopwatch.mark()
    figures: Figures = {"milliseconds": statistics.median(stopwatch.seconds()) * 1000}

    float32_states = [state.detach().float().requires_grad_() for state in states]
    reference = partial(attend_in_matrix_products, lengths=lengths, window=window)
    expected_tensors = forward_and_backward(reference, float32_states, grad_output.float())
    # Besides the output, these are the gradients of query, key and value.
    names = ("output", "query", "key", "value")
    for name, computed, expected in zip(names, computed_tensors, expected_tensors, strict=True):
        error = (computed.float() - expected).norm() / expected.norm()
        figures[f"{name}_relative_error"] = error.item()
        if error > TOLERANCE:
            raise ValueError(f"The relative error of the {name} is {error:.2g}, above {TOLERANCE}.")
    return figures


def measure_first_calls(kind: str, cudnn: bool, row_lengths: list[int], device: torch.device) -> Figures:
    """The times of the first and of the second call at new lengths of a row. Each row holds two samples."""
    first_call_ms = []
    second_call_ms = []
    with cudnn_attention(cudnn):
        for row_length in row_lengths:
            short_length = row_length // 3
            long_length = row_length - short_length
            attention = make_attention(kind, [short_length, long_length], device)
            states = make_states(row_length, device)
            grad_output = torch.randn(1, row_length, NUM_HEADS, HEAD_DIM, device=device, dtype=DTYPE)

            stopwatch = Stopwatch(device)
            stopwatch.mark()
            for _ in range(2):
                forward_and_backward(attention, states, grad_output)
                stopwatch.mark()
            first_seconds, second_seconds = stopwatch.seconds()
            first_call_ms.append(first_seconds * 1000)
            second_call_ms.append(second_seconds * 1000)

    # The first length is left out, because the very first call also loads the kernels.
    return {
        "first_call_ms": statistics.median(first_call_ms[1:]),
        "slowest_first_call_ms": max(first_call_ms[1:]),
        "second_call_ms": statistics.median(second_call_ms[1:]),
    }


def make_states(num_tokens: int, device: torch.device) -> States:
    """Random query, key and value, each [1, heads, num_tokens, head_dim]."""
    torch.manual_seed(num_tokens)
    states = []
    for num_heads in (NUM_HEADS, NUM_KEY_VALUE_HEADS, NUM_KEY_VALUE_HEADS):
        state = torch.randn(1, num_heads, num_tokens, HEAD_DIM, device=device, dtype=DTYPE)
        states.append(state.requires_grad_())
    return states


def make_attention(kind: str, lengths: list[int], device: torch.device, window: int | None = None) -> Attention:
    """A function that computes attention over a row whose samples have these lengths."""
    layer: Any = AttentionLayer()
    if kind == "varlen":
        ends = itertools.accumulate(lengths)
        bounds = torch.tensor([0, *ends], dtype=torch.int32, device=device)  # [num_samples + 1]
        longest = max(lengths)

        def attend_by_sample(states: States) -> torch.Tensor:
            query, key, value = states
            output, _ = varlen_attention_forward(
                layer,
                query,
                key,
                value,
                attention_mask=None,
                cu_seq_lens_q=bounds,
                max_length_q=longest,
                sliding_window=window,
            )
            return output

        return attend_by_sample

    mask = None  # with "sdpa, causal", where the layer's `is_causal` is enough
    if kind == "sdpa, masked":
        # A token sees the earlier tokens of its own sample. Lengths 2 and 3 give the sample numbers 0, 0, 1, 1, 1.
        sample_numbers = torch.repeat_interleave(torch.tensor(lengths, device=device))  # [num_tokens]
        is_same_sample = sample_numbers[:, None] == sample_numbers[None, :]  # [num_tokens, num_tokens]
        mask = is_same_sample.tril()[None, None]  # [1, 1, num_tokens, num_tokens]

    def attend_by_sdpa(states: States) -> torch.Tensor:
        query, key, value = states
        output, _ = sdpa_attention_forward(layer, query, key, value, attention_mask=mask)
        return output

    return attend_by_sdpa


@contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Allow or forbid sdpa to use cuDNN within the block."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def forward_and_backward(attention: Attention, states: States, grad_output: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value."""
    output = attention(states)
    gradients = torch.autograd.grad(output, states, grad_output)
    return [output, *gradients]


def attend_in_matrix_products(states: States, lengths: list[int], window: int | None) -> torch.Tensor:
    """The output of causal attention within each sample, in plain matrix products: the reference."""
    # Each sample's query, key and value are [heads, length, head_dim].
    queries, keys, values = [state[0].split(lengths, dim=1) for state in states]

    outputs = []
    for query, grouped_key, grouped_value in zip(queries, keys, values, strict=True):
        # Several heads of the query share one head of key and value.
        key = grouped_key.repeat_interleave(NUM_HEADS // NUM_KEY_VALUE_HEADS, dim=0)
        value = grouped_value.repeat_interleave(NUM_HEADS // NUM_KEY_VALUE_HEADS, dim=0)

        scores = query @ key.mT / HEAD_DIM**0.5  # [heads, length, length]
        is_hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        if window is not None:
            is_hidden |= torch.ones_like(is_hidden).tril(-window)
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        outputs.append(weights @ value)

    output = torch.cat(outputs, dim=1)  # [heads, num_tokens, head_dim]
    return output.transpose(0, 1)[None]  # [1, num_tokens, heads, head_dim]
