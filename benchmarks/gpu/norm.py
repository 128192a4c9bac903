"""Compares GWC, a LayerNorm with global weight compensation, with `nn.LayerNorm` in time and in errors.

    python -m benchmarks.gpu.norm --output benchmarks/results/norm_cpu.json

This command measures on a CPU. `python -m benchmarks.gpu` measures this file's `arms`, usually on a GPU.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.results import Arm, Figures
from benchmarks.gpu.stopwatch import Stopwatch
from modeling_normllava import GlobalWeightCompensatedLayerNorm
from modeling_normllava.modeling_normllava import MIN_MEAN_GAIN


TOKENS_PER_PICTURE = 729  # SigLIP-SO400M-patch14-384
HIDDEN_SIZE = 3584  # Qwen2.5-7B
NUM_TOKENS = 8 * TOKENS_PER_PICTURE
# On a GPU, kernels for eight pictures would end before Python starts the next kernels, and Python's time would be
# measured.
NUM_TOKENS_ON_GPU = 64 * TOKENS_PER_PICTURE
NUM_TOKENS_IN_REHEARSAL = 64  # when `python -m benchmarks.gpu --cpu` measures the arms
# The mean gain of the norms. With this gain, a LayerNorm's outputs have the L2 norm 0.80, the mean norm of
# Qwen2.5-7B's text embeddings (arXiv 2512.08374, Table 1).
GAIN = 0.80 / HIDDEN_SIZE**0.5
NUM_TIMINGS = 5  # an arm's time is the median of so many measurements
INPUT_STD = 30  # the standard deviation of the inputs; not 1, so that the norm changes them


class CastLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose output has its input's dtype, as ours has. Under autocast it would be float32."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalise `inputs`."""
        return super().forward(inputs).to(inputs.dtype)


KINDS: dict[str, type[nn.LayerNorm]] = {
    "LayerNorm": CastLayerNorm,
    "GWC": GlobalWeightCompensatedLayerNorm,
}


def arms(device: torch.device) -> list[Arm]:
    """The arms of both norms: with float32 inputs, then with bfloat16 inputs under autocast, as in training."""
    on_gpu = device.type == "cuda"
    num_tokens = NUM_TOKENS_ON_GPU if on_gpu else NUM_TOKENS_IN_REHEARSAL
    passes = 200 if on_gpu else 3

    all_arms = []
    for dtype_name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        settings = {"shape": [num_tokens, HIDDEN_SIZE], "dtype": dtype_name, "queued_passes": passes}
        for name in KINDS:
            measure = partial(measure_norm, name, dtype, num_tokens=num_tokens, passes=passes, device=device)
            compared_with = None if name == "LayerNorm" else f"LayerNorm, {dtype_name}"
            all_arms.append(Arm(f"{name}, {dtype_name}", measure, settings, compared_with))
    return all_arms


def make_norm(kind: type[nn.LayerNorm], device: torch.device) -> Any:
    """A norm of this kind, whose gains are spread around `GAIN`, as after training."""
    torch.manual_seed(0)
    norm = kind(HIDDEN_SIZE, eps=1e-5)
    nn.init.normal_(norm.weight, mean=GAIN, std=0.3 * GAIN)
    return norm.to(device)


def measure_norm(name: str, dtype: torch.dtype, num_tokens: int, passes: int, device: torch.device) -> Figures:
    """The time of a forward and a backward pass, and the errors of the output and of the gradient of the inputs."""
    norm = make_norm(KINDS[name], device)
    float32_inputs = INPUT_STD * torch.randn(num_tokens, HIDDEN_SIZE, device=device)
    inputs = float32_inputs.to(dtype).requires_grad_()

    is_bfloat16 = dtype == torch.bfloat16
    with torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16):
        output = norm(inputs)
        grad_output = torch.randn_like(output)
        (gradient,) = torch.autograd.grad(output, inputs, grad_output)
        time_passes(norm, inputs, grad_output, passes)  # a warm-up
        timings = [time_passes(norm, inputs, grad_output, passes) for _ in range(NUM_TIMINGS)]

    is_compensated = name == "GWC"
    expected_output, expected_gradient = compute_in_float64(norm, inputs, grad_output, is_compensated)
    return {
        "microseconds": statistics.median(timings) / passes * 1e6,
        "output_relative_error": relative_error(output, expected_output),
        "gradient_relative_error": relative_error(gradient, expected_gradient),
    }


