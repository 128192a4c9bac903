"""Runs the steps of an example, each in a process of its own, and skips the steps that are done."""

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
        title: A title that says what the step makes.
        command: The words after `python`. The command runs in the repository's root.
        last_files: The files that the step writes last, relative to the root. A step without them is always run.
    """

    title: str
    command: list[str]
    last_files: tuple[Path, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether all of `last_files` exist. A step without them is never done."""
        return bool(self.last_files) and all((ROOT / path).exists() for path in self.last_files)


def run_steps(steps: Sequence[Step]) -> None:
    """Run the steps that are not done, each in a process of its own.

    Raises:
        SystemExit: if a step fails, or if its result is missing although a later step's result exists.
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
    """Check that no later step has a result: it would have been made from one that is missing now.

    Raises:
        SystemExit: if a later step has one.
    """
    outdated = []
    for step in later_steps:
        outdated += [str(path.parent) for path in step.last_files if (ROOT / path).exists()]
    if outdated:
        raise SystemExit(f"Its result is missing, but {', '.join(outdated)} was made from it: remove that too.")


def run_step(step: Step) -> None:
    """Run a step, and print how long it took.

    Raises:
        SystemExit: if it fails.
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # a machine with a GPU gives the same numbers
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait starve each other on a busy machine
    }
    started = time.monotonic()
    status = subprocess.run([sys.executable, *step.command], cwd=ROOT, env=environment).returncode
    if status != 0:
        raise SystemExit("This step failed, as said above. The same command goes on from it.")
    logger.info("      %.0f s", time.monotonic() - started)
