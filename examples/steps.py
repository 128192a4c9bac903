"""Runs the steps of an example, each as a command of its own, and skips what is done."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
# Title, the files that a step writes last (none: it is always run), and the command.
Step = tuple[str, list[Path], list[str]]


def check_order(steps: Sequence[Mapping[Path, Path]]) -> None:
    """Check that no step is missing whose result later ones were made from.

    Args:
        steps: What each step makes, in order, with the file of it that is written last.

    Raises:
        SystemExit: that names what is missing, and what was made from it.
    """
    done = [all(path.exists() for path in results.values()) for results in steps]
    if False in done and True in done[done.index(False) :]:
        missing = done.index(False)
        stale = [path for results in steps[missing + 1 :] for path in results if path.exists()]
        lacking = [path for path, last in steps[missing].items() if not last.exists()]
        raise SystemExit(
            f"Missing or incomplete: {', '.join(map(str, lacking))}. Made from an earlier one: "
            f"{', '.join(map(str, stale))}. Remove these to make them again."
        )


def run_steps(steps: Sequence[Step]) -> None:
    """Run the steps whose files are missing, and those that name none, each in a process of its own.

    Raises:
        SystemExit: if a step is missing whose result later ones were made from.
        subprocess.CalledProcessError: if a step fails; the next start goes on from it.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # the same minutes and the same numbers with and without a GPU
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait starve each other on a busy machine
    }
    check_order([{(ROOT / path).parent: ROOT / path for path in results} for _, results, _ in steps if results])
    started = time.monotonic()
    for number, (title, results, command) in enumerate(steps, start=1):
        logger.info("\n[%d/%d] %s", number, len(steps), title)
        if results and all((ROOT / path).exists() for path in results):
            logger.info("      done already: %s", results[0].parent)
            continue
        step_started = time.monotonic()
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
        logger.info("      %.0f s", time.monotonic() - step_started)
    logger.info("\n%.0f s in all", time.monotonic() - started)
