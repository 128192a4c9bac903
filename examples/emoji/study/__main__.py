"""Runs the study of docs/study.md, and goes on where it stopped. At its end, prints its results.

    python -m examples.emoji.study --records ../main/examples/emoji/study/records.jsonl
    python -m examples.emoji.study --report

The study needs the backbones and the drawings, which the first two steps of `examples.emoji.run` make.

Each run adds its record, which is one line, to the file of records. All runs of a seed must be on one kind of machine.
To count runs of another machine, copy their lines into the file first. Results are printed only at the study's end.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event, Lock
from typing import Any

from normllava.command_line import command, parse

from examples.emoji.parts import RUN
from examples.emoji.study.analysis import report
from examples.emoji.study.cells import (
    Arm,
    Cell,
    Log,
    Machine,
    all_seeds,
    cells_left,
    dropped_seeds,
    has_ended,
    machine_of,
    rates_of,
    runs_that_count,
    whole_seeds,
)
from examples.emoji.study.records import RECORDS, append_line, read_log, require_study_commit
from examples.emoji.study.run import claim_folder, this_machine
from examples.steps import ROOT
from normllava.errors import UserError
from training.folders.run import current_commit


logger = logging.getLogger(__name__)

WORK = RUN / "study"
# The status of a run that was stopped, which is no crash.
STOPPED = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)


def describe_progress(log: Log, machine: Machine) -> str:
    """How much of the study is done, as text. The results are added only if the study has ended."""
    whole = whole_seeds(log.runs)
    lines = [f"{len(whole)} of {len(all_seeds())} seeds are whole: {describe_seeds(whole)}"]
    dropped = dropped_seeds(log)
    if dropped:
        lines.append(f"left the study after two crashes of a run: {', '.join(map(str, dropped))}")
    if has_ended(log):
        lines += [f"The study has ended. {log.end or ''}".strip(), "", report(runs_that_count(log.runs))]
    else:
        lines.append(describe_runs_left(log, machine))
    return "\n".join(lines)


def describe_seeds(whole: dict[int, Machine]) -> str:
    """The whole seeds by learning rate of the projector."""
    seeds_by_rate: dict[float, list[str]] = {}
    for seed in sorted(whole):
        seeds_by_rate.setdefault(rates_of(seed).projector, []).append(str(seed))
    texts = [f"{', '.join(seeds)} at {rate:g}" for rate, seeds in seeds_by_rate.items()]
    return "; ".join(texts) or "none"


def describe_runs_left(log: Log, machine: Machine) -> str:
    """A line that says how many runs are left, and about how long they take on this machine if it has done any."""
    num_left = len(cells_left(log, machine))
    line = f"{num_left} runs are left"
    # The minutes of a run that was stopped and resumed are those since it was resumed, so their mean may be too low.
    minutes = [run["minutes"] for run in log.runs if machine_of(run) == machine]
    if not minutes:
        return line
    hours = num_left * sum(minutes) / len(minutes) / 60
    return f"{line}, about {hours:.1f} hours on this machine, divided by --at_once"


class Runner:
    """Does runs, each in processes of its own. A cell is one run: an arm with a seed.

    Args:
        records: The file that each run's record is added to.
        commit: The commit of the code, which is written into each record.
        at_once: How many cells run at the same time.
    """

    def __init__(self, records: Path, commit: str, at_once: int) -> None:
        self._records = records
        self._commit = commit
        self._at_once = at_once
        self._records_lock = Lock()
        self._has_failed = Event()  # set if a cell has failed, so that no other cell begins
        # All runs of a seed start from one model, the shared start. The seed's lock lets only one run make this model.
        self._start_locks: dict[int, Lock] = {}
        self._environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warns in processes that fork
            "OMP_WAIT_POLICY": "passive",  # otherwise waiting threads spin, and take time from other runs
        }
        if at_once > 1:
            num_cores = os.cpu_count() or 1  # None if the system doesn't say
            threads_per_run = max(1, num_cores // at_once)
            self._environment["OMP_NUM_THREADS"] = str(threads_per_run)

    def run_all(self, cells: Sequence[Cell]) -> None:
        """Run all cells. If a cell fails, the running cells are finished, no other begins, and the error is raised."""
        for cell in cells:
            self._start_locks.setdefault(cell.seed, Lock())
        with ThreadPoolExecutor(self._at_once) as pool:
            futures = [pool.submit(self._begin_cell, cell) for cell in cells]
            for future in as_completed(futures):
                future.result()  # raises the cell's error if it failed

    def _begin_cell(self, cell: Cell) -> None:
        """Run a cell, unless another cell has failed."""
        if self._has_failed.is_set():
            return
        try:
            self._run_cell(cell)
        except BaseException:
            self._has_failed.set()
            raise

    def _run_cell(self, cell: Cell) -> None:
        """Run a cell, add its record to the file of records, and print the study's progress.

        Raises:
            CalledProcessError: if the run crashed or was stopped. A crash, but not a stop, is added to the file.
        """
        shared_start = self._make_start(cell.seed)
        arm_number = list(Arm).index(cell.arm)  # for the folder, since arms' names have spaces
        folder = WORK / f"seed{cell.seed}-arm{arm_number}"
        arm_and_seed = (cell.arm.value, str(cell.seed))
        try:
            self._run_module("examples.emoji.study.run", *arm_and_seed, str(shared_start), str(folder), self._commit)
        except subprocess.CalledProcessError as error:
            if error.returncode in STOPPED:
                raise
            crash = {"crashed": error.returncode, "arm": cell.arm.value, "seed": cell.seed, "commit": self._commit}
            self._append(crash | this_machine()._asdict())
            raise

        self._append(json.loads((folder / "record.json").read_text(encoding="utf-8")))
        shutil.rmtree(folder)
        with self._records_lock:
            log = read_log(self._records)
        logger.info("%s", describe_progress(log, this_machine()))

    def _append(self, line: dict[str, Any]) -> None:
        with self._records_lock:
            append_line(self._records, line)

    def _make_start(self, seed: int) -> Path:
        """Make the seed's shared start, unless this commit has made it already on this machine.

        Returns:
            The folder of the shared start.
        """
        folder = WORK / f"seed{seed}"
        shared_start = folder / "start"
        with self._start_locks[seed]:
            claim_folder(folder, self._commit)  # empties the folder of another commit or machine
            if not shared_start.exists():
                self._run_module("examples.emoji.study.starts", str(seed), str(shared_start))
        return shared_start

    def _run_module(self, module: str, *arguments: str) -> None:
        """Run a module of the study in a process of its own."""
        python_command = [sys.executable, "-m", module, *arguments]
        subprocess.run(python_command, cwd=ROOT, env=self._environment, check=True)


def find_commit(given: str | None) -> str:
    """The commit of this code: git's commit if there is a repository, otherwise the given commit.

    Args:
        given: The value of `--commit`.

    Raises:
        UserError: if files have changed since git's commit, if git's commit is not the given one, or if there is
            neither a repository nor a given commit.
    """
    commit = current_commit()
    if commit is None:
        if given is None:
            raise UserError("This copy has no git repository: give --commit, the hash that it was archived from.")
        return given

    if commit.endswith("-dirty"):
        raise UserError("Files have changed since the last commit: commit them, so that records name their code.")
    if given is not None and given != commit:
        raise UserError(f"--commit {given}: this is {commit}.")
    return commit


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--records",
        type=Path,
        help="the file of records; to do runs, give a file outside this checkout, whose files may not change",
    )
    parser.add_argument(
        "--at_once", type=int, default=1, help="runs at the same time; on a GPU each takes about 6 GiB"
    )
    parser.add_argument("--commit", help="hash of this code's commit, if the code was copied without its repository")
    parser.add_argument(
        "--report", action="store_true", help="run nothing: print what is left, or at the end the results"
    )
    return parser


@command()
def main() -> None:
    """Do the runs that are left, seed by seed."""
    options = parse(build_parser())
    machine = this_machine()
    if options.report:
        logger.info("%s", describe_progress(read_log(options.records or RECORDS), machine))
        return
    if options.records is None:
        raise UserError("--records is missing: give a file outside this checkout, to which each run adds its record.")
    commit = find_commit(options.commit)
    require_study_commit(commit)

    log = read_log(options.records)
    logger.info("%s", describe_progress(log, machine))
    if has_ended(log):
        return

    WORK.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.records.resolve(), commit, options.at_once)
    runner.run_all(cells_left(log, machine))


if __name__ == "__main__":
    main()
