"""Profiles a training step: which kernels take its time, and how much of it the GPU is busy."""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.results import Figures


NUM_KERNELS = 20


class StepProfile:
    """Profiles what is done between `start` and `stop`. On a CPU, torch's operators stand in for kernels."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        self._profile = profile(activities=[activity], acc_events=True)

    def start(self) -> None:
        """Begin to profile."""
        self._wait()
        self._profile.start()
        self._started = time.perf_counter()

    def stop(self) -> Figures:
        """End profiling.

        Returns:
            `kernels`, the twenty that took longest with their milliseconds and their number, and `busy_share`, the
            share of the time in which a kernel ran, which only a GPU has.
        """
        self._wait()
        seconds = time.perf_counter() - self._started
        self._profile.stop()
        if not self._on_gpu:
            averages = sorted(self._profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
            kernels = [[event.key, event.self_cpu_time_total / 1000, event.count] for event in averages[:NUM_KERNELS]]
            return {"kernels": kernels}

        events = [event for event in self._profile.events() if event.device_type == DeviceType.CUDA]
        intervals = [(event.time_range.start, event.time_range.end) for event in events]  # in microseconds
        return {"kernels": longest_kernels(events), "busy_share": length_of_union(intervals) / 1e6 / seconds}

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def longest_kernels(events: Iterable[Any]) -> list[list[Any]]:
    """The name, the milliseconds and the number of calls of the kernels that took longest in all."""
    milliseconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    for event in events:
        milliseconds[event.name] += event.time_range.elapsed_us() / 1000
        calls[event.name] += 1
    names = sorted(milliseconds, key=lambda name: -milliseconds[name])
    return [[name[:120], milliseconds[name], calls[name]] for name in names[:NUM_KERNELS]]


def length_of_union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals, so that kernels that run at the same time count once."""
    length = 0.0
    last_end = float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return length
