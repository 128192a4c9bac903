"""Measures the most that the device can do: matrix products in bfloat16, and a copy within its memory."""

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.results import Arm, Figures
from benchmarks.gpu.stopwatch import Stopwatch


# The shape of each product: the rows and the columns of the left matrix, and the columns of the right matrix. The last
# two come from the measured models' MLPs: their left matrices have about as many rows as a forward pass has tokens.
PRODUCTS = {
    "product 8192 x 8192 x 8192": (8192, 8192, 8192),
    "product of Qwen2.5-7B's MLP": (8192, 3584, 18944),
    "product of SmolLM2-135M's MLP": (4096, 576, 1536),
}
COPIED_BYTES = 4 * 2**30


def arms(device: torch.device) -> list[Arm]:
    """The arms of the products, then the arm of the copy. On a CPU, the matrices and the copied memory are small."""
    on_gpu = device.type == "cuda"
    shrink = 1 if on_gpu else 64
    repeats = 30 if on_gpu else 2

    product_arms = []
    for name, full_shape in PRODUCTS.items():
        shape = [size // shrink for size in full_shape]
        settings: dict[str, Any] = {"shape": shape, "repeats": repeats}
        product_arms.append(Arm(name, partial(time_product, shape, repeats, device), settings))

    num_bytes = COPIED_BYTES // shrink
    settings = {"bytes": num_bytes, "repeats": repeats}
    copy_arm = Arm("copy", partial(time_copy, num_bytes, repeats, device), settings)
    return [*product_arms, copy_arm]


def time_product(shape: list[int], repeats: int, device: torch.device) -> Figures:
    """The highest and the median speed of `repeats` products."""
    rows, inner, columns = shape
    # Random numbers, because products of zeros would be faster.
    left = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
    right = torch.randn(inner, columns, dtype=torch.bfloat16, device=device)
    output = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)

    for _ in range(3):  # a warm-up
        torch.mm(left, right, out=output)

    stopwatch = Stopwatch(device)
    stopwatch.mark()
    for _ in range(repeats):
        torch.mm(left, right, out=output)
        stopwatch.mark()

    seconds = stopwatch.seconds()
    median_seconds = statistics.median_high(seconds)  # the slower of the two in the middle, not their mean
    flops = 2 * rows * inner * columns
    return {"best_tflops": flops / min(seconds) / 1e12, "median_tflops": flops / median_seconds / 1e12}


def time_copy(num_bytes: int, repeats: int, device: torch.device) -> Figures:
    """The median speed of `repeats` copies."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)

    destination.copy_(source)  # a warm-up
    stopwatch = Stopwatch(device)
    stopwatch.mark()
    for _ in range(repeats):
        destination.copy_(source)
        stopwatch.mark()

    median_seconds = statistics.median_high(stopwatch.seconds())
    # Each byte is read and written.
    return {"median_tb_per_second": 2 * num_bytes / median_seconds / 1e12}
