"""What a timer makes of a train step, on a clock that is moved by hand."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ringweave.topology.cgroups import CpuQuota
from ringweave.training import timing
from ringweave.training.timing import HostTimeline, MeasuredStep, StepTimer, Timeline
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> StepTimer:
    return StepTimer(HostTimeline(clock))


def times(timer: StepTimer) -> list[tuple[int, float]]:
    """(samples, seconds) of each step measured since the last call."""
    return [(step.num_samples, step.seconds) for step in timer.take_measured_steps()]


def test_waits_for_others_are_left_out(clock: Clock, timer: StepTimer) -> None:
    timer.begin_step()
    clock.now_s += 1  # loading
    timer.record_samples(8)
    timer.open_span()
    clock.now_s += 100  # buffers of rank 0 come
    timer.close_wait()
    with timer.wait():
        clock.now_s += 100  # a trainer asks the others for their numbers of tokens
    clock.now_s += 2  # forward and backward
    timer.gradients_ready()
    clock.now_s += 100  # allreduce
    timer.open_span()
    clock.now_s += 4  # update
    timer.close_update()
    clock.now_s += 100  # the script logs
    timer.end_step()
    assert times(timer) == [(8, 7.0)]
    assert times(timer) == []


@pytest.mark.parametrize(
    ("waited_s", "queued", "outside"),
    [
        pytest.param(30.0, 1.0, 0.5, id="throttled"),
        pytest.param(30.0, None, 0.5, id="throttled, and the kernel does not count it"),
        pytest.param(30.0, 0.0, 0.0, id="an accelerator computes meanwhile"),
        pytest.param(0.0, 1.0, 0.0, id="never waited"),
    ],
)
def test_a_throttled_rank_is_slow_at_communicating_too(
    clock: Clock, waited_s: float, queued: float | None, outside: float
) -> None:
    """Four seconds of work take it four and `waited_s`; in the allreduce it works for two, and waits for a hundred."""
    processor, queue = Clock(), Clock()
    timer = StepTimer(HostTimeline(clock, processor, queued=lambda: None if queued is None else queue.now_s))

    def work(seconds: float) -> None:
        clock.now_s, processor.now_s = clock.now_s + seconds, processor.now_s + seconds

    timer.begin_step()
    timer.record_samples(8)
    work(3)
    clock.now_s += waited_s
    queue.now_s += waited_s * (queued or 0.0)
    timer.gradients_ready()
    work(2)
    clock.now_s += 100
    timer.open_span()
    work(1)
    timer.close_update()
    timer.end_step()
    assert timer.take_measured_steps() == [MeasuredStep(num_samples=8, seconds=4.0 + waited_s, outside_ratio=outside)]


def test_the_parts_of_a_step_are_known_and_add_up(clock: Clock) -> None:
    processor, found = Clock(), list[MeasuredStep]()
    timer = StepTimer(HostTimeline(clock, processor), found.append)
    timer.begin_step()
    clock.now_s += 2  # the batch comes
    timer.record_samples(8)
    clock.now_s += 1
    with timer.wait():
        clock.now_s += 16  # buffers
    clock.now_s, processor.now_s = clock.now_s + 4, 3.0
    timer.gradients_ready()
    clock.now_s += 8  # the others
    timer.open_span()
    clock.now_s += 32
    timer.close_update()
    clock.now_s += 64  # the script logs
    timer.end_step()
    (taken,) = timer.take_measured_steps()
    (step,) = found
    assert step is taken
    assert (step.wall_s, step.input_s, step.compute_s, step.exchange_s, step.update_s) == (127, 2, 5, 8, 32)
    assert (step.seconds, step.processor_s) == (39, 3)


def test_pauses_of_a_quota_count_on_average(clock: Clock) -> None:
    """10 ms by a quarter of a core take 40 ms on average. The second step met no pause, the third no throttling."""
    processor, told = Clock(), CpuQuota(cores=0.25, period_s=0.04, num_throttled=7)
    timer = StepTimer(HostTimeline(clock, processor, lambda: told))
    seconds = []
    for wall_s, throttled in ((0.06, 8), (0.01, 9), (0.01, 9)):
        timer.begin_step()
        timer.record_samples(8)
        clock.now_s, processor.now_s = clock.now_s + wall_s, processor.now_s + 0.01
        timer.gradients_ready()
        told = dataclasses.replace(told, num_throttled=throttled)
        timer.end_step()
        seconds += [each.seconds for each in timer.take_measured_steps()]
    assert seconds == pytest.approx([0.04, 0.04, 0.01])


def test_a_step_without_communication_is_computing_all_the_time(clock: Clock, timer: StepTimer) -> None:
    timer.begin_step()
    timer.record_samples(8)
    clock.now_s += 3
    timer.end_step()
    assert times(timer) == [(8, 3.0)]


def test_steps_without_samples_and_what_is_outside_of_steps_do_not_count(clock: Clock, timer: StepTimer) -> None:
    timer.end_step()
    timer.open_span()
    timer.close_update()
    timer.gradients_ready()
    timer.begin_step()
    timer.record_samples(0)
    clock.now_s += 3
    timer.end_step()
    assert times(timer) == []


class Device(Timeline):
    """A device on which nothing is done before `done` says so."""

    def __init__(self) -> None:
        self.num_marks, self.done = 0, 0

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def has_passed(self, mark: int) -> bool:
        return mark <= self.done

    def seconds(self, span: tuple[Any, Any]) -> float:
        return float(span[1] - span[0])


def test_what_a_device_has_not_done_yet_is_told_later() -> None:
    device = Device()
    timer = StepTimer(device)
    for num_samples in (8, 9):
        timer.begin_step()
        timer.record_samples(num_samples)
        timer.gradients_ready()
        timer.end_step()
    assert times(timer) == []
    device.done = 2
    assert times(timer) == [(8, 1.0)]
    device.done = 4
    assert times(timer) == [(9, 1.0)]


class OnDevice(nn.Module):
    """A model whose parameters say that they are there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def parameters(self, recurse: bool = True):
        return iter([SimpleNamespace(device=torch.device(self._kind))])


def test_what_computes_on_a_device_is_timed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(timing.choose_timeline(OnDevice("cuda")), timing.CudaTimeline)
    assert isinstance(timing.choose_timeline(OnDevice("cpu")), timing.HostTimeline)
