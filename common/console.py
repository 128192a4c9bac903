"""What all commands have in common: plain log lines, one line for an error that the user can mend, and options."""

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


# Loggers whose warnings and notes no user of a command needs, by library.
SILENCED_LOGGERS = (
    "accelerate.accelerator",  # warns of rows repeated to fill the last batch, which doesn't happen here
    "bitsandbytes",  # warns of kernels that a CPU lacks
    "fontTools",  # reports each table of a font
    "httpx",  # reports each request
    "httpx2",
    "matplotlib",
)
# They are silenced when this module is imported, since some libraries log while they are imported.
for logger_name in SILENCED_LOGGERS:
    logging.getLogger(logger_name).setLevel(logging.ERROR)


@contextmanager
def command() -> Iterator[None]:
    """Run the body of a `with` as a command, which prints plain log lines and no warnings of transformers.

    A `UserError` or an `OSError` ends the command with one line, `error: ...`. All other errors are bugs and keep
    their traceback.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger().setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # these are meant for authors of libraries

    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {describe_system_error(error)}")
    except KeyboardInterrupt:
        sys.exit("stopped")


def describe_system_error(error: OSError) -> str:
    """An `OSError` in one line.

    The system's own errors have a file's name. Those that libraries raise may have a text of several lines, or none.
    """
    if error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def new_folder(path: str) -> Path:
    """Read an option that names a folder to write to (a `type` for argparse), and refuse a folder that isn't empty."""
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise argparse.ArgumentTypeError(f"{path} is not empty; choose another folder")
    return folder


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, where: str = "") -> argparse.Namespace:
    """Parse a command line like `parse_args`, but name the most similar option if one is unknown.

    Args:
        parser: The parser that knows the options.
        argv: The words of the command line; `None` takes this process's.
        where: The beginning of the error's message, such as the name of a file.

    Raises:
        UserError: if an option is unknown.
    """
    args, unknown = parser.parse_known_args(argv)
    if not unknown:
        return args

    name = unknown[0].split("=")[0]
    options = chosen_parser(parser, args)._option_string_actions
    similar_options = get_close_matches(name, options, n=1, cutoff=0.8)  # at least 80 % alike
    hint = "."
    if similar_options:
        hint = f", did you mean {similar_options[0]}?"
    raise UserError(f"{where}{name} is unknown{hint}")


def chosen_parser(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the subcommand that was given, or `parser` itself if the command has no subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[getattr(args, action.dest)]
    return parser
