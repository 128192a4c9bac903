"""Speed and exactness of the compensated norm.

    python benchmarks/norm.py --output benchmarks/results/norm_cpu.json

Time is a ratio: forward and backward against `nn.LayerNorm`, alternating in one run, so that other load affects both.
Exactness is the relative error in float64 against the paper's formula (eq. 22 to 26) written out.
"""

import argparse
import json
import logging
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modeling_normllava import GlobalWeightCompensatedLayerNorm


logger = logging.getLogger(__name__)

NUM_TOKENS, HIDDEN_SIZE = 5832, 3584  # eight pictures of 729 tokens, Qwen2.5-7B
GAIN = 0.80 / HIDDEN_SIZE**0.5  # T of Qwen2.5-7B (Table 1) over the root of the width
EPS = 1e-5


def gradient_error() -> float:
    """Relative error of the input's gradient against a hook on the normalised input, in float64."""
    torch.manual_seed(0)
    norm = GlobalWeightCompensatedLayerNorm(HIDDEN_SIZE, eps=EPS).double()
    nn.init.normal_(norm.weight, mean=GAIN, std=0.3 * GAIN)
    x = (30 * torch.randn(729, HIDDEN_SIZE, dtype=torch.float64)).requires_grad_()
    grad_output = torch.randn_like(x)
    (actual,) = torch.autograd.grad(norm(x), x, grad_output)

    centred = x - x.mean(-1, keepdim=True)
    x_hat = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    x_hat.register_hook(lambda gradient: gradient / norm.weight.detach().abs().mean().clamp(min=1e-3))
    (expected,) = torch.autograd.grad(x_hat * norm.weight + norm.bias, x, grad_output)
    return ((actual - expected).norm() / expected.norm()).item()


def time_ratios(repeats: int, device: str, num_tokens: int = NUM_TOKENS, compiled: bool = False) -> list[float]:
    """Time of forward and backward over that of `nn.LayerNorm`, one per repeat, in float32, both compiled or not."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, HIDDEN_SIZE, device=device, requires_grad=True)
    grad_output = torch.randn_like(x)
    ours: Any = GlobalWeightCompensatedLayerNorm(HIDDEN_SIZE, eps=EPS).to(device)
    theirs: Any = nn.LayerNorm(HIDDEN_SIZE, eps=EPS, device=device)
    if compiled:
        ours, theirs = (torch.compile(module, fullgraph=True) for module in (ours, theirs))

    def seconds(norm: nn.Module) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        norm(x).backward(grad_output)
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        x.grad = None
        norm.zero_grad()
        return elapsed

    for norm in (ours, theirs) * 3:
        seconds(norm)
    ratios = []
    for repeat in range(repeats):
        # Each goes first equally often: a machine that gets slower or faster must not favour one.
        order = (ours, theirs) if repeat % 2 else (theirs, ours)
        elapsed = {norm: seconds(norm) for norm in order}
        ratios.append(elapsed[ours] / elapsed[theirs])
    return ratios


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    ratios = time_ratios(args.repeats, args.device)
    quartiles = statistics.quantiles(ratios, n=4)
    result = {
        "gradient_relative_error_float64": gradient_error(),
        "time_over_layernorm": {"median": quartiles[1], "quartiles": [quartiles[0], quartiles[2]], "n": len(ratios)},
        "shape": [NUM_TOKENS, HIDDEN_SIZE],
        "dtype": "float32",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    logger.info("%s", json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
