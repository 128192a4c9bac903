"""What probing costs: a forward pass with every hook of the diagnostics against one without.

    python -m benchmarks.diagnostics --output benchmarks/results/diagnostics_cpu.json

Plain and probed passes alternate in one process, so that other load affects both. Peak memory is measured in a
separate process for each.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from tqdm import tqdm
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.memory import process_memory
from diagnostics.model_report import spread_layers
from diagnostics.probe import Probe
from diagnostics.tokens import classify_sample, token_ids


logger = logging.getLogger(__name__)

IMAGE_TOKEN = 999
LENGTHS = (300, 600, 1200)
KEYS = 64


def build_model() -> LlavaForConditionalGeneration:
    """A random Llava of 30 million weights, 144 visual tokens a picture."""
    vision = CLIPVisionConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        image_size=168,
        patch_size=14,
    )
    text = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1000, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    ).eval()


def build_sample(length: int) -> dict[str, torch.Tensor]:
    """A sample of `length` tokens, including a picture's."""
    ids = torch.randint(3, 900, (1, length), generator=torch.Generator().manual_seed(0))
    ids[:, 8 : 8 + 144] = IMAGE_TOKEN
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.rand(1, 3, 168, 168)}


@torch.no_grad()
def run_pass(model: LlavaForConditionalGeneration, sample: dict[str, torch.Tensor], probed: bool) -> int:
    """One pass, probed as `python -m diagnostics` does it. Returns the bytes that the probe keeps."""
    if not probed:
        model.base_model(**sample)
        return 0
    positions = torch.linspace(0, sample["input_ids"].shape[1] - 1, KEYS).long()
    tokens = classify_sample(sample, token_ids(model))
    with Probe(model, sample, tokens, layers=spread_layers(8), key_positions=positions) as probe:
        model.base_model(**sample)
    return sum(tensor.nbytes for tensor in _tensors(vars(probe.record())))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)


def time_passes(length: int, repetitions: int) -> dict[str, Any]:
    """Ratio of probed to plain passes, taken in pairs."""
    model, sample = build_model(), build_sample(length)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    kept = 0
    for repetition in tqdm(range(repetitions + 2), desc=f"{length} tokens"):
        for probed in (False, True) if repetition % 2 else (True, False):
            started = time.perf_counter()
            kept = max(kept, run_pass(model, sample, probed))
            if repetition >= 2:  # the first ones warm up
                seconds[probed].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(seconds[False], seconds[True], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "tokens": length,
        "plain_ms": 1000 * median(seconds[False]),
        "probed_ms": 1000 * median(seconds[True]),
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "kept_mib": kept / 2**20,
    }


def peak_memory(length: int, probed: bool) -> float:
    """Peak resident memory, in MiB, of a process that runs three passes."""
    command = [sys.executable, "-m", "benchmarks.diagnostics", "--peak", str(length), str(int(probed))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20, help="pairs of passes (default: 20)")
    parser.add_argument("--output", type=Path, help="file for the results")
    parser.add_argument("--peak", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak is not None:
        model, sample = build_model(), build_sample(args.peak[0])
        for _ in range(3):
            run_pass(model, sample, bool(args.peak[1]))
        sys.stdout.write(str(process_memory("VmHWM") / 2**20))
        return
    results = []
    for length in LENGTHS:
        result = time_passes(length, args.repetitions)
        result["peak_mib"] = {
            name: peak_memory(length, probed) for name, probed in (("plain", False), ("probed", True))
        }
        results.append(result)
        logger.info(
            "%5d tokens: probed / plain %.2f (quartiles %.2f, %.2f); kept %.2f MiB; peak %.0f MiB against %.0f",
            length,
            result["ratio"],
            *result["ratio_quartiles"],
            result["kept_mib"],
            result["peak_mib"]["probed"],
            result["peak_mib"]["plain"],
        )
    if args.output is not None:
        report = {
            "command": f"python -m benchmarks.diagnostics --repetitions {args.repetitions}",
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "results": results,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
