"""Runs the study of docs/study.md, and goes on where it stopped.

    python -m examples.emoji.study

An arm is one way to make and train a model. A block of the study compares arms: it runs each of its arms with each of
its seeds. The study needs the backbones and the drawings, which the first two steps of `examples.emoji.run` make.

Each run adds a record, which is one line, to `runs/emoji/study/records.jsonl`. All runs of a seed must be on one kind
of CPU or GPU. To count runs of another machine, copy their lines into that file first. A block's results are printed
only when all of its runs are done.
"""

import argparse
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock

from common.console import command, parse
from common.errors import UserError
from examples.emoji.parts import RUN
from examples.emoji.study.analysis import needs_more_seeds, report
from examples.emoji.study.cells import (
    BLOCK_2,
    BLOCK_2_MORE_SEEDS,
    BLOCKS,
    Block,
    Cell,
    Record,
    cells_left,
    records_that_count,
)
from examples.emoji.study.run import claim_folder, processor_name
from examples.steps import ROOT
from training.run import current_commit


logger = logging.getLogger(__name__)

WORK = RUN / "study"
RECORDS = WORK / "records.jsonl"


def read_records() -> list[Record]:
    """The records of the runs that are done, in the order of the file. Of equal lines, only the first counts.

    Raises:
        UserError: if a run has two different records, or if runs were trained on different rows.
    """
    if not RECORDS.exists():
        return []
    lines = RECORDS.read_text(encoding="utf-8").splitlines()
    different_lines = dict.fromkeys(lines)  # unlike a set, keeps the order
    records = [json.loads(line) for line in different_lines]

    runs = set()
    for record in records:
        # "processor" is the kind of CPU or GPU that the run was made on.
        run = (record["block"], record["arm"], record["seed"], record["processor"])
        if run in runs:
            raise UserError(f"{RECORDS} holds two records of the run {run}.")
        runs.add(run)

    fingerprints = {record["data"] for record in records}  # of the rows that the runs were trained on
    if len(fingerprints) > 1:
        raise UserError(f"{RECORDS} holds runs that were trained on different rows.")
    return records


def planned_blocks(records: Sequence[Record]) -> list[Block]:
    """The blocks in the order in which they run. Block 2 has more seeds if its first seeds' results are unclear."""
    if not needs_more_seeds(records):
        return list(BLOCKS)
    longer_block_2 = dataclasses.replace(BLOCK_2, seeds=[*BLOCK_2.seeds, *BLOCK_2_MORE_SEEDS])
    return [longer_block_2 if block == BLOCK_2 else block for block in BLOCKS]


def describe_progress(records: Sequence[Record], processor: str) -> str:
    """Each block's results as text. For a block that isn't done, the text says instead how many runs are left."""
    texts = []
    for block in planned_blocks(records):
        num_left = len(cells_left(block, records, processor))
        if num_left == 0:
            texts.append(report(block, records_that_count(block, records)))
        else:
            texts.append(describe_runs_left(block, num_left, records, processor))
    return "\n".join(texts)


def describe_runs_left(block: Block, num_left: int, records: Sequence[Record], processor: str) -> str:
    """A line that says how many runs of a block are left, and about how long they take on this processor."""
    num_runs = len(block.arms) * len(block.seeds)
    line = f"Block {block.number}: {num_left} of {num_runs} runs left"
    minutes_per_step = measure_minutes_per_step(records, processor)
    if minutes_per_step is None:
        return line
    hours = num_left * block.steps * minutes_per_step / 60
    return f"{line}, about {hours:.1f} hours, divided by --at_once"


def measure_minutes_per_step(records: Sequence[Record], processor: str) -> float | None:
    """The mean minutes of a training step in the runs of this processor; `None` if it has done no run.

    If a run was stopped and resumed, the mean is too low: the record's `minutes` are those since the run was resumed.
    """
    steps_by_block = {block.number: block.steps for block in BLOCKS}
    minutes_per_step = []
    for record in records:
        num_steps = steps_by_block.get(record["block"])  # None for a block that isn't planned
        if record["processor"] == processor and num_steps is not None:
            minutes_per_step.append(record["minutes"] / num_steps)
    if not minutes_per_step:
        return None
    return sum(minutes_per_step) / len(minutes_per_step)


class Runner:
    """Does runs, each in processes of its own. A cell is one run: an arm of a block with a seed.

    Args:
        commit: The commit of the code, which is written into each record.
        at_once: How many cells run at the same time.
    """

    def __init__(self, commit: str, at_once: int) -> None:
        self._commit = commit
        self._at_once = at_once
        self._records_lock = Lock()
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
            futures = [pool.submit(self._run_cell, cell) for cell in cells]
            try:
                for future in as_completed(futures):
                    future.result()  # raises the cell's error if it failed
            finally:
                pool.shutdown(cancel_futures=True)  # waits for the running cells

    def _run_cell(self, cell: Cell) -> None:
        """Run a cell, add its record to the file of records, and print the study's progress."""
        shared_start = self._make_start(cell.seed)
        arm_number = cell.block.arms.index(cell.arm)  # for the folder, since arms' names have spaces
        folder = WORK / f"block{cell.block.number}-arm{arm_number}-seed{cell.seed}"
        block_arm_and_seed = (str(cell.block.number), cell.arm.name, str(cell.seed))
        self._run_module("examples.emoji.study.run", *block_arm_and_seed, str(shared_start), str(folder), self._commit)

        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        with self._records_lock:
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            records = read_records()
        logger.info("%s", describe_progress(records, record["processor"]))
        # Only the models of a block's first seed are kept, so that they can be measured further.
        if cell.seed != cell.block.seeds[0]:
            shutil.rmtree(folder)

    def _make_start(self, seed: int) -> Path:
        """Make the seed's shared start, unless this commit has made it already on this processor.

        Returns:
            The folder of the shared start.
        """
        folder = WORK / f"seed{seed}"
        shared_start = folder / "start"
        with self._start_locks[seed]:
            claim_folder(folder, self._commit)  # empties the folder of another commit or processor
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
        "--at_once", type=int, default=1, help="runs at the same time; on a GPU each takes about 6 GiB"
    )
    parser.add_argument("--commit", help="hash of this code's commit, if the code was copied without its repository")
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing: print how many runs are left, and the results of blocks that are done",
    )
    return parser


@command()
def main() -> None:
    """Do the runs that are left, block by block."""
    options = parse(build_parser())
    WORK.mkdir(parents=True, exist_ok=True)
    processor = processor_name()
    logger.info("%s", describe_progress(read_records(), processor))
    if options.report:
        return

    runner = Runner(find_commit(options.commit), options.at_once)
    while True:
        records = read_records()
        # Block 2's results decide whether it gets more seeds, so the blocks are planned again after each pass.
        cells = next_cells(planned_blocks(records), records, processor)
        if not cells:
            break
        runner.run_all(cells)


def next_cells(blocks: Sequence[Block], records: Sequence[Record], processor: str) -> list[Cell]:
    """The runs that are left of the first unfinished block. The list is empty if all blocks are done."""
    for block in blocks:
        cells = cells_left(block, records, processor)
        if cells:
            return cells
    return []


if __name__ == "__main__":
    main()
