"""Measures all times of the benchmarks.

On a GPU, times are those of the GPU's clock. They are read only when all is measured, so that no measured work waits.
"""

import time
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Marks moments in the device's work.

    On a GPU a mark is a CUDA event, which happens when the GPU has done the work queued before the event. On a CPU a
    mark is the time in seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark this moment."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds from each mark to the next."""
        if not self._on_gpu:
            return [after - before for before, after in pairwise(self._marks)]

        torch.cuda.synchronize()
        intervals = [before.elapsed_time(after) for before, after in pairwise(self._marks)]  # in milliseconds
        return [interval / 1000 for interval in intervals]
