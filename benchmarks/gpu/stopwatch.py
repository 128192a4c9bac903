"""Measures all times of the benchmarks.

On a GPU it uses the GPU's clock, and reads this clock only when all is measured. So no measured work waits for it.
"""

import time
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Marks moments in the device's work.

    On a GPU a mark is a CUDA event, which happens when the work queued before it is done. On a CPU a mark is the time
    in seconds.
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
        # `elapsed_time` is in milliseconds.
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._marks)]
