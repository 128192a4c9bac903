"""Measures the time of a LayerNorm with global weight compensation (GWC) beside `nn.LayerNorm`, and its errors.

    python -m benchmarks.gpu.norm --output benchmarks/results/norm_cpu.json

This command makes the figures of a CPU. `python -m benchmarks.gpu` makes those of a GPU. There many passes are queued,
and each is so large that it takes longer than starting its kernels.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.results import Arm, Figures
from benchmarks.gpu.stopwatch import Stopwatch
from modeling_normllava import GlobalWeightCompensatedLayerNorm
from modeling_normllava.modeling_normllava import MIN_MEAN_GAIN


NUM_TOKENS = 8 * 729  # eight pictures of SigLIP-SO400M-patch14-384
HIDDEN_SIZE = 3584  # Qwen2.5-7B
# 64 pictures. With eight, a GPU's kernels end before Python has started the next ones, and Python's time is measured.
NUM_TOKENS_ON_GPU = 8 * NUM_TOKENS
# The mean gain: Qwen2.5-7B's T, the mean norm of its text embeddings (Table 1), over the root of the width.
GAIN = 0.80 / HIDDEN_SIZE**0.5
Norm = Callable[[torch.Tensor], torch.Tensor]


KINDS: dict[str, type[nn.LayerNorm]] = {
    "LayerNorm": nn.LayerNorm,
    "GWC": GlobalWeightCompensatedLayerNorm,
}


def arms(device: torch.device) -> list[Arm]:
    """Each kind of norm on states in float32, and on states in bfloat16 under autocast, as in training."""
    on_gpu = device.type == "cuda"
    num_tokens = NUM_TOKENS_ON_GPU if on_gpu else 64
    passes = 200 if on_gpu else 3

    measured = []
    for dtype in (torch.float32, torch.bfloat16):
        dtype_name = str(dtype).removeprefix("torch.")
        settings = {"shape": [num_tokens, HIDDEN_SIZE], "dtype": dtype_name, "queued_passes": passes}
        for name in KINDS:
            measure = partial(measure_norm, name, dtype, num_tokens, passes, device)
            beside = None if name == "LayerNorm" else f"LayerNorm, {dtype_name}"
            measured.append(Arm(f"{name}, {dtype_name}", measure, settings, beside))
    return measured


def make_norm(kind: type[nn.LayerNorm], device: torch.device) -> Any:
    """A norm whose gains are spread around `GAIN`, as after training."""
    torch.manual_seed(0)
    norm = kind(HIDDEN_SIZE, eps=1e-5)
    nn.init.normal_(norm.weight, mean=GAIN, std=0.3 * GAIN)
    return norm.to(device)


def measure_norm(name: str, dtype: torch.dtype, num_tokens: int, passes: int, device: torch.device) -> Figures:
    """The time of a forward and a backward pass, and the errors of the output and of the input's gradient."""
    norm = make_norm(KINDS[name], device)
    x = (30 * torch.randn(num_tokens, HIDDEN_SIZE, device=device)).to(dtype).requires_grad_()

    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        grad_output = torch.randn_like(norm(x))
        time_passes(norm, x, grad_output, passes)  # a warm-up
        seconds_per_pass = [time_passes(norm, x, grad_output, passes) / passes for _ in range(5)]
        output = norm(x)
        (gradient,) = torch.autograd.grad(output, x, grad_output)

    expected_output, expected_gradient = reference(norm, x, grad_output, compensated=name != "LayerNorm")
    return {
        "microseconds": statistics.median(seconds_per_pass) * 1e6,
        "output_relative_error": relative_error(output, expected_output),
        "gradient_relative_error": relative_error(gradient, expected_gradient),
    }


def time_passes(norm: Any, x: torch.Tensor, grad_output: torch.Tensor, passes: int) -> float:
    """The seconds of so many forward and backward passes, which are queued without waiting for any."""
    stopwatch = Stopwatch(x.device)
    stopwatch.mark()
    for _ in range(passes):
        x.grad = None
        norm.zero_grad()
        norm(x).backward(grad_output)
    stopwatch.mark()
    return stopwatch.seconds()[0]


def reference(
    norm: Any, x: torch.Tensor, grad_output: torch.Tensor, compensated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the input's gradient, computed in float64.

    Args:
        norm: The norm whose weights are taken.
        x: Its input.
        grad_output: The gradient of its output.
        compensated: Whether to divide the normalised input's gradient by the mean gain, as in the paper's equations 22
            to 26.
    """
    x = x.detach().double().requires_grad_()
    weight = norm.weight.detach().double()
    bias = norm.bias.detach().double()
    centred = x - x.mean(-1, keepdim=True)
    x_hat = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    if compensated:
        mean_gain = weight.abs().mean().clamp(min=MIN_MEAN_GAIN)
        x_hat.register_hook(lambda gradient: gradient / mean_gain)

    output = x_hat * weight + bias
    (gradient,) = torch.autograd.grad(output, x, grad_output.double())
    return output.detach(), gradient


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The L2 norm of the difference over the L2 norm of the expected tensor."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def float64_gradient_error() -> float:
    """The relative error of the input's gradient that GWC computes in float64."""
    norm = make_norm(GlobalWeightCompensatedLayerNorm, torch.device("cpu")).double()
    x = (30 * torch.randn(729, HIDDEN_SIZE, dtype=torch.float64)).requires_grad_()
    grad_output = torch.randn_like(x)
    (actual,) = torch.autograd.grad(norm(x), x, grad_output)
    _, expected = reference(norm, x, grad_output, compensated=True)
    return relative_error(actual, expected)


def time_ratios(repeats: int) -> list[float]:
    """GWC's time over LayerNorm's on a CPU, one ratio for each repeat.

    The two norms take turns, so that other load slows both.
    """
    device = torch.device("cpu")
    gwc = make_norm(GlobalWeightCompensatedLayerNorm, device)
    layer_norm = make_norm(nn.LayerNorm, device)
    x = torch.randn(NUM_TOKENS, HIDDEN_SIZE, requires_grad=True)
    grad_output = torch.randn_like(x)
    for norm in (gwc, layer_norm):  # a warm-up
        time_passes(norm, x, grad_output, passes=3)

    ratios = []
    for repeat in range(repeats):
        # Each norm goes first equally often, so that a machine that gets slower or faster favours neither.
        order = [gwc, layer_norm]
        if repeat % 2 == 0:
            order.reverse()
        seconds = {norm: time_passes(norm, x, grad_output, passes=1) for norm in order}
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

    low, median, high = statistics.quantiles(time_ratios(args.repeats), n=4)
    result = {
        "gradient_relative_error_float64": float64_gradient_error(),
        "time_over_layernorm": {"median": median, "quartiles": [low, high], "n": args.repeats},
        "shape": [NUM_TOKENS, HIDDEN_SIZE],
        "dtype": "float32",
        "device": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(args.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
