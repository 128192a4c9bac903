"""A GPU's figures, by this project's own commands, each in a process of its own.

    make emoji                                  # the model and rows by default
    python -m benchmarks.gpu                    # all parts that have no figures yet
    python -m benchmarks.gpu --parts qlora --model runs/Qwen2.5-7B-Instruct/stage1 --data <folder of its rows>

Each part writes its figures at once to `benchmarks/results/<device>/<part>-<model>.json`. One that has some is not run
again. Memory is what the device holds, so nothing else should run on it. `--cpu` rehearses the parts without one.
"""

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.real import ROWS, parse


logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]


def taken() -> int:
    """Bytes of the device's memory that all processes hold."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def run(options: argparse.Namespace, *command: object) -> dict[str, float]:
    """Run a module or script in a process of its own; its seconds, and the most memory that it held. Raises
    `RuntimeError` if it fails; its output says why."""
    before = most = 0 if options.cpu else taken()
    started = time.monotonic()
    with subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT) as process:
        while process.poll() is None:
            most = max(most, 0 if options.cpu else taken())
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{command[0]} {command[1]} failed with status {process.returncode}")
    return {"seconds": time.monotonic() - started, "peak_memory_gib": (most - before) / 2**30}


def measure_norm(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The norm's time over nn.LayerNorm's, and its gradient's error."""
    device = ["--device=cpu", "--repeats=2"] if options.cpu else ["--device=cuda"]
    run(options, "-m", "benchmarks.norm", *device, f"--output={folder}/out.json")
    return json.loads((folder / "out.json").read_text())


def measure_training(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both stages of ours, padded and packed, and TRL's on the same rows: tokens/s and memory."""
    device = ["--device=cpu"] if options.cpu else ["--device=cuda"]
    run(
        options, "-m", "benchmarks.real", "--alone", *device, f"--model={options.model}",
        f"--data={options.data}", f"--steps={options.steps}", f"--batch_size={options.batch_size}",
        f"--attention={options.attention}", f"--output={folder}/out.json",
    )  # fmt: skip
    return json.loads((folder / "out.json").read_text())


def measure_qlora(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The recipe qlora.yaml with fewer samples a step: memory, and what its own log says."""
    given = {
        "model_name_or_path": options.model, "dataset_name": options.data / ROWS["instruct"], "output_dir": folder,
        "image_folder": options.data, "global_batch_size": options.batch_size, "max_steps": options.steps,
        "logging_steps": 1, "save_strategy": "no", "attn_implementation": options.attention,
        **({"use_cpu": True, "bf16": False} if options.cpu else {}),
    }  # fmt: skip
    recipe = "training/recipes/Qwen2.5-7B-Instruct/qlora.yaml"
    figures = run(options, "training/sft.py", "--config", recipe, *(f"--{name}={of}" for name, of in given.items()))
    return {**figures, "log": [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]}


PARTS = {"norm": measure_norm, "training": measure_training, "qlora": measure_qlora}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, help="folder of the figures")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, to find mistakes")
    options = parse(parser, argv)
    if not options.cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --cpu rehearses every part without one")
    device = "cpu" if options.cpu else torch.cuda.get_device_name()
    results = options.results or ROOT / "benchmarks" / "results" / re.sub(r"\W+", "-", device)
    results.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        if (file := results / f"{name}-{options.model.parent.name}.json").exists():
            logger.info("%s has figures in %s", name, file)
            continue
        with tempfile.TemporaryDirectory() as folder:
            figures = PARTS[name](options, Path(folder))
        record = {"device": device, "settings": {name: str(of) for name, of in vars(options).items()}, **figures}
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        logger.info("%s\n%s", name, json.dumps(figures)[:2000])


if __name__ == "__main__":
    main()
