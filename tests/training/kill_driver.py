"""Runs the training script and kills it with SIGKILL while it writes, for test_kill.py.

    python kill_driver.py recipe.yaml output_dir event [event ...]

An event N is the N-th time that the run touches a file of its output folder after the first checkpoint is there. For
each a run is killed, resumed, and its folder left as `output_dir/N`. One process imports the libraries and forks for
each run. With no event, the run lists its events in `output_dir/unbroken/events.txt`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any


EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


class Killer:
    """Counts what a run does to its files, and kills it at one of them."""

    def __init__(self, folder: str, number: int | None) -> None:
        self.folder, self.number, self.log = folder, number, []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in EVENTS or not args or not str(args[0]).startswith(self.folder):
            return
        if not self.log and not (event == "open" and "/.saving/" in str(args[0]) and self.saved_once()):
            return
        self.log.append(f"{event} {str(args[0])[len(self.folder) :]}")
        if len(self.log) == self.number:
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

    recipe, output_dir, *events = sys.argv[1:]
    if not events:
        folder = f"{output_dir}/unbroken"
        assert run(recipe, "--output_dir", folder, killer=Killer(folder, None)) == 0
    for event in events:
        folder = f"{output_dir}/{event}"
        status = run(recipe, "--output_dir", folder, killer=Killer(folder, int(event)))
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed, f"{event} did not kill the run (status {status})"
        assert run(recipe, "--output_dir", folder, "--resume_from_checkpoint", "true") == 0, event


if __name__ == "__main__":
    main()
