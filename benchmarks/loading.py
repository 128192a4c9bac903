"""Host memory of loading a model on several processes: each loads all weights, or only the main one does.

    python -m benchmarks.loading --output benchmarks/results/loading_cpu.json

The figure is the peak of a process's private memory before a GPU gets the weights. Pages of the checkpoint's file,
which the processes share and the system can drop, are not counted.
"""

import argparse
import json
import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from torch import distributed as dist

from benchmarks.memory import process_memory
from benchmarks.synthetic import SIZES, write_model
from training.arguments import parse_arguments
from training.run import describe_environment


logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
WAYS = ("each process loads", "FSDP2", "DDP, DeepSpeed")


class Peak:
    """The peak memory of this process, sampled every 5 ms."""

    def __init__(self) -> None:
        self.before = self.most = process_memory("RssAnon")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, process_memory("RssAnon"))

    def stop(self) -> float:
        """Peak memory above that at the start, in GiB."""
        self._done.set()
        self._thread.join()
        return (max(self.most, process_memory("RssAnon")) - self.before) / 2**30


def load(rank: int, folder: str, way: str) -> None:
    """One process of a run: load the model as stage 2 does, and write how much memory that took."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_PROCESSES)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29531"}
    if way != "DDP, DeepSpeed":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(way == "FSDP2").lower()
    from training.loading import load_base, make_room, prepare_model

    run_args, args = parse_arguments(
        f"--model_name_or_path {folder} --output_dir {folder} --dataset_name none --stage instruct "
        "--vision_learning_rate 2e-6 --use_cpu true --bf16 false".split()
    )
    assert args.world_size == NUM_PROCESSES
    peak = Peak()
    model = load_base(run_args, args)
    trained, _ = prepare_model(model, run_args, args)
    make_room(trained)
    taken = peak.stop()
    size = sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**30
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps({"taken": taken, "weights": size}))
    dist.barrier()
    dist.destroy_process_group()


def measure(folder: Path) -> dict[str, Any]:
    """Peak memory of each process in each way, in GiB, and the weights' own size in float32."""
    report: dict[str, Any] = {}
    for way in WAYS:
        mp.spawn(load, (str(folder), way), nprocs=NUM_PROCESSES)
        found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_PROCESSES)]
        report["weights_gib"] = found[0]["weights"]
        report[way] = [process["taken"] for process in found]
        logger.info("%-20s%s GiB", way, "".join(f"{taken:8.3f}" for taken in report[way]))
    return report


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3, help="decoder layers, at the width of Qwen2.5-7B")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    size = SIZES["Qwen2.5-7B"]
    size.text["num_hidden_layers"], size.text["vocab_size"], size.vision["num_hidden_layers"] = args.layers, 2048, 2
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), size, "cpu")
        report = measure(Path(name))
    if args.output is not None:
        environment = vars(describe_environment("cpu", NUM_PROCESSES, resumed=False))
        args.output.write_text(json.dumps({"environment": environment, **report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
