"""Runs the training script, kills it with SIGKILL while it writes, and resumes it, for test_kill.py.

    python kill_driver.py recipe.yaml output_dir [event ...]

An event is an operation on a file of the run's output folder. Events are numbered from 1, beginning with the first
file of the second checkpoint, because a run without a checkpoint can't be resumed. For each event number N on the
command line, a run in `output_dir/N` is killed at event N, and resumed. Without event numbers, one run in
`output_dir/unbroken` trains to its end, and lists its events in `events.txt`.

The driver imports the libraries once, and forks a child process for each run.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any


# Operations on files, by the names that Python gives to audit hooks (docs.python.org/3/library/audit_events.html).
FILE_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


class Killer:
    """Lists the events of a process, and kills the process at one event.

    A killer is an audit hook: Python calls it before each operation of the process, such as opening a file.

    Attributes:
        folder: The run's output folder.
        last_event: The number of the event at which the process is killed, or `None` for never.
        is_counting: Whether operations count as events: they do from the second checkpoint on.
        log: The events so far, each as the name of the operation and the path of the file.
    """

    def __init__(self, folder: str, last_event: int | None) -> None:
        self.folder = folder
        self.last_event = last_event
        self.is_counting = False
        self.log: list[str] = []

    def __call__(self, operation: str, args: tuple[Any, ...]) -> None:
        """Log an operation that is an event, and kill the process at `last_event`."""
        if operation not in FILE_OPERATIONS or not args:
            return
        path = str(args[0])  # the first argument of all these operations
        if not path.startswith(self.folder):
            return

        # A checkpoint is written into the folder `.saving`, which is renamed to `checkpoint-*` when it is complete.
        opens_checkpoint_file = operation == "open" and "/.saving/" in path
        if opens_checkpoint_file and self.has_complete_checkpoint():
            self.is_counting = True
        if not self.is_counting:
            return

        self.log.append(f"{operation} {path.removeprefix(self.folder)}")
        if len(self.log) == self.last_event:
            os.kill(os.getpid(), signal.SIGKILL)

    def has_complete_checkpoint(self) -> bool:
        return any(path.is_dir() for path in Path(self.folder).glob("checkpoint-*"))


def run(recipe: str, *arguments: str, killer: Killer | None = None) -> int:
    """Train in a forked child process.

    Returns:
        The status with which the child ended, as `os.waitpid` gives it.
    """
    child = os.fork()
    if child != 0:  # this is the parent process
        _, status = os.waitpid(child, 0)
        return status

    # From here on, this is the child process.
    import torch

    from training import sft

    torch.set_num_threads(1)
    sys.argv = ["sft.py", "--config", recipe, *arguments]
    if killer is not None:
        sys.addaudithook(killer)
    sft.main()
    if killer is not None:
        events = "\n".join(killer.log)  # before events.txt is opened, since that is an event too
        Path(killer.folder, "events.txt").write_text(events)
    os._exit(0)  # the child must not go on with the parent's work


def main() -> None:
    """Train the unbroken run, or kill and resume a run at each event that the command line names."""
    # Imported before forking, so that the children need not import the libraries.
    import training.modules.adapters
    import training.sft  # noqa: F401

    recipe, output_dir, *events = sys.argv[1:]
    if not events:
        folder = f"{output_dir}/unbroken"
        status = run(recipe, "--output_dir", folder, killer=Killer(folder, last_event=None))
        assert status == 0

    for event in events:
        folder = f"{output_dir}/{event}"
        status = run(recipe, "--output_dir", folder, killer=Killer(folder, last_event=int(event)))
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert was_killed, f"event {event} did not kill the run (status {status})"

        status = run(recipe, "--output_dir", folder, "--resume_from_checkpoint", "true")
        assert status == 0, f"the run killed at event {event} could not be resumed"


if __name__ == "__main__":
    main()
