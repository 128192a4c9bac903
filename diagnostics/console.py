"""What all commands have in common: they print plain lines, and end with one where the user can mend what is wrong."""

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        is_ours = raised_in.is_relative_to(ROOT) and "site-packages" not in raised_in.relative_to(ROOT).parts
        # transformers' auto classes find no class for a folder, and go on to list all that they have.
        if not is_ours and not isinstance(error, OSError) and "auto" not in raised_in.parts:
            raise
        sys.exit(f"error: {error if is_ours else str(error).strip().splitlines()[0]}")
    except KeyboardInterrupt:
        sys.exit("stopped")
