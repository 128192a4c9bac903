"""What all commands have in common: plain lines of output, and one line for an error that the user can mend."""

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from transformers.utils import logging as transformers_logging

from common.errors import UserError


# Libraries that report what no user needs: each request, each table of a font, kernels that a CPU lacks, and rows that
# are repeated in the last batch, which doesn't happen here.
TALKATIVE = ("accelerate.accelerator", "bitsandbytes", "fontTools", "httpx", "httpx2", "matplotlib")
for library in TALKATIVE:
    logging.getLogger(library).setLevel(logging.ERROR)  # now, as some report at import


@contextmanager
def command() -> Iterator[None]:
    """Run a command: print what is logged, without transformers' warnings.

    A `UserError`, and an error of the system, ends it with one line, `error: ...`. Others are bugs and keep their
    traceback.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger().setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # for authors of libraries

    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {describe_system_error(error)}")
    except KeyboardInterrupt:
        sys.exit("stopped")


def describe_system_error(error: OSError) -> str:
    """An error of the system in one line. Libraries raise `OSError` too, with a text of several lines or none."""
    if error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def new_folder(path: str) -> Path:
    """The type of an option that names a folder to write: one that holds something is refused."""
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise argparse.ArgumentTypeError(f"{path} is not empty; choose another folder")
    return folder


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, where: str = "") -> argparse.Namespace:
    """As `parse_args`, but the error about an unknown option names the closest one.

    Args:
        parser: Knows the options.
        argv: The command line's words, by default this process's.
        where: What an error begins with, such as the name of a file.

    Raises:
        UserError: if an option is unknown.
    """
    args, unknown = parser.parse_known_args(argv)
    if not unknown:
        return args

    name = unknown[0].split("=")[0]
    options = chosen_parser(parser, args)._option_string_actions
    closest = get_close_matches(name, options, n=1, cutoff=0.8)
    hint = f", did you mean {closest[0]}?" if closest else "."
    raise UserError(f"{where}{name} is unknown{hint}")


def chosen_parser(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the subcommand that was given, or `parser` where there are none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[getattr(args, action.dest)]
    return parser
