"""Measures those arms of one part that have too few lines in the file of results.

`python -m benchmarks.gpu` starts this module as a process for each part.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.results import Arm, Figures, Line, append_line, read_lines
from training.folders.run import describe_environment


logger = logging.getLogger(__name__)

PARTS = ("ceilings", "norm", "attention", "small", "large", "large_full", "large_4bit")


@dataclass(frozen=True)
class Outcome:
    """The result of an arm: its figures, or the error that ended it."""

    figures: Figures | None = None
    error: str | None = None


def measure_part(
    part: str,
    device: torch.device,
    results: Path,
    folder: Path,
    commit: str | None = None,
    first_arm_died: bool = False,
    repeats: int = 1,
) -> None:
    """Measure the arms of a part in their order, and write a line after each with its figures or its error.

    Args:
        part: One of `PARTS`.
        device: The device to measure on.
        results: The file of results. Arms that have enough lines of this commit there, or one with an error, are
            skipped.
        folder: Folder for the rows, pictures and configs that the arms read.
        commit: Commit of this code; by default the commit that git names.
        first_arm_died: Whether an earlier process died while it measured the first missing arm. This arm then gets a
            line with an error, and isn't measured.
        repeats: How many lines each arm shall have. All arms are measured once before the first is measured again.

    Raises:
        RuntimeError: if an error has left the device unusable for this process. A new process can measure the arms
            that are left.
    """
    environment = describe_environment(device.type, num_processes=1, resumed=False)
    # Lines of other code say nothing of this one's.
    commit = commit or environment.commit
    lines = [line for line in read_lines(results) if line.part == part and line.commit == commit]
    missing_arms = list_missing(make_arms(part, device, folder), lines, repeats)

    def write_line(arm: Arm, outcome: Outcome) -> None:
        line = Line(
            part=part,
            arm=arm.name,
            device=environment.device,
            commit=commit,
            packages=environment.packages,
            settings=arm.settings,
            compared_with=arm.compared_with,
            figures=outcome.figures,
            error=outcome.error,
        )
        append_line(results, line)

    failed: set[str] = set()
    if first_arm_died and missing_arms:
        first_arm = missing_arms[0]
        write_line(first_arm, Outcome(error="Measuring this arm ended the process."))
        failed.add(first_arm.name)

    for arm in missing_arms:
        if arm.name in failed:  # in an earlier round of the repeats
            continue
        logger.info("%s: %s ...", part, arm.name)
        started = time.monotonic()
        outcome = measure_arm(arm)
        write_line(arm, outcome)

        seconds = time.monotonic() - started
        figures_or_error = outcome.figures if outcome.error is None else outcome.error
        logger.info("%s: %s took %.0f s: %s", part, arm.name, seconds, figures_or_error)
        if outcome.error is not None:
            failed.add(arm.name)
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises again if the device itself has failed


def list_missing(arms: Sequence[Arm], lines: Sequence[Line], repeats: int) -> list[Arm]:
    """The arms to measure until each has `repeats` lines, one round after the other. None is tried after an error."""
    num_lines = Counter(line.arm for line in lines)
    failed = {line.arm for line in lines if line.error is not None}
    missing = []
    for round_number in range(repeats):
        missing += [arm for arm in arms if num_lines[arm.name] <= round_number and arm.name not in failed]
    return missing


def make_arms(part: str, device: torch.device, folder: Path) -> list[Arm]:
    """The arms of a part.

    Only the part's own module is imported, because some of the modules load TRL, which takes seconds.
    """
    if part == "ceilings":
        from benchmarks.gpu import ceilings

        return ceilings.arms(device)
    if part == "norm":
        from benchmarks.gpu import norm

        return norm.arms(device)
    if part == "attention":
        from benchmarks.gpu import attention

        return attention.arms(device)
    if part == "small":
        from benchmarks.gpu import small

        return small.arms(device, folder)

    from benchmarks.gpu import large

    if part == "large":
        return large.packed_arms(device, folder)
    if part == "large_full":
        return large.full_arms(device, folder)
    assert part == "large_4bit"
    return large.quantized_arms(device, folder)


def measure_arm(arm: Arm) -> Outcome:
    """Measure an arm. Any error is caught, so that the next arm is measured too."""
    try:
        return Outcome(figures=arm.measure())
    except (Exception, SystemExit) as error:  # our training command ends by `SystemExit`
        return Outcome(error=f"{type(error).__name__}: {str(error)[:1000]}")


def build_parser() -> argparse.ArgumentParser:
    """The options that `python -m benchmarks.gpu` gives to this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--commit")
    parser.add_argument("--first_arm_died", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    args = build_parser().parse_args(argv)
    measure_part(
        args.part,
        device=torch.device(args.device),
        results=args.results,
        folder=args.folder,
        commit=args.commit,
        first_arm_died=args.first_arm_died,
        repeats=args.repeats,
    )


if __name__ == "__main__":
    main()
