"""What global weight compensation (GWC) costs beside `nn.LayerNorm`, and how exact it is.

    python -m benchmarks.gpu.norm --output benchmarks/results/norm_cpu.json

This makes the CPU's figures. On a GPU `python -m benchmarks.gpu` measures it, in passes that are queued one after the
other and large enough that the time is the device's and not that of starting kernels.
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
# 64 pictures: with eight a GPU's kernels end before the next ones are started, and Python would be timed.
NUM_TOKENS_ON_GPU = 8 * NUM_TOKENS
GAIN = 0.80 / HIDDEN_SIZE**0.5  # T of Qwen2.5-7B (Table 1) over the root of the width
Norm = Callable[[torch.Tensor], torch.Tensor]


KINDS: dict[str, type[nn.LayerNorm]] = {
    "LayerNorm": nn.LayerNorm,
    "GWC": GlobalWeightCompensatedLayerNorm,
}


def arms(device: torch.device) -> list[Arm]:
    """Each norm on float32 states, and on bfloat16 ones under autocast, as in training."""
    on_gpu = device.type == "cuda"
    num_tokens = NUM_TOKENS_ON_GPU if on_gpu else 64
    passes = 200 if on_gpu else 3

    measured = []
    for dtype in (torch.float32, torch.bfloat16):
        name_of_dtype = str(dtype).removeprefix("torch.")
        settings = {"shape": [num_tokens, HIDDEN_SIZE], "dtype": name_of_dtype, "queued_passes": passes}
        for name in KINDS:
            measure = partial(measure_norm, name, dtype, num_tokens, passes, device)
            beside = None if name == "LayerNorm" else f"LayerNorm, {name_of_dtype}"
            measured.append(Arm(f"{name}, {name_of_dtype}", measure, settings, beside))
    return measured


def make_norm(kind: type[nn.LayerNorm], device: torch.device) -> Any:
    """A norm with a gain as of a trained one."""
    torch.manual_seed(0)
    norm = kind(HIDDEN_SIZE, eps=1e-5)
    nn.init.normal_(norm.weight, mean=GAIN, std=0.3 * GAIN)
    return norm.to(device)


def measure_norm(name: str, dtype: torch.dtype, num_tokens: int, passes: int, device: torch.device) -> Figures:
    """Time of a forward and backward pass, and the errors of output and input gradient."""
    norm = make_norm(KINDS[name], device)
    x = (30 * torch.randn(num_tokens, HIDDEN_SIZE, device=device)).to(dtype).requires_grad_()

    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        grad_output = torch.randn_like(norm(x))
        time_passes(norm, x, grad_output, passes)
        seconds = [time_passes(norm, x, grad_output, passes) / passes for _ in range(5)]
        output = norm(x)
        (gradient,) = torch.autograd.grad(output, x, grad_output)

    expected_output, expected_gradient = reference(norm, x, grad_output, compensated=name != "LayerNorm")
    return {
        "microseconds": statistics.median(seconds) * 1e6,
        "output_relative_error": relative_error(output, expected_output),
        "gradient_relative_error": relative_error(gradient, expected_gradient),
    }


def time_passes(norm: Any, x: torch.Tensor, grad_output: torch.Tensor, passes: int) -> float:
    """Seconds of so many forward and backward passes, queued without waiting for any."""
    stopwatch = Stopwatch(x.device)
    stopwatch.mark()
    for _ in range(passes):
        x.grad = norm.weight.grad = norm.bias.grad = None
        norm(x).backward(grad_output)
    stopwatch.mark()
    return stopwatch.seconds()[0]


def reference(
    norm: Any, x: torch.Tensor, grad_output: torch.Tensor, compensated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of the input in float64; `compensated` by a hook on the normalised input, as in the paper's
    equations 22 to 26."""
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
    """L2 norm of the difference over that of what is expected."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def float64_gradient_error() -> float:
    """Relative error of GWC's input gradient in float64."""
    norm = make_norm(GlobalWeightCompensatedLayerNorm, torch.device("cpu")).double()
    x = (30 * torch.randn(729, HIDDEN_SIZE, dtype=torch.float64)).requires_grad_()
    grad_output = torch.randn_like(x)
    (actual,) = torch.autograd.grad(norm(x), x, grad_output)
    _, expected = reference(norm, x, grad_output, compensated=True)
    return relative_error(actual, expected)


def time_ratios(repeats: int) -> list[float]:
    """GWC's time over LayerNorm's on a CPU, one for each repeat. They alternate, so that other load slows both."""
    device = torch.device("cpu")
    ours = make_norm(GlobalWeightCompensatedLayerNorm, device)
    theirs = make_norm(nn.LayerNorm, device)
    x = torch.randn(NUM_TOKENS, HIDDEN_SIZE, requires_grad=True)
    grad_output = torch.randn_like(x)
    for norm in (ours, theirs):
        time_passes(norm, x, grad_output, passes=3)

    ratios = []
    for repeat in range(repeats):
        # Each goes first equally often: a machine that gets slower or faster must not favour one.
        order = [ours, theirs]
        if repeat % 2 == 0:
            order.reverse()
        seconds = {norm: time_passes(norm, x, grad_output, passes=1) for norm in order}
        ratios.append(seconds[ours] / seconds[theirs])
    return ratios


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--repeats", type=int, default=60, help="how often each is timed")
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
