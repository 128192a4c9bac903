"""The error that a user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """An error that the user can mend. Its message says what is wrong, where, and what to do.

    A command prints a `UserError` in one line, `error: ...`.
    """


@contextmanager
def errors_named_after(name: str | Path) -> Iterator[None]:
    """A block in which a library loads a model or a part of it; `name` is its folder or Hub id.

    transformers, PEFT and the model class raise `ValueError` for files that are wrong, and `ImportError` for a package
    that is missing. Most of these errors don't say which folder they are about.

    Raises:
        UserError: for such an error; its message begins with `name`.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())  # in one line
        raise UserError(f"{name} can't be loaded: {reason}") from error
