"""Runs the steps of an example. Each step runs in its own process, and steps that are done are skipped."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]  # the root of the repository


@dataclass(frozen=True)
class Step:
    """A step of an example.

    Attributes:
        title: What the step makes.
        command: The arguments of `python`. The command runs in the repository's root.
        last_files: The files that the step writes last, relative to the root. If all of them exist, the step is done.
    """

    title: str
    command: list[str]
    last_files: tuple[Path, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether all of `last_files` exist. A step without `last_files` is never done, so it always runs."""
        if not self.last_files:
            return False
        return all((ROOT / path).exists() for path in self.last_files)


def run_steps(steps: Sequence[Step]) -> None:
    """Run the steps that are not done, in their order.

    Raises:
        SystemExit: if a step fails, or if a step is not done although a later step is.
    """
    started = time.monotonic()
    for number, step in enumerate(steps, start=1):
        logger.info("\n[%d/%d] %s", number, len(steps), step.title)
        if step.is_done:
            logger.info("      done already: %s", step.last_files[0].parent)
            continue
        later_steps = steps[number:]  # without `step` itself, because `number` counts from 1
        require_no_files(later_steps)
        run_step(step)
    logger.info("\n%.0f s in all", time.monotonic() - started)


def require_no_files(later_steps: Sequence[Step]) -> None:
    """Check that no step after the one to run has written its last files. The run would make these files outdated.

    Raises:
        SystemExit: if one of these files exists.
    """
    outdated = []
    for step in later_steps:
        for path in step.last_files:
            if (ROOT / path).exists():
                outdated.append(str(path.parent))
    if outdated:
        folders = ", ".join(outdated)
        raise SystemExit(f"This step's result is missing, but {folders} was made from it: remove that too.")


def run_step(step: Step) -> None:
    """Run a step, and print how long it took.

    Raises:
        SystemExit: if the step fails.
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # hides GPUs, so that every machine gives the same numbers
        "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warns in processes that fork
        "TRANSFORMERS_VERBOSITY": "error",  # hides transformers' warnings
        "OMP_WAIT_POLICY": "passive",  # otherwise waiting threads spin, and starve each other on a busy machine
    }
    started = time.monotonic()
    process = subprocess.run([sys.executable, *step.command], cwd=ROOT, env=environment)
    if process.returncode != 0:
        raise SystemExit("This step failed, as said above. Run the same command again to go on from this step.")
    logger.info("      %.0f s", time.monotonic() - started)
