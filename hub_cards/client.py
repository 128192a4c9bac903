"""What push, verify and the fresh process share to talk to the Hub: a client that waits, and error messages.

Imports nothing of ours: `fresh_load.py` runs this file by its path.
"""

import email.utils
import json
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from huggingface_hub import set_client_factory
from huggingface_hub.errors import GatedRepoError
from huggingface_hub.utils import httpx, parse_ratelimit_headers  # the HTTP library that is installed with it
from huggingface_hub.utils._http import hf_request_event_hook  # keeps HF_HUB_OFFLINE
from huggingface_hub.utils._runtime import is_xet_available


logger = logging.getLogger(__name__)

# Seconds that one request waits in total: twice the five-minute window of the Hub's rate limit.
MAX_WAIT = 600
# Errors of a request to the Hub: those of the HTTP library and the system, and answers of an unexpected form.
HUB_ERRORS = (httpx.HTTPError, OSError, ValueError, LookupError, TypeError)


class _Interrupt:
    """Whether Ctrl-C was pressed while requests check for it. Not an event: a handler may not wait for its lock."""

    pressed = False


class PatientClient(httpx.Client):
    """Waits as long as a 429 response says, for every request, and rejects a proxy's page as an answer of the Hub."""

    def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """As the base class.

        Raises:
            ConnectionError: if the Hub asks to wait too long, or its API's answer is not JSON.
            KeyboardInterrupt: if Ctrl-C was pressed within [`interrupts_at_requests`].
        """
        stop_if_interrupted()
        name, waited = f"{request.method} {request.url.path}", 0
        if not isinstance(request.stream, httpx.ByteStream):  # a file, uploaded in parts
            request.stream = InterruptibleStream(request.stream)
        while (response := super().send(request, **options)).status_code == 429:
            seconds = seconds_to_wait(response.headers)
            if waited + seconds > MAX_WAIT:
                response.close()
                raise ConnectionError(f"{name}: the Hub asks to wait for {seconds} s, but {MAX_WAIT} s is the limit")
            if isinstance(request.stream, InterruptibleStream):
                response.headers["Retry-After"] = str(seconds)  # for a file, the Hub's client rewinds it and waits
                return response
            logger.warning("%s: the Hub asks to wait for %d s", name, seconds)
            response.close()
            wait(seconds)
            waited += seconds
        if response.is_success and ("/api/" in name or name.endswith("/objects/batch")) and not options.get("stream"):
            content = response.text.strip()
            try:
                json.loads(content or "null")
            except ValueError as error:
                if not content.isalpha():  # a bare OK is not a page
                    line = content.splitlines()[0]
                    raise ConnectionError(f"{name}: the Hub's answer is not JSON: {line[:200]}") from error
        return response


class InterruptibleStream(httpx.SyncByteStream):
    """An upload, part by part, that Ctrl-C stops."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        """The parts. Raises `KeyboardInterrupt` as [`PatientClient`] does."""
        for part in self._stream:
            stop_if_interrupted()
            yield part


@contextmanager
def interrupts_at_requests() -> Iterator[None]:
    """Make Ctrl-C raise `KeyboardInterrupt` before the next request or the next part of a file; at once, if it is
    pressed again. For the main thread.

    Raised at any other place, it can leave a lock of the client's thread pool held, and the push would hang.
    """

    def note(signum: int, frame: Any) -> None:
        if _Interrupt.pressed or is_xet_available():  # xet's uploads are not requests, and stop on their own
            raise KeyboardInterrupt
        _Interrupt.pressed = True
        os.write(2, b"\nStopping at the next request. Ctrl-C again stops at once.\n")  # logging is not safe here

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
        stop_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
        forget_interrupt()


def stop_if_interrupted() -> None:
    """Raises `KeyboardInterrupt` if Ctrl-C was pressed within [`interrupts_at_requests`]."""
    if _Interrupt.pressed:
        raise KeyboardInterrupt


def wait(seconds: int) -> None:
    """Wait, until Ctrl-C at most."""
    for _ in range(seconds):
        stop_if_interrupted()
        time.sleep(1)


def forget_interrupt() -> None:
    """Allow requests again."""
    _Interrupt.pressed = False


def seconds_to_wait(headers: Mapping[str, str]) -> int:
    """Seconds that a 429 response asks for: by the Hub's own header, or Retry-After, a number or a date; else 10."""
    limit, value = parse_ratelimit_headers(headers), headers.get("Retry-After", "").strip()
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1  # it is rounded
    try:
        until = time.time() + int(value) if value.isdigit() else email.utils.parsedate_to_datetime(value).timestamp()
    except ValueError:
        return 10
    return max(math.ceil(until - time.time()), 1)


def use_patient_client() -> None:
    """Make the Hub's client, which transformers' downloads use too, send requests by [`PatientClient`]."""
    hooks = {"request": [hf_request_event_hook]}
    set_client_factory(lambda: PatientClient(event_hooks=hooks, follow_redirects=True, timeout=None))


def explain(error: BaseException) -> str:
    """An error in one line: its type, and what a 401 or 403 means, or else the first line of its message."""
    while type(error) is RuntimeError and error.__cause__ is not None:  # the client's, around an upload's error
        error = error.__cause__
    refused = {401: "is invalid or expired", 403: "may not do this"}.get(status_of(error) or 0)
    lines = [f"the token in HF_TOKEN {refused}"] if refused else str(error).strip().splitlines()[:1]
    if isinstance(error, GatedRepoError):
        lines = ["request access on the repository's page, and set HF_TOKEN to a token that has it"]
    return ": ".join([type(error).__name__, *lines])


def status_of(error: BaseException) -> int | None:
    """The status of the response that caused an error."""
    return getattr(getattr(error, "response", None), "status_code", None)
