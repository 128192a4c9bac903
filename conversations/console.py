"""What all commands have in common: they print plain lines, and end with one where the user can mend what is wrong."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging as transformers_logging


ROOT = Path(__file__).parents[1]

# As it is imported, it says that there is no kernel for 4-bit weights on a CPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@contextmanager
def command(level: int = logging.INFO) -> Iterator[None]:
    """Run a command: log from `level` on, silence transformers' warnings, and end with one line, `error: ...`, for
    what the user can mend."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger().setLevel(level)
    for library in ("httpx", "httpx2", "fontTools", "matplotlib"):  # they log each request, and each table of a font
        logging.getLogger(library).setLevel(logging.WARNING)
    transformers_logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        if not told(error):
            raise
        sys.exit(f"error: {error}")


def told(error: Exception) -> bool:
    """Whether an error needs no traceback, as its message is for the user: if we raised it, or the system."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = last.is_relative_to(ROOT) and "site-packages" not in last.relative_to(ROOT).parts
    kinds = (ValueError, MemoryError, FloatingPointError, ImportError)
    return isinstance(error, OSError) or (ours and isinstance(error, kinds))
