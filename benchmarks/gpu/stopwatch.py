"""The clock of all figures. On a GPU it uses the GPU's clock and reads it at the end, so that nothing has to wait."""

import time
from typing import Any

import torch


class Stopwatch:
    """Marks moments in the device's work.

    On a GPU a mark is a CUDA event, which happens when the work queued before it is done. On a CPU it is the time.
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
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return [after - before for before, after in pairs]

        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]
