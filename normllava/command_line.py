"""What all commands share: how they log, how they end on an error, and how they read their options."""

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from transformers.utils import logging as transformers_logging

from normllava.errors import UserError


# Loggers of libraries whose warnings and notes no user of a command needs.
SILENCED_LOGGERS = (
    "accelerate.accelerator",  # warns that rows are repeated to fill the last batch, which our batches don't do
    "fontTools",  # reports each table of a font
    "httpx",  # reports each request
    "httpx2",  # reports each request
    "matplotlib",  # reports when it lists the fonts of the machine
)
# The loggers are silenced when this module is imported, since some libraries log while they are imported.
for logger_name in SILENCED_LOGGERS:
    logging.getLogger(logger_name).setLevel(logging.ERROR)


@contextmanager
def command() -> Iterator[None]:
    """Run the body of a `with` as a command, which prints plain log lines and no warnings of transformers.

    A `UserError` or an `OSError` ends the command with one line, `error: ...`, and Ctrl-C with `stopped`. All other
    errors are bugs and keep their traceback.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger().setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # `FutureWarning` is meant for authors of libraries

    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {describe_system_error(error)}")
    except KeyboardInterrupt:
        sys.exit("stopped")


def describe_system_error(error: OSError) -> str:
    """Describe an `OSError` in one line.

    An `OSError` of the operating system names a file. An `OSError` that a library raises may have a text of several
    lines, or no text at all.
    """
    if error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"

    # In one line. A message about a gated model says in a later line which model it is, and what to do.
    text = " ".join(str(error).split())
    return text or type(error).__name__


def new_folder(path: str) -> Path:
    """Turn the text of an option into the folder that a command writes to. This is a `type` for argparse.

    Raises:
        ArgumentTypeError: if the folder exists and isn't empty.
    """
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise argparse.ArgumentTypeError(f"{path} is not empty; choose another folder")
    return folder


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, where: str = "") -> argparse.Namespace:
    """Parse a command line as `parse_args` does. For an unknown option, the error names the most similar known option.

    Args:
        parser: The parser that knows the options.
        argv: The words of the command line; `None` stands for those of `sys.argv`.
        where: The beginning of the error's message, such as the name of a file.

    Raises:
        UserError: if an option is unknown.
    """
    args, unknown_words = parser.parse_known_args(argv)
    if not unknown_words:
        return args

    name, _, _ = unknown_words[0].partition("=")  # --port of --port=1
    known_options = list(chosen_parser(parser, args)._option_string_actions)
    similar_options = get_close_matches(name, known_options, n=1, cutoff=0.8)  # at least 80 % alike
    if similar_options:
        raise UserError(f"{where}{name} is unknown, did you mean {similar_options[0]}?")
    raise UserError(f"{where}{name} is unknown.")


def chosen_parser(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the subcommand in `args`, or `parser` itself if the command has no subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommand = getattr(args, action.dest)
            return action.choices[subcommand]
    return parser
