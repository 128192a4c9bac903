"""Measures attention over a packed row, forward and backward, with the shapes of Qwen2.5-7B's layers.

"varlen" attends by sample. "sdpa, masked" hides other samples by a mask, with and without cuDNN. "sdpa, causal"
doesn't separate samples.

cuDNN builds a plan for every shape that it hasn't seen, and packed rows have a new length in nearly every step. So the
first call at each of several lengths is measured too.
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
from training.attention import varlen_attention_forward


NUM_HEADS = 28
NUM_KEY_VALUE_HEADS = 4
HEAD_DIM = 128
# Lengths of the samples of a packed row: 8192 tokens in the first case, 8160 in the second.
CASES = {
    "8 long samples": [1011, 1540, 736, 1203, 903, 872, 1127, 800],
    "64 short samples": [96 + number for number in range(64)],
}
# Lengths of packed rows at which the first call is measured.
NEW_LENGTHS = [8192 - 40 * number for number in range(1, 13)]
# Query, key and value.
States = list[torch.Tensor]
Attention = Callable[[States], torch.Tensor]


class AttentionLayer(nn.Module):
    """The attributes of a decoder's layer that the attention functions read."""

    config = Qwen2Config()  # it has no sliding window
    is_causal = True
    num_key_value_groups = NUM_HEADS // NUM_KEY_VALUE_HEADS


