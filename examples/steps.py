"""Runs the steps of an example, each as a command of its own, and skips what is done."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
# Title, the files that a step writes last (none: it is always run), and the command.
Step = tuple[str, list[Path], list[str]]


def run_steps(steps: Sequence[Step]) -> None:
    """Run the steps whose files are missing, and those that name none, each in a process of its own.

    Raises:
        SystemExit: if a step fails, or is missing while there are results that were made from its own.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # the same minutes and the same numbers with and without a GPU
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait starve each other on a busy machine
    }
    started = time.monotonic()
    for number, (title, results, command) in enumerate(steps, start=1):
        logger.info("\n[%d/%d] %s", number, len(steps), title)
        if results and all((ROOT / path).exists() for path in results):
            logger.info("      done already: %s", results[0].parent)
            continue
        made_from = [str(path.parent) for _, later, _ in steps[number:] for path in later if (ROOT / path).exists()]
        if made_from:
            raise SystemExit(f"Its result is missing, but {', '.join(made_from)} was made from it: remove that too.")
        step_started = time.monotonic()
        if subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode:
            raise SystemExit("This step failed, as said above. The same command goes on from it.")
        logger.info("      %.0f s", time.monotonic() - step_started)
    logger.info("\n%.0f s in all", time.monotonic() - started)