def time_passes(norm: Any, inputs: torch.Tensor, grad_output: torch.Tensor, passes: int) -> float:
    """The seconds of `passes` forward and backward passes in all. On a GPU, all are queued before Python waits."""
    stopwatch = Stopwatch(inputs.device)
    stopwatch.mark()
    for _ in range(passes):
        inputs.grad = None
        norm.zero_grad()
        norm(inputs).backward(grad_output)
    stopwatch.mark()
    return stopwatch.seconds()[0]


def compute_in_float64(
    norm: Any, inputs: torch.Tensor, grad_output: torch.Tensor, is_compensated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: a norm's output and the gradient of its inputs, computed in float64 from the formula.

    Args:
        norm: The norm whose weight, bias and `eps` are used.
        inputs: The norm's inputs.
        grad_output: The gradient of the norm's output.
        is_compensated: Whether to divide the gradient of the normalised inputs by the mean gain, as GWC does
            (arXiv 2512.08374, equations 22 to 26).
    """
    inputs = inputs.detach().double().requires_grad_()
    weight = norm.weight.detach().double()
    bias = norm.bias.detach().double()

    centred = inputs - inputs.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normalised = centred / (variance + norm.eps).sqrt()
    if is_compensated:
        mean_gain = weight.abs().mean().clamp(min=MIN_MEAN_GAIN)
        normalised.register_hook(lambda gradient: gradient / mean_gain)

    output = normalised * weight + bias
    (gradient,) = torch.autograd.grad(output, inputs, grad_output.double())
    return output.detach(), gradient


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The L2 norm of the difference over the L2 norm of the expected tensor."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def float64_gradient_error() -> float:
    """The relative error of the gradient of GWC's inputs if GWC runs in float64, on the tokens of one picture."""
    norm = make_norm(GlobalWeightCompensatedLayerNorm, torch.device("cpu")).double()
    inputs = INPUT_STD * torch.randn(TOKENS_PER_PICTURE, HIDDEN_SIZE, dtype=torch.float64)
    inputs.requires_grad_()
    grad_output = torch.randn_like(inputs)
    (actual,) = torch.autograd.grad(norm(inputs), inputs, grad_output)
    _, expected = compute_in_float64(norm, inputs, grad_output, is_compensated=True)
    return relative_error(actual, expected)


def time_ratios(repeats: int) -> list[float]:
    """GWC's time over LayerNorm's on a CPU, one ratio for each repeat.

    The two norms take turns, so that other load on the machine slows both.
    """
    device = torch.device("cpu")
    gwc = make_norm(GlobalWeightCompensatedLayerNorm, device)
    layer_norm = make_norm(nn.LayerNorm, device)
    inputs = INPUT_STD * torch.randn(NUM_TOKENS, HIDDEN_SIZE)
    inputs.requires_grad_()
    grad_output = torch.randn_like(inputs)
    for norm in (gwc, layer_norm):  # a warm-up
        time_passes(norm, inputs, grad_output, passes=3)

    ratios = []
    for repeat in range(repeats):
        # Each norm goes first equally often, so that a machine that gets slower or faster favours neither.
        order = [gwc, layer_norm]
        if repeat % 2 == 0:
            order.reverse()
        seconds = {norm: time_passes(norm, inputs, grad_output, passes=1) for norm in order}
        ratios.append(seconds[gwc] / seconds[layer_norm])
    return ratios


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--repeats", type=int, default=60, help="how often each norm is timed")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the norm on this CPU."""
    args = build_parser().parse_args(argv)

    low, median, high = statistics.quantiles(time_ratios(args.repeats), n=4)  # the three quartiles
    result = {
        "gradient_relative_error_float64": float64_gradient_error(),
        "time_over_layernorm": {"median": median, "quartiles": [low, high], "n": args.repeats},
        "shape": [NUM_TOKENS, HIDDEN_SIZE],
        "dtype": "float32",
        "device": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    text = json.dumps(result, indent=1) + "\n"
    args.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
