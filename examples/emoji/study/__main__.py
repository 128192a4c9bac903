"""Says how much of the study of docs/study.md is done, and at its end prints its results.

    python -m examples.emoji.study --report

It reads the records in `records.jsonl`. The code that makes the runs is in commit 28e4395 alone (`STUDY_COMMIT`).
"""

import argparse
import logging

from normllava.command_line import command, parse

from examples.emoji.study.analysis import report
from examples.emoji.study.cells import (
    Arm,
    Log,
    all_seeds,
    dropped_seeds,
    has_ended,
    rates_of,
    runs_that_count,
    seeds_left,
    whole_seeds,
)
from examples.emoji.study.records import RECORDS, read_log


logger = logging.getLogger(__name__)


def describe_progress(log: Log) -> str:
    """How much of the study is done, as text. The results are added only if the study has ended."""
    whole = whole_seeds(log.runs)
    lines = [f"{len(whole)} of {len(all_seeds())} seeds are whole: {describe_seeds(list(whole))}"]
    dropped = dropped_seeds(log)
    if dropped:
        lines.append(f"left the study after two crashes of a run: {', '.join(map(str, dropped))}")

    if has_ended(log):
        lines += [f"The study has ended. {log.end or ''}".strip(), "", report(runs_that_count(log.runs))]
    else:
        num_left = len(seeds_left(log))
        lines.append(f"{num_left} seeds are left, each of {len(Arm)} runs")
    return "\n".join(lines)


def describe_seeds(seeds: list[int]) -> str:
    """Seeds by learning rate of the projector."""
    seeds_by_rate: dict[float, list[str]] = {}
    for seed in sorted(seeds):
        seeds_by_rate.setdefault(rates_of(seed).projector, []).append(str(seed))
    texts = [f"{', '.join(seeds)} at {rate:g}" for rate, seeds in seeds_by_rate.items()]
    return "; ".join(texts) or "none"


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--report", action="store_true", required=True, help="print what is left, or at the end the results"
    )
    return parser


@command()
def main() -> None:
    """Print the report."""
    parse(build_parser())
    logger.info("%s", describe_progress(read_log(RECORDS)))


if __name__ == "__main__":
    main()
