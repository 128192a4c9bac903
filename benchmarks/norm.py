"""Speed and exactness of the compensated norm.

    python -m benchmarks.norm --output benchmarks/results/norm_cpu.json

Time is a ratio: forward and backward against `nn.LayerNorm`, alternating in one run, so that other load affects both.
Exactness is the relative error in float64 against the paper's formula (eq. 22 to 26) written out.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from modeling_normllava import GlobalWeightCompensatedLayerNorm


NUM_TOKENS, HIDDEN_SIZE = 5832, 3584  # eight pictures of 729 tokens, Qwen2.5-7B
GAIN = 0.80 / HIDDEN_SIZE**0.5  # T of Qwen2.5-7B (Table 1) over the root of the width


def gradient_error() -> float:
    """Relative error of the input's gradient against a hook on the normalised input, in float64."""
    torch.manual_seed(0)
    norm = GlobalWeightCompensatedLayerNorm(HIDDEN_SIZE, eps=1e-5).double()
    nn.init.normal_(norm.weight, mean=GAIN, std=0.3 * GAIN)
    x = (30 * torch.randn(729, HIDDEN_SIZE, dtype=torch.float64)).requires_grad_()
    grad_output = torch.randn_like(x)
    (actual,) = torch.autograd.grad(norm(x), x, grad_output)
    centred = x - x.mean(-1, keepdim=True)
    x_hat = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x_hat.register_hook(lambda gradient: gradient / norm.weight.detach().abs().mean().clamp(min=1e-3))
    (expected,) = torch.autograd.grad(x_hat * norm.weight + norm.bias, x, grad_output)
    return ((actual - expected).norm() / expected.norm()).item()


def time_ratios(repeats: int, device: str, num_tokens: int = NUM_TOKENS) -> list[float]:
    """Time of forward and backward over that of `nn.LayerNorm`, one per repeat, in float32."""
    x = torch.randn(num_tokens, HIDDEN_SIZE, device=device, requires_grad=True)
    grad_output = torch.randn_like(x)
    ours, theirs = (kind(HIDDEN_SIZE).to(device) for kind in (GlobalWeightCompensatedLayerNorm, nn.LayerNorm))

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(norm: nn.Module) -> float:
        x.grad = norm.weight.grad = norm.bias.grad = None
        started = now()
        norm(x).backward(grad_output)
        return now() - started

    for norm in (ours, theirs) * 3:
        seconds(norm)
    # Each goes first equally often: a machine that gets slower or faster must not favour one.
    orders = [(ours, theirs) if repeat % 2 else (theirs, ours) for repeat in range(repeats)]
    times = [{norm: seconds(norm) for norm in order} for order in orders]
    return [elapsed[ours] / elapsed[theirs] for elapsed in times]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--repeats", type=int, default=60, help="how often each is timed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    low, median, high = statistics.quantiles(time_ratios(args.repeats, args.device), n=4)
    result = {
        "gradient_relative_error_float64": gradient_error(),
        "time_over_layernorm": {"median": median, "quartiles": [low, high], "n": args.repeats},
        "shape": [NUM_TOKENS, HIDDEN_SIZE],
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(args.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