def arms(device: torch.device) -> list[Arm]:
    """Both cases by each kind of attention, then the first calls at new lengths. On a CPU all lengths are short."""
    on_gpu = device.type == "cuda"
    shrink = 1 if on_gpu else 128
    repeats = 20 if on_gpu else 2

    measured = []
    for case, full_lengths in CASES.items():
        lengths = [max(length // shrink, 2) for length in full_lengths]
        for kind, cudnn in (("varlen", False), ("sdpa, masked", True), ("sdpa, masked", False)):
            settings = {"lengths": lengths, "repeats": repeats, "cudnn": cudnn}
            measure = partial(measure_case, kind, cudnn, lengths, repeats, device)
            beside = None if kind == "varlen" else f"{case}: varlen"
            measured.append(Arm(arm_name(case, kind, cudnn), measure, settings, beside))

    new_lengths = [length // shrink for length in NEW_LENGTHS]
    for kind, cudnn in itertools.product(("sdpa, masked", "sdpa, causal"), (True, False)):
        settings = {"row_lengths": new_lengths, "cudnn": cudnn}
        measure = partial(measure_first_calls, kind, cudnn, new_lengths, device)
        measured.append(Arm(arm_name("new lengths", kind, cudnn), measure, settings))
    measure = partial(measure_first_calls, "varlen", False, new_lengths, device)
    measured.append(Arm("new lengths: varlen", measure, {"row_lengths": new_lengths, "cudnn": False}))
    return measured


def arm_name(case: str, kind: str, cudnn: bool) -> str:
    """The name of an arm. Attention by sample never uses cuDNN, so its name doesn't mention it."""
    if cudnn or kind == "varlen":
        return f"{case}: {kind}"
    return f"{case}: {kind}, without cuDNN"


@contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Allow or forbid sdpa to use cuDNN within the block."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def make_states(num_tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> States:
    """Random query, key and value, each [1, heads, num_tokens, head_dim]."""
    torch.manual_seed(num_tokens)
    heads = (NUM_HEADS, NUM_KEY_VALUE_HEADS, NUM_KEY_VALUE_HEADS)
    states = [torch.randn(1, count, num_tokens, HEAD_DIM, device=device, dtype=dtype) for count in heads]
    return [state.requires_grad_() for state in states]


def make_attention(kind: str, lengths: list[int], device: torch.device) -> Attention:
    """A function that computes attention over a row whose samples have these lengths."""
    layer: Any = AttentionLayer()
    by_sample: Callable[..., Any] = varlen_attention_forward
    if kind == "varlen":
        # 0, then the end of each sample.
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        options: dict[str, Any] = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths)}
        return lambda states: by_sample(layer, *states, None, **options)[0]

    if kind == "sdpa, causal":
        return lambda states: sdpa_attention_forward(layer, *states, None)[0]

    # A token sees the earlier tokens of its own sample.
    sample_numbers = torch.repeat_interleave(torch.tensor(lengths, device=device))  # [num_tokens]
    is_same_sample = sample_numbers[:, None] == sample_numbers[None, :]
    mask = is_same_sample.tril()[None, None]  # [1, 1, num_tokens, num_tokens]
    return lambda states: sdpa_attention_forward(layer, *states, mask)[0]


def attend_in_float32(states: States, lengths: list[int]) -> torch.Tensor:
    """The reference: attention of each sample by itself, in plain matrix products."""
    queries, keys, values = (state[0].split(lengths, dim=1) for state in states)
    outputs = []
    for query, key, value in zip(queries, keys, values, strict=True):
        key = key.repeat_interleave(NUM_HEADS // NUM_KEY_VALUE_HEADS, dim=0)
        value = value.repeat_interleave(NUM_HEADS // NUM_KEY_VALUE_HEADS, dim=0)
        scores = query @ key.mT / HEAD_DIM**0.5
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    return torch.cat(outputs, dim=1).transpose(0, 1)[None]  # [1, num_tokens, heads, head_dim]


def forward_and_backward(attention: Attention, states: States, grad_output: torch.Tensor) -> States:
    """The output, and the gradients of query, key and value."""
    output = attention(states)
    return [output, *torch.autograd.grad(output, states, grad_output)]


def measure_case(kind: str, cudnn: bool, lengths: list[int], repeats: int, device: torch.device) -> Figures:
    """The median time of a forward and a backward pass, and the errors against float32."""
    states = make_states(sum(lengths), device)
    grad_output = torch.randn(1, sum(lengths), NUM_HEADS, HEAD_DIM, device=device, dtype=states[0].dtype)
    attention = make_attention(kind, lengths, device)

    stopwatch = Stopwatch(device)
    with cudnn_attention(cudnn):
        for _ in range(3):  # a warm-up
            computed = forward_and_backward(attention, states, grad_output)
        stopwatch.mark()
        for _ in range(repeats):
            forward_and_backward(attention, states, grad_output)
            stopwatch.mark()
    figures: Figures = {"milliseconds": statistics.median(stopwatch.seconds()) * 1000}

    exact_states = [state.detach().float().requires_grad_() for state in states]
    reference = partial(attend_in_float32, lengths=lengths)
    expected = forward_and_backward(reference, exact_states, grad_output.float())
    for name, actual, exact_value in zip(("output", "query", "key", "value"), computed, expected, strict=True):
        error = (actual.float() - exact_value).norm() / exact_value.norm()
        figures[f"{name}_relative_error"] = error.item()
    return figures


def measure_first_calls(kind: str, cudnn: bool, row_lengths: list[int], device: torch.device) -> Figures:
    """The times of the first and of the second call at each length. The rows hold two samples."""
    first_calls = []
    second_calls = []
    with cudnn_attention(cudnn):
        for row_length in row_lengths:
            lengths = [row_length // 3, row_length - row_length // 3]
            attention = make_attention(kind, lengths, device)
            states = make_states(row_length, device)
            grad_output = torch.randn(1, row_length, NUM_HEADS, HEAD_DIM, device=device, dtype=states[0].dtype)

            stopwatch = Stopwatch(device)
            stopwatch.mark()
            for _ in range(2):
                forward_and_backward(attention, states, grad_output)
                stopwatch.mark()
            first, second = stopwatch.seconds()
            first_calls.append(first * 1000)
            second_calls.append(second * 1000)

    # The first length is left out, because the very first call also loads the kernels.
    return {
        "first_call_ms": statistics.median(first_calls[1:]),
        "slowest_first_call_ms": max(first_calls[1:]),
        "second_call_ms": statistics.median(second_calls[1:]),
    }
