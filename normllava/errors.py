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
    """Run the body of a `with` that loads a model or a part of it. A library's error becomes ours and names the model.

    transformers, PEFT and the model class raise `ValueError` for files that are wrong, and `ImportError` for a package
    that is missing. Most of these errors don't say which folder they are about.

    Args:
        name: The folder or Hub id that is loaded.

    Raises:
        UserError: in place of a `ValueError` or `ImportError`; its message begins with `name`.
    """
    try:
        yield
    except UserError:  # a `ValueError` too, whose message already says what is wrong, and where
        raise
    except (ValueError, ImportError) as error:
        message_in_one_line = " ".join(str(error).split())
        raise UserError(f"{name} can't be loaded: {message_in_one_line}") from error
