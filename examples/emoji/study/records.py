"""The study's file of records, `records.jsonl`: a line for each run that ended, each crash, and the study's end."""

import json
from pathlib import Path

from examples.emoji.study.cells import (
    FAST_SEEDS,
    FEWEST_SEEDS,
    SLOW_SEEDS,
    Log,
    has_ended,
    machine_of,
    whole_seeds,
)
from normllava.errors import UserError


RECORDS = Path(__file__).with_name("records.jsonl")
# The commit of which all runs are. It holds the code that makes them. Records name its hash, or the beginning of it.
STUDY_COMMIT = "28e4395"


def read_log(path: Path) -> Log:
    """Read the file of records. Of equal lines, only the first counts.

    Runs are sorted by the time at which they ended: those of another machine may have been copied in later.

    Raises:
        UserError: if a run has two different records or isn't of `STUDY_COMMIT`, if runs were trained on different
            rows, or if the study has ended with fewer than `FEWEST_SEEDS` whole seeds of a rate.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    different_lines = dict.fromkeys(lines)  # unlike a set, keeps the order

    log = Log(runs=[], crashes=[], end=None)
    for text in different_lines:
        line = json.loads(text)
        if "study_ended" in line:  # the value says why
            log = Log(log.runs, log.crashes, line["study_ended"])
        elif "crashed" in line:
            log.crashes.append(line)
        else:
            log.runs.append(line)
    log.runs.sort(key=lambda run: run["ended"])  # as text, since all times are in UTC

    require_one_record_a_run(log, path)
    require_same_rows(log, path)
    require_study_commit(log)
    if has_ended(log):
        require_enough_seeds(log, path)
    return log


def require_one_record_a_run(log: Log, path: Path) -> None:
    """Raises `UserError` if a run has two records."""
    seen = set()
    for record in log.runs:
        run = (record["arm"], record["seed"], *machine_of(record))
        if run in seen:
            raise UserError(f"{path} holds two records of the run {run}.")
        seen.add(run)


def require_same_rows(log: Log, path: Path) -> None:
    """Raises `UserError` if runs were trained on different rows. A run that failed has no fingerprint of its rows."""
    fingerprints = {record["data"] for record in log.runs if record["data"] is not None}
    if len(fingerprints) > 1:
        raise UserError(f"{path} holds runs that were trained on different rows.")


def require_study_commit(log: Log) -> None:
    """Raises `UserError` if a run's commit is not `STUDY_COMMIT`."""
    for record in log.runs:
        commit = record["commit"]
        if not commit.startswith(STUDY_COMMIT):
            raise UserError(f"All runs of the study are of commit {STUDY_COMMIT}, not of {commit}: see docs/study.md.")


def require_enough_seeds(log: Log, path: Path) -> None:
    """Raises `UserError` if the study was ended before each rate had enough whole seeds."""
    whole = whole_seeds(log.runs)
    for seeds in (FAST_SEEDS, SLOW_SEEDS):
        num_whole = len([seed for seed in seeds if seed in whole])
        if num_whole < FEWEST_SEEDS:
            raise UserError(
                f"By {path} the study has ended, but of the seeds {seeds[0]} to {seeds[-1]} {num_whole} are whole: "
                f"the protocol asks for {FEWEST_SEEDS}."
            )
