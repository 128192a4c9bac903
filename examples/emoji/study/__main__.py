"""Runs the study of docs/study.md, and goes on where it stopped.

    python -m examples.emoji.study

The study needs the backbones and the drawings, which the first two steps of `examples.emoji.run` make. Each run adds
a line to `runs/emoji/study/records.jsonl`. To go on with runs of another machine, copy their lines into that file
first. A block's results are printed only when all of its runs are done. `--at_once` is the number of runs that share a
GPU.
"""

import argparse
import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
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
    """The records of the runs that are done, in the order of the file. Equal lines are read once.

    Raises:
        UserError: if a run has two different records, or if runs were trained on different rows.
    """
    if not RECORDS.exists():
        return []
    lines = dict.fromkeys(RECORDS.read_text(encoding="utf-8").splitlines())
    records = [json.loads(line) for line in lines]

    runs = Counter((record["block"], record["arm"], record["seed"], record["processor"]) for record in records)
    twice = [run for run, count in runs.items() if count > 1]
    if twice:
        raise UserError(f"{RECORDS} holds two records of the run {twice[0]}.")
    if len({record["data"] for record in records}) > 1:
        raise UserError(f"{RECORDS} holds runs that were trained on different rows.")
    return records


def planned_blocks(records: Sequence[Record]) -> list[Block]:
    """The blocks in the order in which they run. Block 2 has more seeds if its first look asks for them."""
    if not needs_more_seeds(records):
        return list(BLOCKS)
    longer_block_2 = dataclasses.replace(BLOCK_2, seeds=[*BLOCK_2.seeds, *BLOCK_2_MORE_SEEDS])
    return [longer_block_2 if block == BLOCK_2 else block for block in BLOCKS]


def describe_progress(records: Sequence[Record], processor: str) -> str:
    """A text about each block: its results if it is done, otherwise how many runs are left and how long they take."""
    minutes_per_step = measure_minutes_per_step(records, processor)
    texts = []
    for block in planned_blocks(records):
        num_left = len(cells_left(block, records, processor))
        if num_left == 0:
            texts.append(report(block, records_that_count(block, records)))
            continue

        num_runs = len(block.arms) * len(block.seeds)
        text = f"Block {block.number}: {num_left} of {num_runs} runs left"
        if minutes_per_step is not None:
            hours = num_left * block.steps * minutes_per_step / 60
            text += f", about {hours:.1f} hours, divided by --at_once"
        texts.append(text)
    return "\n".join(texts)


def measure_minutes_per_step(records: Sequence[Record], processor: str) -> float | None:
    """Mean minutes of a training step in the runs of this processor; `None` if it has done no run.

    The mean is too low if a run was stopped and resumed: its `minutes` are those since it was resumed.
    """
    steps_by_block = {block.number: block.steps for block in BLOCKS}
    minutes = []
    for record in records:
        if record["processor"] == processor and record["block"] in steps_by_block:
            minutes.append(record["minutes"] / steps_by_block[record["block"]])
    return sum(minutes) / len(minutes) if minutes else None


class Runner:
    """Runs cells, each in processes of its own and several at the same time.

    Args:
        commit: The code's commit, written into each record.
        at_once: How many runs share the machine.
    """

    def __init__(self, commit: str, at_once: int) -> None:
        self._commit = commit
        self._at_once = at_once
        self._records_lock = Lock()
        # A lock for each seed: only one of the seed's runs may make its shared start.
        self._start_locks: dict[int, Lock] = {}
        self._environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
        if at_once > 1:
            threads = max(1, (os.cpu_count() or 1) // at_once)
            self._environment["OMP_NUM_THREADS"] = str(threads)

    def run_all(self, cells: Sequence[Cell]) -> None:
        """Run all cells. If one fails, those that have begun are finished, and the failure is raised."""
        for cell in cells:
            self._start_locks.setdefault(cell.seed, Lock())
        with ThreadPoolExecutor(self._at_once) as pool:
            futures = [pool.submit(self._run, cell) for cell in cells]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _run(self, cell: Cell) -> None:
        start = self._make_start(cell.seed)
        arm_number = cell.block.arms.index(cell.arm)
        folder = WORK / f"block{cell.block.number}-arm{arm_number}-seed{cell.seed}"
        cell_names = (cell.block.number, cell.arm.name, cell.seed)
        self._run_module("examples.emoji.study.run", *cell_names, start, folder, self._commit)

        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        with self._records_lock:
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            records = read_records()
        logger.info("%s", describe_progress(records, record["processor"]))
        # The models of a block's first seed are kept, so that they can be measured further.
        if cell.seed != cell.block.seeds[0]:
            shutil.rmtree(folder)

    def _make_start(self, seed: int) -> Path:
        """Make the seed's shared start unless this code has made it on this processor. Returns its folder."""
        folder = WORK / f"seed{seed}"
        start = folder / "start"
        with self._start_locks[seed]:
            claim_folder(folder, self._commit)
            if not start.exists():
                self._run_module("examples.emoji.study.starts", seed, start)
        return start

    def _run_module(self, module: str, *arguments: object) -> None:
        words = [str(argument) for argument in arguments]
        subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, env=self._environment, check=True)


def find_commit(given: str | None) -> str:
    """The commit of this code: git's if there is a repository, otherwise the given one.

    Args:
        given: The value of `--commit`.

    Raises:
        UserError: if files have changed since the commit, if git's commit is not the given one, or if there is neither
            a repository nor a given commit.
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
    parser.add_argument("--at_once", type=int, default=1, help="runs that share the machine; 15 fit an H100")
    parser.add_argument("--commit", help="hash of this code, where it was copied without its repository")
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing: print how many runs are left, and the results of blocks that are done",
    )
    return parser


@command()
def main() -> None:
    """Run the runs that are left, block by block."""
    options = parse(build_parser())
    WORK.mkdir(parents=True, exist_ok=True)
    processor = processor_name()
    logger.info("%s", describe_progress(read_records(), processor))
    if options.report:
        return

    runner = Runner(find_commit(options.commit), options.at_once)
    while True:
        records = read_records()
        # The blocks are planned anew after each: block 2's results decide whether it gets more seeds.
        cells = next_cells(planned_blocks(records), records, processor)
        if not cells:
            break
        runner.run_all(cells)


def next_cells(blocks: Sequence[Block], records: Sequence[Record], processor: str) -> list[Cell]:
    """The runs that are left of the first unfinished block; none if all blocks are done."""
    for block in blocks:
        cells = cells_left(block, records, processor)
        if cells:
            return cells
    return []


if __name__ == "__main__":
    main()
