"""Run the depth study: does aligning norms help in a deeper decoder? DEPTH.md says what is asked and what decides.

    make depth                                  # everything, days; the comparison that decides comes early
    python examples/digits/depth.py --quick     # the same code on tiny sizes, 15 minutes, says nothing of the question

A finished run adds its record to `benchmarks/results/depth.json`; a run whose record is there is not made again, on
any machine. Stop it whenever you like: the same command goes on, and loses no more than the runs that were under way.
With a GPU, stages and evaluation run on it, as many runs at once as `--workers` says; backbones are made on the CPU.
In the background, and paused while the machine is needed:

    setsid nohup nice -n 19 make depth > depth.txt 2>&1 &
    kill -STOP -- -$(ps -o pgid= $(cat runs/depth/pid) | tr -d ' ')    # -CONT goes on, -TERM stops
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import groupby, zip_longest
from pathlib import Path

from depth_plan import QUICK, Job, Line, Plan, Study, lines, read_records, score, size_of
from filelock import FileLock, Timeout
from tqdm import tqdm

from examples.steps import ROOT


logger = logging.getLogger(__name__)

RESULTS = ROOT / "benchmarks" / "results" / "depth.json"
TEXT_COST = 120  # seconds for each layer of a language model, roughly; see Job.cost
# One thread each: runs share a machine better than threads do, and numbers don't depend on how many cores there are.
# One GPU at most, since the Trainer would spread a batch over several: the first of those that are offered.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def missing(line: Line, plan: Plan) -> list[Job]:
    """Jobs of a line that have no record."""
    return [job for job in line.jobs(plan) if job.key not in plan.records["runs"]]


def missing_decoders(line: Line, plan: Plan) -> list[str]:
    """Language models of a line that have no record."""
    return [decoder for decoder in line.decoders if decoder not in plan.records["language_models"]]


def time_left(study: Study, plan: Plan) -> float:
    """Seconds on one core of everything that has no record, roughly."""
    keys, seconds = set[str](), 0.0
    for line in lines(study):
        for name, cost in [
            *((job.key, job.cost) for job in missing(line, plan)),
            *((decoder, text_cost(decoder)) for decoder in missing_decoders(line, plan)),
        ]:
            seconds += 0 if name in keys else cost
            keys.add(name)
    return seconds


def text_cost(decoder: str) -> float:
    """Seconds on one core that a language model takes, roughly."""
    layers, width = size_of(decoder)
    return TEXT_COST * layers * (width / 128) ** 1.6


class Runner:
    """Runs a study, several runs at once."""

    def __init__(self, study: Study, root: Path, results: Path, workers: int) -> None:
        from depth_runs import Workplace, prepare, set_up_worker  # here, as it takes seconds to import

        self.study, self.results, self.place = study, results, Workplace(study, root, results)
        prepare(self.place)
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, context, set_up_worker, (root / "log.txt",))
        self.bar = tqdm(
            total=round(time_left(study, self.plan())), unit="s", desc="Depth", smoothing=0, dynamic_ncols=True
        )

    def plan(self) -> Plan:
        """The plan by the records so far."""
        return Plan(self.study, read_records(self.results))

    def run(self, until: str | None) -> None:
        """Every line in its order, up to and with the one that is named."""
        planned = lines(self.study)
        for line, following in zip_longest(planned, planned[1:]):
            while futures := list(self.submit(line, None if line.title == until else following)):
                try:
                    self.follow(futures)
                except BaseException as error:
                    logger.error("Stopping: %r. Runs under way are finished first.", error)
                    self.pool.shutdown(cancel_futures=True)
                    raise
            if line.title == until:
                return

    def submit(self, line: Line, following: Line | None) -> Iterator[Future]:
        """What of a line can be run now. The language model that the next one needs comes first: it takes one worker
        for long, and the line's runs the others."""
        from depth_runs import make_language_model, run_jobs

        plan = self.plan()
        decoders = missing_decoders(line, plan)
        for decoder in decoders + (missing_decoders(following, plan) if following else []):
            yield self.pool.submit(make_language_model, self.place, decoder)
        if not decoders:
            for _, jobs in groupby(missing(line, plan), key=lambda job: job.stage1):
                yield self.pool.submit(run_jobs, self.place, list(jobs))
        self.bar.set_description(f"Depth: {line.title}")

    def follow(self, futures: list[Future]) -> None:
        """Wait for these and say what was finished. The first that fails ends it all."""
        waiting, seen = set(futures), set(self.plan().records["runs"])
        while waiting:
            done, waiting = wait(waiting, timeout=20, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            plan = self.plan()
            for key in plan.records["runs"].keys() - seen:
                record = plan.records["runs"][key]
                seen.add(key)
                self.bar.write(f"{time.strftime('%H:%M')} {key}: {describe(plan, record)}", file=sys.stdout)
            self.bar.n = self.bar.total - round(time_left(self.study, plan))
            self.bar.refresh()


def describe(plan: Plan, record: dict) -> str:
    """What is said of a finished run; scores on test scenes stay unsaid until the page is made."""
    if record["split"] == "test":
        return "done"
    fields = {name: record[name] for name in ("decoder", "arm", "variant", "split", "seed")}
    return f"{100 * score(plan.records, Job(**fields, rates=tuple(record['rates']))):.1f}% on validation scenes"


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes; the results go into --output_dir")
    add("--workers", type=int, default=os.cpu_count(), help="runs at once; one for each core by default")
    add("--until", choices=[line.title for line in lines(Study())], help="stop after this line of the protocol")
    add("--output_dir", type=Path, help="where data and models go; runs/depth by default")
    add("--results", type=Path, help=f"the records; {RESULTS.relative_to(ROOT)} by default")
    args = parser.parse_args()
    study = QUICK if args.quick else Study()
    root = (args.output_dir or ROOT / "runs" / study.name).resolve()
    root.mkdir(parents=True, exist_ok=True)
    os.environ |= ENVIRONMENT
    results = args.results or (root / "depth.json" if args.quick else RESULTS)
    try:
        with FileLock(root / "lock", timeout=0):  # a second process would clear away what the first is training
            (root / "pid").write_text(str(os.getpid()), encoding="utf-8")
            Runner(study, root, results, args.workers).run(args.until)
    except Timeout:
        sys.exit(f"Another process runs the study in {root}: see {root / 'pid'}, or choose another --output_dir.")


if __name__ == "__main__":
    main()
