"""Runs the study of docs/study.md, and goes on where it stopped.

    python -m examples.emoji.study

Before it, make backbones and drawings: the first two steps of `examples.emoji.run`. Each run adds a line to
`runs/emoji/study/records.jsonl`; lines from another machine go into that file first. A block's results are printed
once all its runs are done, and not before. On a GPU, `--at_once` runs share it.
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
    BLOCKS,
    MORE_SEEDS,
    WHAT_TO_DO,
    Block,
    Cell,
    Record,
    cells_left,
    counted,
)
from examples.emoji.study.run import claim, processor_name
from examples.steps import ROOT
from training.run import describe_environment


logger = logging.getLogger(__name__)

WORK = RUN / "study"
RECORDS = WORK / "records.jsonl"


def read_records() -> list[Record]:
    """The runs that are done, in their order; a line that stands there twice counts once.

    Raises:
        UserError: if a run has two different records, or records are of different rows.
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
    """The blocks in their order; block 2 with eight seeds more where its first look asks for them."""
    blocks = list(BLOCKS)
    if needs_more_seeds(records):
        more = dataclasses.replace(WHAT_TO_DO, seeds=[*WHAT_TO_DO.seeds, *MORE_SEEDS])
        blocks[blocks.index(WHAT_TO_DO)] = more
    return blocks


def describe_progress(records: Sequence[Record], processor: str) -> str:
    """What is left of each block and how long it takes here; of a block that is done, what it shows."""
    minutes_a_step = [
        record["minutes"] / block.steps
        for block in BLOCKS
        for record in records
        if record["block"] == block.number and record["processor"] == processor
    ]
    lines = []
    for block in planned_blocks(records):
        left = len(cells_left(block, records, processor))
        if not left:
            lines.append(report(block, counted(block, records)))
            continue
        line = f"Block {block.number}: {left} of {len(block.arms) * len(block.seeds)} runs left"
        if minutes_a_step:
            hours = left * block.steps * sum(minutes_a_step) / len(minutes_a_step) / 60
            line += f", about {hours:.1f} hours of this processor, one at a time"
        lines.append(line)
    return "\n".join(lines)


class Runner:
    """Runs cells, several at once, each in processes of its own.

    Args:
        commit: The code's commit, written into each record.
        at_once: How many runs share the machine.
    """

    def __init__(self, commit: str, at_once: int) -> None:
        self._commit = commit
        self._writing = Lock()
        self._aligning: dict[int, Lock] = {}
        self._environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
        if at_once > 1:
            threads = max(1, (os.cpu_count() or 1) // at_once)
            self._environment["OMP_NUM_THREADS"] = str(threads)
        self._at_once = at_once

    def run_all(self, cells: Sequence[Cell]) -> None:
        """Run all cells; a failed one raises when the others that had begun are done."""
        for cell in cells:
            self._aligning.setdefault(cell.seed, Lock())
        with ThreadPoolExecutor(self._at_once) as pool:
            futures = [pool.submit(self._run, cell) for cell in cells]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _start(self, seed: int) -> Path:
        """The seed's shared start, made by the first run that needs it; by this code on this processor."""
        folder = WORK / f"seed{seed}"
        with self._aligning[seed]:
            claim(folder, self._commit)
            if not (folder / "start").exists():
                self._python("examples.emoji.study.starts", seed, folder / "start")
        return folder / "start"

    def _run(self, cell: Cell) -> None:
        start = self._start(cell.seed)
        folder = WORK / f"block{cell.block.number}-arm{cell.block.arms.index(cell.arm)}-seed{cell.seed}"
        record_file = folder / "record.json"
        named = (cell.block.number, cell.arm.name, cell.seed)
        self._python("examples.emoji.study.run", *named, start, folder, self._commit)

        with self._writing:
            record = json.loads(record_file.read_text(encoding="utf-8"))
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            records = read_records()
        logger.info("%s", describe_progress(records, record["processor"]))
        # The models of a block's first seed stay, to be looked at.
        if cell.seed != cell.block.seeds[0]:
            shutil.rmtree(folder)

    def _python(self, module: str, *arguments: object) -> None:
        given = [str(argument) for argument in arguments]
        subprocess.run([sys.executable, "-m", module, *given], cwd=ROOT, env=self._environment, check=True)


def find_commit(given: str | None) -> str:
    """The commit of this code, by git, or as given where there is no repository.

    Raises:
        UserError: if files have changed since, another is given, or there is no repository and none is given.
    """
    commit = describe_environment("cpu", 1, resumed=False).commit
    if commit is None and given is None:
        raise UserError("This copy has no git repository: give --commit, the hash that it was archived from.")
    if commit is not None and commit.endswith("-dirty"):
        raise UserError("Files have changed since the last commit: commit them, so that records name their code.")
    if None not in (commit, given) and commit != given:
        raise UserError(f"--commit {given}: this is {commit}.")
    return str(commit or given)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at_once", type=int, default=1, help="runs that share the machine; 15 fit an H100")
    parser.add_argument("--commit", help="hash of this code, where it was copied without its repository")
    parser.add_argument("--report", action="store_true", help="only say what is left and what came out")
    return parser


@command()
def main() -> None:
    """Run what is left, block by block."""
    options = parse(build_parser())
    WORK.mkdir(parents=True, exist_ok=True)
    processor = processor_name()
    logger.info("%s", describe_progress(read_records(), processor))
    if options.report:
        return

    runner = Runner(find_commit(options.commit), options.at_once)
    while True:
        records = read_records()
        unfinished = [cells for block in planned_blocks(records) if (cells := cells_left(block, records, processor))]
        if not unfinished:
            break
        # Block by block: what comes next may depend on what a block shows.
        runner.run_all(unfinished[0])


if __name__ == "__main__":
    main()
