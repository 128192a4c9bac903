"""Prints the results of the study of docs/study.md.

    python -m examples.emoji.study --report

It reads the records in `records.jsonl`. The code that made the runs is in commit 28e4395.
"""

import argparse
import logging

from normllava.command_line import command, parse

from examples.emoji.study.analysis import report
from examples.emoji.study.records import Study, read_study


logger = logging.getLogger(__name__)


def describe_study(study: Study) -> str:
    """How long the runs took, why they ended and what came out, as text."""
    hours = sum(run["minutes"] for run in study.runs) / 60
    head = f"{len(study.runs)} runs, which took {hours:.1f} hours together. The study ended: {study.end}"
    return f"{head}\n\n{report(study.runs)}"


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", required=True, help="print the results")
    return parser


@command()
def main() -> None:
    """Print the report."""
    parse(build_parser())
    logger.info("%s", describe_study(read_study()))


if __name__ == "__main__":
    main()
