"""Compute time of a stage without waiting: the sum of its own forwards and backwards.

The time of a step says nothing about a device, since a slow stage makes all others wait. On an accelerator the time is
measured between two events in the device's own queue, and read only on request.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class StopwatchLap(NamedTuple):
    """Compute time since the previous lap."""

    compute_s: float
    num_forwards: int
    """Microbatches computed forward."""
    begun_s: float
    """Start of the first of them, by the clock; NaN if there was none."""


class Stopwatch:
    """Adds up compute times; off until `is_on` is set."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_on = False
        self._device = device
        self.clock = clock
        """Clock in seconds; may be replaced."""
        self._compute_s, self._num_forwards, self._begun_s = 0.0, 0, float("nan")
        self._cuda_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, compute: Callable[..., Any], *args: Any, is_forward: bool, **kwargs: Any) -> Any:
        """Call `compute`, add its time, and return its result."""
        if not self.is_on:
            return compute(*args, **kwargs)
        if is_forward:
            self._num_forwards += 1
            self._begun_s = self.clock() if self._num_forwards == 1 else self._begun_s
        if self._device.type == "cuda":
            return self._time_with_events(compute, *args, **kwargs)
        begun_s = self.clock()
        result = compute(*args, **kwargs)
        self._compute_s += self.clock() - begun_s
        return result

    def lap(self) -> StopwatchLap:
        """Return the sums since the last call, and start anew."""
        for begin, end in self._cuda_events:
            end.synchronize()
            self._compute_s += begin.elapsed_time(end) / 1000
        self._cuda_events.clear()
        found = StopwatchLap(self._compute_s, self._num_forwards, self._begun_s)
        self._compute_s, self._num_forwards, self._begun_s = 0.0, 0, float("nan")
        return found

    def _time_with_events(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(self._device))
        result = compute(*args, **kwargs)
        end.record(torch.cuda.current_stream(self._device))
        self._cuda_events.append((begin, end))
        return result
