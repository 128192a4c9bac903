"""What key adapters and the losses on keys cost: a training pass with them against one with plain LoRA.

    python -m benchmarks.key_alignment --output benchmarks/results/key_alignment_cpu.json

The arms alternate in one process, so that other load affects all equally; the result is the ratio of their times in a
round. Memory is that of all tensors that a forward pass keeps for the backward pass.
"""

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from benchmarks.synthetic import SIZES, synthetic_config, synthetic_processor
from conversations.files import write_whole
from modeling_normllava import NormLlavaForConditionalGeneration
from training.adapters import add_adapters
from training.arguments import BANDWIDTHS
from training.compose import add_key_adapters
from training.key_alignment import KeyAlignment
from training.run import describe_environment
from training.stages import LearningRates, Stage, prepare_stage


logger = logging.getLogger(__name__)

ARMS = ("lora", "keys", "losses")
RANK = 16
NUM_PICTURES = 4


class Arm:
    """A model in training, and its passes."""

    def __init__(self, name: str, size_name: str, device: str, checkpointing: bool) -> None:
        set_seed(0)
        size = SIZES[size_name]
        self.processor = synthetic_processor(size)
        with torch.device(device):
            self.model = NormLlavaForConditionalGeneration._from_config(
                synthetic_config(size, self.processor, ours=True), attn_implementation="sdpa", dtype=torch.float32
            )
        if name != "lora":
            self.model = add_key_adapters(self.model, RANK, alpha=2 * RANK, dropout=0.05)
        add_adapters(self.model, RANK, alpha=2 * RANK, dropout=0.05)
        prepare_stage(self.model, Stage.ADAPT, LearningRates(1e-4, 0.0, 1e-5))
        self.alignment = KeyAlignment(self.model, self.processor, 0.1, 0.1, BANDWIDTHS) if name == "losses" else None
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.enable_input_require_grads()
        self.model.train()

    def inputs(self, length: int) -> dict[str, torch.Tensor]:
        """A row of `length` tokens: pictures, each followed by text, as in a batch of stage 2."""
        config, device = self.model.config, self.model.device
        side = config.vision_config.image_size
        num_tokens = (side // config.vision_config.patch_size) ** 2
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(10, 1000, (NUM_PICTURES, length // NUM_PICTURES), generator=generator)
        input_ids[:, 1 : num_tokens + 1] = config.image_token_id
        inputs = {
            "input_ids": input_ids.view(1, -1),
            "labels": torch.where(input_ids == config.image_token_id, -100, input_ids).view(1, -1),
            "pixel_values": torch.randn(NUM_PICTURES, 3, side, side, generator=generator),
        }
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def run(self, inputs: dict[str, torch.Tensor]) -> None:
        """Forward and backward pass."""
        loss = self.model(**inputs, use_cache=False).loss
        if self.alignment is not None:
            loss = loss + self.alignment.penalty()
        loss.backward()
        self.model.zero_grad()
        if loss.is_cuda:
            torch.cuda.synchronize()

    def kept_mib(self, inputs: dict[str, torch.Tensor]) -> float:
        """Memory that a forward pass keeps for the backward pass, without weights."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.run(inputs)
        return sum(kept.values()) / 2**20


def measure(arms: dict[str, Arm], length: int, rounds: int) -> dict[str, Any]:
    """Times of the alternating arms at one length, as ratios to plain LoRA; and memory."""
    inputs = {name: arm.inputs(length) for name, arm in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            started = time.perf_counter()
            arm.run(inputs[name])
            if number > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    result: dict[str, Any] = {"tokens": length}
    for name, arm in arms.items():
        ratios = [own / plain for own, plain in zip(seconds[name], seconds["lora"], strict=True)]
        result[name] = {
            "seconds": statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios)[::2],
            "kept_mib": arm.kept_mib(inputs[name]),
        }
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Cost of key alignment.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[600, 1200, 2400], help="tokens per row")
    parser.add_argument("--rounds", type=int, default=15, help="passes of each arm and length")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in all arms")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arms = {name: Arm(name, args.size, device, args.checkpointing) for name in ARMS}
    environment = describe_environment(device, 1, resumed=False)
    rows = []
    for length in args.lengths:
        rows.append(measure(arms, length, args.rounds))
        for name in ARMS:
            of = rows[-1][name]
            low, high = of["quartiles"]
            logger.info(
                "%5d tokens, %-6s: %.3f s, %.2f times plain LoRA (quartiles %.2f to %.2f), keeps %.1f MiB",
                length, name, of["seconds"], of["ratio"], low, high, of["kept_mib"],
            )  # fmt: skip
    if args.output is not None:
        settings = {"size": args.size, "rounds": args.rounds, "checkpointing": args.checkpointing, "rank": RANK}
        results = {"threads": torch.get_num_threads(), "settings": settings, "lengths": rows}
        results["environment"] = {**vars(environment)}
        write_whole(args.output, json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
