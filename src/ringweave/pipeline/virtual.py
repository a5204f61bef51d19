"""Virtual devices: blocks that wait instead of computing, so that unequal devices can be measured on few cores.

The wait sleeps, it burns no core: four devices of any speeds fit on two cores, and what is measured is the pipeline's
own waiting, sending and receiving, which is real.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class VirtualDevice:
    """A device of some speed; one for each process, shared by all its blocks."""

    def __init__(
        self,
        speed: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.speed = speed
        """Work per second, in the unit of the blocks' seconds; it may be changed at any time."""
        self.busy_s = 0.0
        """Time that it was asked to compute, so far."""
        self._clock, self._sleep = clock, sleep
        self._late_s = 0.0

    def __deepcopy__(self, _: dict[int, Any]) -> "VirtualDevice":
        """A copied block computes on the same device."""
        return self

    def compute(self, work_s: float, begun_s: float | None = None) -> None:
        """Wait as long as the device takes for this work.

        A sleep ends late by some tens of microseconds, more on a busy machine. The next wait is shorter by that: the
        device has its speed on average, as one that does not depend on this machine would.

        Args:
            work_s: On a device of speed 1.
            begun_s: When the work began, by the device's clock; None means now.
        """
        took_s = work_s / self.speed
        self.busy_s += took_s
        until_s = (self.now_s() if begun_s is None else begun_s) + took_s - min(self._late_s, took_s)
        while (left_s := until_s - self._clock()) > 0:
            self._sleep(left_s)
        self._late_s = self._clock() - until_s

    def now_s(self) -> float:
        """The device's clock."""
        return self._clock()


class TimedBlock(nn.Module):
    """A block that computes what another one does and takes the time that it is told to.

    Args:
        block: A cheap one, whose results are real; its own computing counts towards the time of forward.
        forward_s: On a device of speed 1.
        backward_s: On a device of speed 1; what the block's own backward takes comes on top.
        device: Of this process.
    """

    def __init__(self, block: nn.Module, forward_s: float, backward_s: float, device: VirtualDevice) -> None:
        super().__init__()
        self.block = block
        self.forward_s, self.backward_s, self.device = forward_s, backward_s, device

    def forward(self, *values: Tensor) -> Tensor:
        """What the block gives, at the time the device is done."""
        begun_s = self.device.now_s()
        output = self.block(*values)
        if output.is_meta:
            return output
        self.device.compute(self.forward_s, begun_s)
        return _SlowBackward.apply(output, self.device, self.backward_s)

    def extra_repr(self) -> str:
        """Its times: blocks of other times are of another kind."""
        return f"forward_s={self.forward_s}, backward_s={self.backward_s}"


class _SlowBackward(torch.autograd.Function):
    """Hands on what it is given; the gradient waits."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, device: VirtualDevice, backward_s: float) -> Tensor:
        ctx.device, ctx.backward_s = device, backward_s
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.compute(ctx.backward_s)
        return gradients[0], None, None
