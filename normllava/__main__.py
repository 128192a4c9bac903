"""The command `normllava`, which measures and evaluates vision-language models.

    normllava diagnose --model llava-hf/llava-1.5-7b-hf --data questions.json --output_dir report/
    normllava evaluate runs/mine/instruct

A command's module is imported when the command is called, since it needs packages that only an extra installs.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from normllava.command_line import command

from normllava.errors import UserError


class Subcommand(NamedTuple):
    """A command of `normllava`."""

    module: str
    """The module with the command's function `main`."""
    extra: str
    """What pip installs for the command: the `diagnose` of `normllava[diagnose]`."""
    help: str


SUBCOMMANDS = {
    "diagnose": Subcommand(
        "normllava.diagnostics.command", "diagnose", "measure models side by side, and write a report"
    ),
    "text_norms": Subcommand(
        "normllava.diagnostics.text_norms", "diagnose", "compare norms of text embeddings before and after training"
    ),
    "dynamics": Subcommand("normllava.diagnostics.dynamics", "diagnose", "measure the checkpoints of a run"),
    "evaluate": Subcommand("normllava.evaluation.command", "evaluate", "run the paper's benchmarks, or your own"),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the first word. Each command has a parser of its own for the words that follow."""
    lines = [f"  {name:12}{subcommand.help}" for name, subcommand in SUBCOMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="normllava",
        description="\n".join(["Measure and evaluate vision-language models.", "", *lines]),
        epilog="normllava <command> --help lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version("normllava"))
    parser.add_argument("command", choices=SUBCOMMANDS, metavar="command", help="one of the commands above")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        UserError: if what the command needs is not installed.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    name = build_parser().parse_args(words[:1]).command
    subcommand = SUBCOMMANDS[name]
    try:
        module = import_module(subcommand.module)
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        if missing in ("normllava", "modeling_normllava"):  # a bug of ours
            raise
        raise UserError(
            f'normllava {name} needs {missing}, which is not installed. Install the extra "{subcommand.extra}", such '
            f"as pip install '.[{subcommand.extra}]' in a clone."
        ) from error
    module.main(words[1:])


if __name__ == "__main__":
    main()
