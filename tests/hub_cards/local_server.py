"""Start a server that answers OpenAI's API on this machine, and ask it about pictures."""

import base64
import io
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from PIL import Image


@contextmanager
def serve(command: Sequence[str | Path], folder: Path, log: Path) -> Iterator[openai.OpenAI]:
    """Run a server in its own process during the body of a `with`, and give that body a client.

    Args:
        command: The command that starts the server. `--port` and a free port are added.
        folder: The folder in which the server runs.
        log: File for what the server prints.
    """
    port = find_free_port()
    with log.open("w") as file:
        server = subprocess.Popen([*command, "--port", str(port)], cwd=folder, stdout=file, stderr=file)
    try:
        wait_until_healthy(server, port, log)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait()


def find_free_port() -> int:
    """A port on which no server listens. The system chooses the port, for a socket that is closed again."""
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        _, port = free_socket.getsockname()
        return port


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server answers. Fails with the server's log if the server ends, or doesn't answer 120 tries."""
    for _ in range(120):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(1)
    raise AssertionError(log.read_text())


def make_messages(url: str, question: str = "what is it?") -> list[dict[str, Any]]:
    """A question about the picture at this URL, as messages of OpenAI's chat completions."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def make_data_url(picture: Image.Image) -> str:
    """A picture as a data URL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
