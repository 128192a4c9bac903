"""Turn errors of the Hub's client into errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx  # the HTTP library whose errors the Hub's client raises

from normllava.errors import UserError


@contextmanager
def hub_errors(message: str) -> Iterator[None]:
    """In the body of a `with`, turn errors of the Hub's client into a `UserError`.

    Among these errors are `RuntimeError`, for an upload that fails, and `HFValidationError`, for a name that no
    repository can have.

    Args:
        message: The beginning of the `UserError`'s message. The client's own message follows.
    """
    try:
        yield
    except (httpx.HTTPError, ConnectionError, RuntimeError, HFValidationError) as error:
        raise UserError(f"{message}: {error}") from error
