"""What all commands have in common: they print plain lines, and end with one where the user can mend what is wrong."""

import argparse
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from transformers.utils import logging as transformers_logging


ROOT = Path(__file__).parents[1]

# They tell of every request, every table of a font, kernels that a CPU hasn't (at import), and rows repeated in the
# last batch, which are none here.
for library in ("accelerate.accelerator", "bitsandbytes", "fontTools", "httpx", "httpx2", "matplotlib"):
    logging.getLogger(library).setLevel(logging.ERROR)


@contextmanager
def command() -> Iterator[None]:
    """Run a command: print what is logged, without transformers' warnings, and end with one line, `error: ...`, if the
    message is for the user: we raised it, or the system. Other errors are bugs and keep their traceback."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger().setLevel(logging.INFO)
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)  # what libraries tell each other
    try:
        yield
    except (ArithmeticError, ImportError, MemoryError, OSError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised_in = Path(last.filename)
        is_ours = raised_by_us(last)
        # transformers' auto classes find no class for a folder, and go on to list all that they have.
        if not is_ours and not isinstance(error, ImportError | OSError) and "auto" not in raised_in.parts:
            raise
        if isinstance(error, OSError) and error.strerror and error.filename:
            sys.exit(f"error: {error.filename}: {error.strerror}")
        sys.exit(f"error: {error if is_ours else str(error).strip().splitlines()[0]}")
    except KeyboardInterrupt:
        sys.exit("stopped")


def raised_by_us(frame: traceback.FrameSummary) -> bool:
    """Whether an error's last frame is a `raise` statement of ours.

    Where a line of ours merely fails, as in unpacking or `int("x")`, the message is Python's, and the error is a bug.
    """
    path = Path(frame.filename)
    is_our_file = path.is_relative_to(ROOT) and "site-packages" not in path.relative_to(ROOT).parts
    statement = frame.line or ""  # its first line, without indentation
    return is_our_file and statement.split(" ")[0] == "raise"


def new_folder(path: str) -> Path:
    """The type of an option that names a folder to write: one that holds something is refused."""
    if Path(path).exists() and any(Path(path).iterdir()):
        raise argparse.ArgumentTypeError(f"{path} is not empty; choose another folder")
    return Path(path)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, where: str = "") -> argparse.Namespace:
    """As `parse_args`, but an unknown option is a `ValueError` that names the closest one, and begins with `where`."""
    args, unknown = parser.parse_known_args(argv)
    for action in (of for of in parser._actions if isinstance(of, argparse._SubParsersAction)):
        parser = action.choices[getattr(args, action.dest)]
    if unknown:
        name = unknown[0].split("=")[0]
        meant = get_close_matches(name, parser._option_string_actions, 1, cutoff=0.8)
        raise ValueError(f"{where}{name} is unknown" + (f", did you mean {meant[0]}?" if meant else "."))
    return args
