"""Starting `python -m hub_cards serve` and waiting until it answers."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


ROOT = Path(__file__).parents[2]


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """The base URL of a server for a folder, for as long as the context lasts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as file:
        command = [sys.executable, "-m", "hub_cards", "serve", str(model), "--port", str(port)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()
