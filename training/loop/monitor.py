"""What training reports: a file of all that is logged, and a table on the console."""

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from typing_extensions import override

from normllava.files import write_whole


class MetricsFile(TrainerCallback):
    """Writes each log as a line of JSON. Names of held-out figures begin with `eval/`, as they do in trackers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin the file with all logs so far: none, unless the run is resumed."""
        if state.is_world_process_zero:
            lines = [self._line(log) for log in state.log_history]
            write_whole(self._path, "".join(lines))

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Add the line of the newest log."""
        if state.is_world_process_zero:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._line(state.log_history[-1]))

    @staticmethod
    def _line(log: dict[str, float]) -> str:
        """A log as a line of JSON."""
        renamed_log = {}
        for name, value in log.items():
            if name.startswith("eval_"):  # Trainer's prefix
                name = "eval/" + name.removeprefix("eval_")
            renamed_log[name] = value
        return json.dumps(renamed_log) + "\n"


class ConsoleTable(TrainerCallback):
    """Prints a table. Each log is a line, which shows only the figures that a person watches."""

    COLUMNS = ("step", "loss", "learning rate", "norm ratio", "tokens/s", "time left")

    @override
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print the header. Note the time, and the steps and tokens so far, which aren't 0 if a run is resumed."""
        self._start_time = time.monotonic()
        self._start_step = state.global_step
        self._start_tokens = state.num_input_tokens_seen
        self._print(state, format_row(self.COLUMNS))

    @override
    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line for a training step's log, or for an evaluation's."""
        if "eval_loss" in logs:
            loss = logs["eval_loss"]
            loss_blank = logs["eval_loss_blank"]
            self._print(state, f"    held out: loss {loss:.4f}, with blank pictures {loss_blank:.4f}")
        if "loss" in logs:
            self._print(state, format_row(self._cells(state, logs)))

    def _cells(self, state: TrainerState, logs: dict[str, float]) -> list[str]:
        """The cells of a step's line. Speed and time left are computed from the mean since `on_train_begin`."""
        seconds = time.monotonic() - self._start_time
        num_tokens = state.num_input_tokens_seen - self._start_tokens
        num_steps = state.global_step - self._start_step
        num_steps_left = state.max_steps - state.global_step
        seconds_left = round(seconds / num_steps * num_steps_left)
        ratio = "no picture"
        if "norm/ratio" in logs:
            ratio = f"{logs['norm/ratio']:.3f}"
        return [
            f"{state.global_step}/{state.max_steps}",
            f"{logs['loss']:.4f}",
            f"{logs['learning_rate']:.3g}",
            ratio,
            f"{num_tokens / seconds:,.0f}",
            str(timedelta(seconds=seconds_left)),
        ]

    @staticmethod
    def _print(state: TrainerState, line: str) -> None:
        if state.is_world_process_zero:
            sys.stderr.write(line + "\n")


def format_row(cells: Sequence[str]) -> str:
    """A line of the table, each cell right-aligned in 15 characters."""
    return "".join(f"{cell:>15}" for cell in cells)
