"""Virtual devices on a clock that the test moves."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ringweave_bench.virtual_device import TimedBlock, VirtualDevice


class Time:
    """A clock whose sleeps end late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 100.0, late_s

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.late_s


def test_work_takes_longer_on_slower_devices() -> None:
    for speed in (0.5, 1.0, 4.0):
        time = Time()
        VirtualDevice(speed, time.clock, time.sleep).compute(2.0)
        assert time.now_s == 100 + 2 / speed


def test_sleeps_that_end_late_are_made_up_for() -> None:
    time = Time(late_s=0.25)
    device = VirtualDevice(1.0, time.clock, time.sleep)
    for _ in range(10):
        device.compute(1.0)
    assert time.now_s == 110.25, "late once, not ten times"
    assert device.busy_s == 10


def test_a_block_computes_waits_and_keeps_its_device_when_copied() -> None:
    time = Time()
    device = VirtualDevice(2.0, time.clock, time.sleep)
    inner = nn.Linear(3, 3)
    block = TimedBlock(inner, 1.0, 4.0, device)
    x = torch.randn(5, 3)
    y = block(x)
    assert torch.equal(y, inner(x))
    assert time.now_s == 100.5
    y.sum().backward()
    assert time.now_s == 102.5
    assert inner.weight.grad is not None
    assert copy.deepcopy(block).device is device


def test_what_a_block_computes_itself_counts_towards_its_time() -> None:
    time = Time()
    device = VirtualDevice(1.0, time.clock, time.sleep)

    class Costly(torch.autograd.Function):
        """Takes half a second each way."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            time.now_s += 0.5
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            time.now_s += 0.5
            return gradients[0] * 2

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Costly.apply(x)

    x = torch.ones(3, requires_grad=True)
    y = TimedBlock(Inner(), 1.0, 4.0, device)(x)
    assert time.now_s == 101
    y.sum().backward()
    assert time.now_s == 105, "backward takes 4 s with the block's own part, not beside it"
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_of_several_inputs_each_keeps_its_gradient() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, index: Tensor) -> Tensor:
            return (x * scale)[index]

    time = Time()
    x, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    y = TimedBlock(Two(), 1.0, 4.0, VirtualDevice(1.0, time.clock, time.sleep))(x, scale, torch.arange(2))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 0.0]
    assert scale.grad is None
    assert time.now_s == 105


def test_without_data_nothing_is_waited_for() -> None:
    time = Time()
    block = TimedBlock(nn.Linear(3, 3), 1.0, 4.0, VirtualDevice(1.0, time.clock, time.sleep)).to("meta")
    assert block(torch.empty(5, 3, device="meta")).shape == (5, 3)
    assert time.now_s == 100
