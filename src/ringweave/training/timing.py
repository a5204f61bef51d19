"""Step timing: how long a rank computes in a train step, without its waits for others.

The time runs from the request for data to the last gradient, plus the update. All waits of DDP lie outside of it:
between the last gradient and the end of the backward pass, and, if a model has buffers, at the start of the forward
pass, which is subtracted. Waits of the script itself between two of these points (an allreduce of the loss before
`backward`) are included, so scripts should do that after the update.

Time is wall time, not processor time: a rank that is throttled or shares its processor is slow. If a quota throttles
it, the random position of the pauses is averaged out (`balancing.steady_s`). Such a rank also communicates slowly, and
that is work of its own, beside all waiting. It is measured by the processor time that a step uses outside of computing.
"""

import abc
import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringweave.planning import balancing
from ringweave.topology import cgroups


def freeze_garbage_collector() -> None:
    """Exclude the present objects from all later garbage collections.

    A full collection visits the objects of all modules: with torch, a tenth of a second of processor time. A rank with
    a twentieth of a processor takes two seconds, during a step in which all others wait (docs/decisions/0027). This
    call runs one collection, before the worker has to send heartbeats, since none are sent meanwhile.
    """
    gc.collect()
    gc.freeze()


TimeSpan = tuple[Any, Any]
"""Two marks of one timeline."""
_THROTTLED = 0.25
"""A rank that waits for a processor for this multiple of its processor time is throttled, or shares its processor. On
other ranks communication is a small part, the same on all of them, and threads that spin while they wait would be taken
for it. A rank that waits for a device or for data is none of these: its processor is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A measured train step of this rank."""

    num_samples: int
    seconds: float
    """Wall time of computing, without the effect of where a quota's pauses fall."""
    outside_ratio: float = 0.0
    """Time of processor work outside of computing, waits for a processor included, as a multiple of the time of
    computing; 0 unless the rank is throttled."""
    wall_s: float = field(default=0.0, compare=False)
    """Wall time of the whole step, from the request for its batch to the next one."""
    input_s: float = field(default=0.0, compare=False)
    """Wall time until the batch had arrived."""
    input_processor_s: float = field(default=0.0, compare=False)
    """Processor time of this thread until the batch had arrived; the rest of the wall time it waited."""
    compute_s: float = field(default=0.0, compare=False)
    """Wall time of computing after that, without the update."""
    forward_s: float = field(default=0.0, compare=False)
    """Wall time of forward passes in it; 0 if they are not timed."""
    exchange_s: float = field(default=0.0, compare=False)
    """Wall time from the last gradient to the end of the backward pass: transfers, and waits for other ranks."""
    update_s: float = field(default=0.0, compare=False)
    """Wall time of the optimizer."""
    processor_s: float = field(default=0.0, compare=False)
    """Processor time of the whole step, of all threads; 0 if unknown."""


class Timeline(abc.ABC):
    """Source of time marks, and of the seconds between them."""

    has_processor_time = False
    """The timeline has processor times."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Return a mark of the present time."""

    @abc.abstractmethod
    def has_passed(self, mark: Any) -> bool:
        """Return whether the work requested before the mark is done."""

    @abc.abstractmethod
    def seconds(self, span: TimeSpan) -> float:
        """Return the seconds from the first mark to the second, which have both passed."""

    def processor_s(self, span: TimeSpan) -> float:
        """Return the processor time of this process between the marks; 0 if unknown."""
        return 0.0

    def queued_s(self, span: TimeSpan) -> float:
        """Return the seconds between the marks in which this process was ready to run and had no processor."""
        return 0.0

    def host_s(self) -> float:
        """Return the wall clock of this process, in seconds."""
        return time.perf_counter()

    def steady_s(self, wall_s: float, worked_s: float) -> float:
        """Return the average time of work that took `wall_s`, with `worked_s` of processor time."""
        return wall_s


