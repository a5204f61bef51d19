"""How long a rank computes in a train step, apart from its waits for others.

The time from asking for data to the last gradient, plus the update. All waits of DDP lie outside of it: between the
last gradient and the end of the backward pass, and, where a model has buffers, at the begin of the forward pass, which
is taken off. What the script itself waits for between two of these points (an allreduce of the loss before `backward`)
is counted, so scripts should do that after the update.

Time is the clock's on the wall and not the processor's: a rank that is throttled or shares its processor is slow. Where
the kernel throttles it by a quota, when the pauses fall is left out (`balancing.steady_s`).
Such a rank is slow at communicating as well, and that is work of its own beside all waiting. It is told by the
processor time that a step takes outside of computing.
"""

import abc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringweave.planning import balancing
from ringweave.topology.cgroups import OwnQuota, Quota

Span = tuple[Any, Any]
"""Two marks of one timeline."""
_THROTTLED = 1.25
"""A rank whose computing takes so many times its processor time is throttled, or shares its processor. Elsewhere
communicating is a small part, the same on all ranks, and threads that spin while they wait would be taken for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A train step of this rank."""

    num_samples: int
    seconds: float
    """Computing, on the wall; without what the fall of a quota's pauses adds or saves."""
    outside: float = 0.0
    """What it worked in the step beside computing, in multiples of that; where it is throttled."""


class Timeline(abc.ABC):
    """Where marks are set, and how far they are apart."""

    counts_work = False
    """Whether it tells processor time."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Now."""

    @abc.abstractmethod
    def has_passed(self, mark: Any) -> bool:
        """Whether what was asked for before the mark is done."""

    @abc.abstractmethod
    def seconds(self, span: Span) -> float:
        """From the first mark to the second, which have both passed."""

    def processor_s(self, span: Span) -> float:
        """Processor time of this process between them; 0 where that is not known."""
        return 0.0

    def steady_s(self, wall_s: float, worked_s: float) -> float:
        """What the latest work takes on average that took so long, `worked_s` of it at work."""
        return wall_s


class HostTimeline(Timeline):
    """The clock: work is done when the call that does it returns."""

    counts_work = True

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = lambda: 0.0,
        quota: Callable[[], Quota | None] = lambda: None,
    ) -> None:
        """`processor` gives processor time, unknown without it; `quota` the one that binds this process."""
        self._clock, self._processor, self._quota = clock, processor, quota
        self._throttled = _times_throttled(quota())

    @classmethod
    def of_this_process(cls) -> Self:
        """With its processor time and its quota."""
        return cls(processor=time.process_time, quota=OwnQuota().read)

    def mark(self) -> tuple[float, float]:
        """Now."""
        return self._clock(), self._processor()

    def has_passed(self, mark: tuple[float, float]) -> bool:
        """Always."""
        return True

    def seconds(self, span: Span) -> float:
        """The difference."""
        return span[1][0] - span[0][0]

    def processor_s(self, span: Span) -> float:
        """Likewise."""
        return span[1][1] - span[0][1]

    def steady_s(self, wall_s: float, worked_s: float) -> float:
        """By the quota, if that has throttled this process since the last call."""
        quota = self._quota()
        before, self._throttled = self._throttled, _times_throttled(quota)
        return balancing.steady_s(wall_s, worked_s, quota) if quota and self._throttled > before else wall_s


class CudaTimeline(Timeline):
    """Events of the current stream: calls return before the work is done, and the timer must not wait for it."""

    def mark(self) -> torch.cuda.Event:
        """An event that passes once the work before it is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Whether it has, without waiting."""
        return mark.query()

    def seconds(self, span: Span) -> float:
        """Time on the device."""
        return span[0].elapsed_time(span[1]) / 1e3


@dataclass(kw_only=True, slots=True)
class _Step:
    """Marks of one train step."""

    begin: Any
    num_samples: int = 0
    ready: Any = None
    end: Any = None
    waits: list[Span] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)


class StepTimer:
    """Told what happens in a train step; gives the time that each has taken, once it is known."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._step: _Step | None = None
        self._opened: Any = None
        self._ended: deque[_Step] = deque()

    def begin(self) -> None:
        """The loader is asked for the next batch; the step before has ended."""
        self._step = _Step(begin=self._timeline.mark())

    def give(self, num_samples: int) -> None:
        """The batch is there."""
        if self._step is not None:
            self._step.num_samples = num_samples

    def open(self, *_: object) -> None:
        """Begin of something that must be told apart; also a hook of modules and optimizers."""
        self._opened = self._timeline.mark()

    def close_wait(self, *_: object) -> None:
        """What was opened was a wait for others."""
        if self._opened is not None and self._step is not None:
            self._step.waits.append((self._opened, self._timeline.mark()))
        self._opened = None

    def close_update(self, *_: object) -> None:
        """What was opened was an update. Computing that no other rank waits in the midst of."""
        step = self._step
        if self._opened is not None and step is not None and step.ready is not None:
            step.updates.append((self._opened, self._timeline.mark()))
        self._opened = None

    def gradients_ready(self) -> None:
        """All gradients of a pass are computed; what follows is communication."""
        if self._step is not None:
            self._step.ready = self._timeline.mark()

    def end(self) -> None:
        """The step is over. One that did not communicate was computing all the time."""
        step, self._step = self._step, None
        if step is None or step.num_samples == 0:
            return
        if step.ready is None:
            step.ready = self._timeline.mark()
        if self._timeline.counts_work:
            step.end = self._timeline.mark()
        self._ended.append(step)

    def take(self) -> list[tuple[int, float]]:
        """(samples, seconds) of each step that has been measured since the last call."""
        return [(step.num_samples, step.seconds) for step in self.measured()]

    def measured(self) -> list[Measured]:
        """The same steps, with what they worked beside computing."""
        taken: list[Measured] = []
        while self._ended and self._has_passed(self._ended[0]):
            step = self._ended.popleft()
            spans = ((step.begin, step.ready), *step.updates)
            computing_s = sum(map(self._timeline.seconds, spans)) - sum(map(self._timeline.seconds, step.waits))
            worked_s = sum(map(self._timeline.processor_s, spans))
            steady_s = self._timeline.steady_s(computing_s, worked_s)
            outside = self._outside(step, worked_s, computing_s)
            taken.append(Measured(num_samples=step.num_samples, seconds=steady_s, outside=outside))
        return taken

    def _outside(self, step: _Step, worked_s: float, computing_s: float) -> float:
        if step.end is None or worked_s <= 0 or computing_s < _THROTTLED * worked_s:
            return 0.0
        return max(0.0, self._timeline.processor_s((step.begin, step.end)) / worked_s - 1)

    def _has_passed(self, step: _Step) -> bool:
        return all(map(self._timeline.has_passed, (step.ready, *(end for _, end in step.updates))))


def timeline_of(model: nn.Module) -> Timeline:
    """The device's, where the model is on one."""
    is_on_cuda = any(parameter.device.type == "cuda" for parameter in model.parameters())
    return CudaTimeline() if is_on_cuda and torch.cuda.is_available() else HostTimeline.of_this_process()


def _times_throttled(quota: Quota | None) -> int:
    return quota.num_throttled if quota else 0


def watch(timer: StepTimer, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Let model and optimizer tell the timer; gradients are told by the communication hook."""
    if any(True for _ in model.module.buffers()):
        model.register_forward_pre_hook(timer.open)
        model.module.register_forward_pre_hook(timer.close_wait)
    optimizer.register_step_pre_hook(timer.open)
    optimizer.register_step_post_hook(timer.close_update)
