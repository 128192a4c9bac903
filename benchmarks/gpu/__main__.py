"""A GPU's figures in one call of under ten minutes: what training reaches, beside TRL's trainer and a bare loop.

    python -m benchmarks.gpu --results benchmarks/results/NVIDIA-H100-80GB-HBM3/gpu.jsonl
    python -m benchmarks.gpu --table benchmarks/results/NVIDIA-H100-80GB-HBM3/gpu.jsonl
    python -m benchmarks.gpu --cpu --results runs/rehearsal.jsonl

Parts run in the order of their worth, each in a process with a limit of its own. After each arm a line is written to
the file of results, and arms that have one are skipped: the same command goes on where it was cut off. Delete a line
to measure its arm again. `--cpu` rehearses all of it with tiny shapes. README.md beside this file says more.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


ROOT = Path(__file__).parents[2]
# Seconds that a part may take, of which about ten go for loading the libraries. In order of worth.
LIMITS = {
    "ceilings": 60,
    "norm": 45,
    "attention": 60,
    "small": 170,
    "large": 230,
    "large_full": 90,
    "large_4bit": 300,  # most of it to compile layers with 4-bit weights
}
# A process that has less time left isn't started.
LEAST_SECONDS = 25


def run_part(part: str, args: argparse.Namespace, seconds: float, first_died: bool) -> int | None:
    """Measure the missing arms of a part in a process of its own. Returns the process's status, `None` if it was ended
    after so many `seconds`. `first_died` says that the first of these arms ended the process before."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "benchmarks.gpu.part", part),
            f"--device={'cpu' if args.cpu else 'cuda'}",
            f"--results={args.results.absolute()}",
            f"--folder={folder}",
        ]
        if args.commit is not None:
            command.append(f"--commit={args.commit}")
        if first_died:
            command.append("--first_died")

        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "passive",  # must stand before torch is loaded
            "TOKENIZERS_PARALLELISM": "false",
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


def say(text: str) -> None:
    """Tell how it goes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_all(args: argparse.Namespace) -> None:
    """Run the parts until the time is over."""
    started = time.monotonic()
    for part in args.parts:
        limit = float("inf") if args.cpu else LIMITS[part]
        part_started = time.monotonic()
        left = args.seconds - (part_started - started)
        finish_part(part, args, min(limit, left))
        say(f"{part}: {time.monotonic() - part_started:.0f} s, {time.monotonic() - started:.0f} s in all")


def finish_part(part: str, args: argparse.Namespace, seconds: float) -> None:
    """Run a part. Where its process fails, another goes on with the arms that are left."""
    started = time.monotonic()
    first_died = False
    while True:
        left = seconds - (time.monotonic() - started)
        if left < LEAST_SECONDS:
            say(f"No time is left for {part}: give the same command again for what is missing.")
            return

        lines_before = count_lines(args.results)
        status = run_part(part, args, left, first_died)
        if status is None or status == 0:
            return

        gets_on = count_lines(args.results) > lines_before
        if first_died and not gets_on:
            say(f"{part} failed.")
            return
        first_died = not gets_on


def count_lines(results: Path) -> int:
    """Lines of a file that may not be there."""
    return len(results.read_bytes().splitlines()) if results.exists() else 0


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="file that lines of results are added to")
    parser.add_argument("--parts", nargs="+", choices=LIMITS, default=list(LIMITS), help="only these, in this order")
    parser.add_argument("--seconds", type=float, help="no process outlives them; 540, and with --cpu no limit")
    parser.add_argument("--commit", help="of this code, where there is no git repository to read it from")
    parser.add_argument("--cpu", action="store_true", help="rehearse with tiny shapes")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a file of results as Markdown, and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)

    if args.table is not None:
        from benchmarks.gpu.table import render

        sys.stdout.write(render(args.table))
        return

    if args.results is None:
        parser.error("give --results, the file that lines of results are added to")
    if args.seconds is None:
        args.seconds = float("inf") if args.cpu else 540.0
    run_all(args)


if __name__ == "__main__":
    main()
