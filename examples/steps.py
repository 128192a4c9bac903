"""Runs the steps of an example, each as a command of its own, and skips what is done."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """A step of an example.

    Attributes:
        title: What it makes.
        command: Words that follow `python`, in the repository's root.
        last_files: What it writes last, relative to the root. A step without any is always run.
    """

    title: str
    command: list[str]
    last_files: tuple[Path, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether all that it writes last is there."""
        return bool(self.last_files) and all((ROOT / path).exists() for path in self.last_files)


def run_steps(steps: Sequence[Step]) -> None:
    """Run the steps that are not done, each in a process of its own.

    Raises:
        SystemExit: if a step fails, or is missing while there are results that were made from its own.
    """
    started = time.monotonic()
    for number, step in enumerate(steps, start=1):
        logger.info("\n[%d/%d] %s", number, len(steps), step.title)
        if step.is_done:
            logger.info("      done already: %s", step.last_files[0].parent)
            continue
        require_no_results(steps[number:])
        run_step(step)
    logger.info("\n%.0f s in all", time.monotonic() - started)


def require_no_results(later_steps: Sequence[Step]) -> None:
    """Check that nothing is there that was made from a result that is missing.

    Raises:
        SystemExit: if there is.
    """
    made_from = []
    for step in later_steps:
        made_from += [str(path.parent) for path in step.last_files if (ROOT / path).exists()]
    if made_from:
        raise SystemExit(f"Its result is missing, but {', '.join(made_from)} was made from it: remove that too.")


def run_step(step: Step) -> None:
    """Run a step, and say how long it took.

    Raises:
        SystemExit: if it fails.
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # the same minutes and the same numbers with and without a GPU
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait starve each other on a busy machine
    }
    started = time.monotonic()
    status = subprocess.run([sys.executable, *step.command], cwd=ROOT, env=environment).returncode
    if status != 0:
        raise SystemExit("This step failed, as said above. The same command goes on from it.")
    logger.info("      %.0f s", time.monotonic() - started)
