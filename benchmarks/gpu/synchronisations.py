"""Counts where a training step makes Python wait for the GPU, by line of code."""

import warnings
from collections import Counter
from pathlib import Path

import torch


# The text of torch's warning at each operation that waits.
WARNING = "called a synchronizing CUDA operation"


class SynchronisationCounter:
    """Counts the operations that wait for the GPU between `start` and `stop`. Without a GPU there are none."""

    def start(self) -> None:
        """Begin to count."""
        # `start` enters the context of `catch_warnings`, and `stop` leaves it.
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> dict[str, int]:
        """End counting. Returns how often each line of Python waited, the most frequent first."""
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)

        counts: Counter[str] = Counter()
        assert self._caught is not None  # `start` was called
        for warning in self._caught:
            if WARNING in str(warning.message):
                file = "/".join(Path(warning.filename).parts[-3:])  # such as models/llava/modeling_llava.py
                counts[f"{file}:{warning.lineno}"] += 1
        return dict(counts.most_common())