class HostTimeline(Timeline):
    """Wall clock: work is done when the call that does it returns."""

    has_processor_time = True

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = lambda: 0.0,
        quota: Callable[[], cgroups.CpuQuota | None] = lambda: None,
        queued: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Create it.

        Args:
            clock: Seconds on the wall.
            processor: Processor time of this process.
            quota: Quota that binds this process.
            queued: Seconds in which this process was ready to run and had no processor; None if they are not counted.
        """
        self._clock, self._processor, self._quota, self._queued = clock, processor, quota, queued
        self._throttled = _times_throttled(quota())

    @classmethod
    def of_this_process(cls) -> Self:
        """Return a timeline with processor time and quota of this process."""
        return cls(
            processor=time.process_time, quota=cgroups.ProcessCpuQuota().read, queued=cgroups.ProcessorQueue().waited_s
        )

    def mark(self) -> tuple[float, float, float | None]:
        return self._clock(), self._processor(), self._queued()

    def host_s(self) -> float:
        return self._clock()

    def has_passed(self, mark: tuple[float, float, float | None]) -> bool:
        return True

    def seconds(self, span: TimeSpan) -> float:
        return span[1][0] - span[0][0]

    def processor_s(self, span: TimeSpan) -> float:
        return span[1][1] - span[0][1]

    def queued_s(self, span: TimeSpan) -> float:
        begin, end = span[0][2], span[1][2]
        if begin is None or end is None:  # not counted: all that is no processor time is taken for it
            return max(0.0, self.seconds(span) - self.processor_s(span))
        return end - begin

    def steady_s(self, wall_s: float, worked_s: float) -> float:
        """Return the average time by the quota, if it has throttled this process since the last call."""
        quota = self._quota()
        before, self._throttled = self._throttled, _times_throttled(quota)
        return balancing.steady_state_s(wall_s, worked_s, quota) if quota and self._throttled > before else wall_s


class CudaTimeline(Timeline):
    """Events of one GPU's current stream: calls return before the work is done, and the timer must not wait for it.

    The GPU is named: threads differ in their current one, and no time passes between events of two GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event, which passes once the work before it is done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, span: TimeSpan) -> float:
        return span[0].elapsed_time(span[1]) / 1e3


@dataclass(kw_only=True, slots=True)
class _StepMarks:
    """Marks of one train step."""

    begin: Any
    begun_s: float
    """Host time of its begin, as of the others."""
    input_begun_s: float = 0.0
    """Processor time of this thread at its begin."""
    input_processor_s: float = 0.0
    arrived_s: float | None = None
    ended_s: float = 0.0
    num_samples: int = 0
    ready: Any = None
    reduced: Any = None
    end: Any = None
    forwards: list[TimeSpan] = field(default_factory=list)
    waits: list[TimeSpan] = field(default_factory=list)
    updates: list[TimeSpan] = field(default_factory=list)


