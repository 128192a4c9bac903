"""Runs the training script and kills it with SIGKILL at chosen points of its checkpoints, for test_kill.py.

    python kill_driver.py recipe.yaml output_dir point [point ...]

A point is `event:N`, the N-th time that the run touches a file of its output folder after the first checkpoint is
there, or `bytes:N`, the moment a file grows past N bytes after that. For each point a run is killed, resumed, and its
folder left as `output_dir/<point>`. One process imports the libraries and forks for each run. With no point, the run
lists its events in `output_dir/unbroken/events.txt`.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


class Killer:
    """Counts what a run does to its files, and kills it at one of them."""

    def __init__(self, folder: str, kind: str, number: int) -> None:
        self.folder, self.kind, self.number, self.count, self.log = folder, kind, number, 0, []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or not args or not str(args[0]).startswith(self.folder):
            return
        if self.count == 0 and not (event == "open" and "/.saving/" in str(args[0]) and self.saved_once()):
            return
        self.count += 1
        self.log.append(f"{event} {str(args[0])[len(self.folder) :]}")
        if self.kind == "bytes" and self.count == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.number, self.number))
        if self.kind == "event" and self.count == self.number:
            os.kill(os.getpid(), signal.SIGKILL)

    def saved_once(self) -> bool:
        return any(path.is_dir() for path in Path(self.folder).glob("checkpoint-*"))


def run(recipe: str, *arguments: str, killer: Killer | None = None) -> int:
    """Train in a child process; the status that it ended with."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    import torch

    from training import sft

    torch.set_num_threads(1)
    sys.argv = ["sft.py", "--config", recipe, *arguments]
    if killer is not None:
        sys.addaudithook(killer)
    sft.main()
    if killer is not None:
        Path(killer.folder, "events.txt").write_text("\n".join(killer.log))
    os._exit(0)


def main() -> None:
    """Run the command line."""
    import training.adapters
    import training.sft  # noqa: F401 - before forking

    recipe, output_dir, *points = sys.argv[1:]
    if not points:
        folder = f"{output_dir}/unbroken"
        assert run(recipe, "--output_dir", folder, killer=Killer(folder, "none", 0)) == 0
        return
    for point in points:
        kind, number = point.split(":")
        folder = f"{output_dir}/{point}"
        status = run(recipe, "--output_dir", folder, killer=Killer(folder, kind, int(number)))
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ)
        assert killed, f"{point} did not kill the run (status {status})"
        status = run(recipe, "--output_dir", folder, "--resume_from_checkpoint", "true")
        assert status == 0, point


if __name__ == "__main__":
    main()
