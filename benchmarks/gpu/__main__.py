"""Measures training on a GPU within ten minutes: our command, TRL's trainer, and a loop of plain PyTorch.

    python -m benchmarks.gpu --results benchmarks/results/NVIDIA-H100-80GB-HBM3/gpu.jsonl
    python -m benchmarks.gpu --table benchmarks/results/NVIDIA-H100-80GB-HBM3/gpu.jsonl
    python -m benchmarks.gpu --cpu --results runs/rehearsal.jsonl

The first command measures. The second prints the tables of a file of results. The third rehearses on the CPU, with
tiny shapes.

An arm is one configuration, such as a trainer with its options, and a part is a list of arms. The parts run one after
the other, what is least known first. Each part has a process of its own, which is killed when the part's time is over.

After each arm, a line is added to the file of results. Arms that have a line in this file are skipped, so a command
that was cut off goes on when it is given again. With `--repeats 3`, arms are measured, in turns, until each has three
lines. See also README.md in this folder.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.table import render


ROOT = Path(__file__).parents[2]
# The seconds that each part may take, about ten of them for loading libraries. What is least known comes first.
LIMITS = {
    "small": 200,
    "large": 320,
    "large_full": 90,
    "attention": 60,
    "norm": 45,
    "ceilings": 60,
    "large_4bit": 300,  # mostly for compiling layers with 4-bit weights
}
# No process is started if fewer seconds are left, because it would mostly load libraries.
LEAST_SECONDS = 25


def run_all(args: argparse.Namespace) -> None:
    """Measure all parts, until the time is over."""
    started = time.monotonic()
    for part in args.parts:
        part_started = time.monotonic()
        seconds_left = args.seconds - (part_started - started)
        part_limit = float("inf") if args.cpu else LIMITS[part]
        finish_part(part, args, seconds=min(part_limit, seconds_left))

        ended = time.monotonic()
        say(f"{part}: {ended - part_started:.0f} s, {ended - started:.0f} s in all")


def finish_part(part: str, args: argparse.Namespace, seconds: float) -> None:
    """Measure a part in at most `seconds`. If its process fails, a new process measures the arms that are left."""
    started = time.monotonic()
    first_arm_died = False
    while True:
        seconds_left = seconds - (time.monotonic() - started)
        if seconds_left < LEAST_SECONDS:
            say(f"No time is left for {part}. If arms are missing, give the same command again.")
            return

        lines_before = count_lines(args.results)
        exit_status = run_part(part, args, seconds_left, first_arm_died)
        was_killed = exit_status is None
        is_done = exit_status == 0
        if was_killed or is_done:
            return

        wrote_lines = count_lines(args.results) > lines_before
        if first_arm_died and not wrote_lines:
            # The process failed before it wrote an error for the arm that died, and so would the next process.
            say(f"{part} failed.")
            return
        # A process that wrote no line died in its first arm. Otherwise it died in a later arm, with which the next
        # process begins.
        first_arm_died = not wrote_lines


def run_part(part: str, args: argparse.Namespace, seconds: float, first_arm_died: bool) -> int | None:
    """Measure the missing arms of a part in a process of its own.

    Args:
        part: The part.
        args: The command's options.
        seconds: Seconds after which the process is killed.
        first_arm_died: Whether an earlier process died while it measured the first missing arm. The new process then
            writes an error for this arm instead of measuring it again.

    Returns:
        The process's exit status; `None` if it was killed because its time was over.
    """
    device = "cpu" if args.cpu else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.part",
            part,
            f"--device={device}",
            f"--results={args.results.absolute()}",
            f"--folder={folder}",
            f"--repeats={args.repeats}",
        ]
        if args.commit is not None:
            command.append(f"--commit={args.commit}")
        if first_arm_died:
            command.append("--first_arm_died")

        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "passive",  # waiting threads sleep; torch reads this variable while it is loaded
            "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warns in processes that fork
            "HF_DATASETS_CACHE": f"{folder}/datasets",
            "HF_HUB_OFFLINE": "1",
        }
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            say(f"{part} was ended after {seconds:.1f} s")
            return None
        finally:
            process.kill()
            process.wait()


def count_lines(results: Path) -> int:
    """The number of lines in the file of results; 0 if there is no file yet."""
    if not results.exists():
        return 0
    return len(results.read_bytes().splitlines())


def say(text: str) -> None:
    """Print a line at once, before the lines of the next process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="file that lines of results are added to")
    parser.add_argument(
        "--parts", nargs="+", choices=LIMITS, default=list(LIMITS), help="measure only these parts, in this order"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="seconds after which all processes are ended; 540 by default, and no limit with --cpu",
    )
    parser.add_argument("--repeats", type=int, default=1, help="measure each arm until it has so many lines")
    parser.add_argument("--commit", help="commit of this code, if there is no git repository to read it from")
    parser.add_argument("--cpu", action="store_true", help="rehearse with tiny shapes")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a file of results as Markdown, and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)

    if args.table is not None:
        sys.stdout.write(render(args.table))
        return

    if args.results is None:
        parser.error("give --results, the file that lines of results are added to")
    if args.seconds is None:
        args.seconds = float("inf") if args.cpu else 540.0
    run_all(args)


if __name__ == "__main__":
    main()