class StepTimer:
    """Measures train steps from the events of a step; returns each step's time once it is known."""

    def __init__(self, timeline: Timeline, record: Callable[[MeasuredStep], object] = lambda step: None) -> None:
        """Create it; `record` gets each measured step."""
        self._timeline, self._listeners = timeline, [record]
        self._step: _StepMarks | None = None
        self._span_begin: Any = None
        self._forward_begin: Any = None
        self._ended_steps: deque[_StepMarks] = deque()

    def add_listener(self, record: Callable[[MeasuredStep], object]) -> None:
        """Let another function get each measured step too."""
        self._listeners.append(record)

    def begin_step(self) -> None:
        """Start a step: the loader is asked for the next batch."""
        self._step = _StepMarks(
            begin=self._timeline.mark(), begun_s=self._timeline.host_s(), input_begun_s=time.thread_time()
        )

    def record_samples(self, num_samples: int) -> None:
        if self._step is not None:
            self._step.num_samples, self._step.arrived_s = num_samples, self._timeline.host_s()
            self._step.input_processor_s = time.thread_time() - self._step.input_begun_s

    def open_forward(self, *_: object) -> None:
        """Start a forward pass; a hook of modules. Passes of an evaluation, after the gradients, do not count."""
        is_counted = self._step is not None and self._step.ready is None
        self._forward_begin = self._timeline.mark() if is_counted else None

    def close_forward(self, *_: object) -> None:
        """End a forward pass; a hook of modules."""
        if self._forward_begin is not None and self._step is not None:
            self._step.forwards.append((self._forward_begin, self._timeline.mark()))
        self._forward_begin = None

    def open_span(self, *_: object) -> None:
        """Start a span that is measured separately; also a hook of modules and optimizers."""
        self._span_begin = self._timeline.mark()

    def close_wait(self, *_: object) -> None:
        """End the span as a wait for others."""
        if self._span_begin is not None and self._step is not None:
            self._step.waits.append((self._span_begin, self._timeline.mark()))
        self._span_begin = None

    @contextlib.contextmanager
    def wait(self) -> Generator[None]:
        """Context of a wait for others."""
        self.open_span()
        try:
            yield
        finally:
            self.close_wait()

    def close_update(self, *_: object) -> None:
        """End the span as an update: computing during which no other rank waits."""
        step = self._step
        if self._span_begin is not None and step is not None and step.ready is not None:
            step.updates.append((self._span_begin, self._timeline.mark()))
        self._span_begin = None

    def gradients_ready(self) -> None:
        """Note that all gradients of a pass are computed; communication follows."""
        if self._step is None:
            return
        self._step.ready, self._step.reduced = self._timeline.mark(), None
        queue = torch.autograd.Variable._execution_engine.queue_callback
        with contextlib.suppress(RuntimeError):  # outside of a backward pass
            queue(lambda: queue(self._gradients_reduced))  # twice: after DDP's own, which waits for all buckets

    def _gradients_reduced(self) -> None:
        if self._step is not None:
            self._step.reduced = self._timeline.mark()

    def end_step(self) -> None:
        """End the step. Without communication, all of it was computing."""
        step, self._step = self._step, None
        if step is None or step.num_samples == 0:
            return
        if step.ready is None:
            step.ready = self._timeline.mark()
        if self._timeline.has_processor_time:
            step.end = self._timeline.mark()
        step.ended_s = self._timeline.host_s()
        self._ended_steps.append(step)

    def take_measured_steps(self) -> list[MeasuredStep]:
        """Return the steps measured since the last call."""
        taken: list[MeasuredStep] = []
        while self._ended_steps and self._has_passed(self._ended_steps[0]):
            taken.append(self._measure(self._ended_steps.popleft()))
            for listener in self._listeners:
                listener(taken[-1])
        return taken

    def _measure(self, step: _StepMarks) -> MeasuredStep:
        seconds = self._timeline.seconds
        spans = ((step.begin, step.ready), *step.updates)
        update_s = sum(map(seconds, step.updates))
        computing_s = seconds(spans[0]) + update_s - sum(map(seconds, step.waits))
        worked_s = sum(map(self._timeline.processor_s, spans))
        reduced = step.reduced if step.reduced is not None else step.updates[0][0] if step.updates else step.ready
        input_s = 0.0 if step.arrived_s is None else step.arrived_s - step.begun_s
        return MeasuredStep(
            num_samples=step.num_samples,
            seconds=self._timeline.steady_s(computing_s, worked_s),
            outside_ratio=self._outside_ratio(step, spans, computing_s),
            wall_s=step.ended_s - step.begun_s,
            input_s=input_s,
            input_processor_s=step.input_processor_s,
            compute_s=max(0.0, computing_s - update_s - input_s),
            forward_s=sum(map(seconds, step.forwards)),
            exchange_s=max(0.0, seconds((step.ready, reduced))),
            update_s=update_s,
            processor_s=0.0 if step.end is None else self._timeline.processor_s((step.begin, step.end)),
        )

    def _outside_ratio(self, step: _StepMarks, spans: Sequence[TimeSpan], computing_s: float) -> float:
        worked_s = sum(map(self._timeline.processor_s, spans))
        queued_s = sum(map(self._timeline.queued_s, spans)) - sum(map(self._timeline.queued_s, step.waits))
        if step.end is None or worked_s <= 0 or computing_s <= 0 or queued_s < _THROTTLED * worked_s:
            return 0.0
        outside_s = self._timeline.processor_s((step.begin, step.end)) - worked_s
        return max(0.0, outside_s * (1 + queued_s / worked_s) / computing_s)

    def _has_passed(self, step: _StepMarks) -> bool:
        marks = (step.ready, *(end for _, end in step.updates))
        return all(map(self._timeline.has_passed, marks if step.reduced is None else (*marks, step.reduced)))


def choose_timeline(model: nn.Module) -> Timeline:
    """Return the timeline of the model's device; of a model on several GPUs, that of its last parameters."""
    gpus = cuda_devices(model)
    return CudaTimeline(gpus[-1]) if gpus else HostTimeline.of_this_process()


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """Return the GPUs of a model's parameters, in the model's order."""
    return list(dict.fromkeys(each.device for each in model.parameters() if each.device.type == "cuda"))


def _times_throttled(quota: cgroups.CpuQuota | None) -> int:
    return quota.num_throttled if quota else 0


def attach_timer(timer: StepTimer, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Attach the timer to model and optimizer; the communication hook reports gradients."""
    if any(True for _ in model.module.buffers()):
        model.register_forward_pre_hook(timer.open_span)
        model.module.register_forward_pre_hook(timer.close_wait)
    model.module.register_forward_pre_hook(timer.open_forward)
    model.register_forward_hook(timer.close_forward)  # after hooks of the script's on its module
    optimizer.register_step_pre_hook(timer.open_span)
    optimizer.register_step_post_hook(timer.close_update)
