"""How long a stage computes, apart from all waiting: its own forwards and backwards, and nothing between them.

The time of a step says nothing about a device: a slow stage makes all others wait. On an accelerator the time is that
between two marks in its own queue, looked up only when somebody asks.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage


class Lap(NamedTuple):
    """What was computed since the last one."""

    compute_s: float
    num_forwards: int
    """Microbatches that were computed forward."""
    begun_s: float
    """When the first of them began, by the clock; not a number if there was none."""


class Stopwatch:
    """Adds up; off until somebody turns it on."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_on = False
        self._is_queued = device.type == "cuda"
        self.clock = clock
        """In seconds; whoever turns it on may bring another one."""
        self._compute_s, self._num_forwards, self._begun_s = 0.0, 0, float("nan")
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, compute: Callable[..., Any], *args: Any, is_forward: bool, **kwargs: Any) -> Any:
        """What `compute` gives; its time counts."""
        if not self.is_on:
            return compute(*args, **kwargs)
        if is_forward:
            self._num_forwards += 1
            self._begun_s = self.clock() if self._num_forwards == 1 else self._begun_s
        if self._is_queued:
            return self._between_marks(compute, *args, **kwargs)
        begun_s = self.clock()
        result = compute(*args, **kwargs)
        self._compute_s += self.clock() - begun_s
        return result

    def lap(self) -> Lap:
        """What was computed since the last call, and begin anew."""
        for begin, end in self._marks:
            end.synchronize()
            self._compute_s += begin.elapsed_time(end) / 1000
        self._marks.clear()
        found = Lap(self._compute_s, self._num_forwards, self._begun_s)
        self._compute_s, self._num_forwards, self._begun_s = 0.0, 0, float("nan")
        return found

    def _between_marks(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = compute(*args, **kwargs)
        end.record()
        self._marks.append((begin, end))
        return result


class WatchedStage(PipelineStage):
    """Torch's stage, whose computing is timed; evaluation is not."""

    stopwatch: Stopwatch

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        if not torch.is_grad_enabled():
            return super().forward_one_chunk(*args, **kwargs)
        return self.stopwatch.time(super().forward_one_chunk, *args, is_forward=True, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        return self.stopwatch.time(super().backward_one_chunk, *args, is_forward=False, **kwargs)
