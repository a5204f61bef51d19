"""Virtual devices: blocks that sleep instead of computing, so that unequal devices can be measured on few cores.

A sleep uses no core: four devices of any speeds fit on two cores. The pipeline's waiting, sending and receiving are
real.
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
        """Total requested compute time."""
        self._clock, self._sleep = clock, sleep
        self._overslept_s = 0.0

    def __deepcopy__(self, _: dict[int, Any]) -> "VirtualDevice":
        """Return itself: a copied block computes on the same device."""
        return self

    def compute(self, work_s: float, begun_s: float | None = None) -> None:
        """Wait as long as the device takes for this work.

        A sleep ends late by some tens of microseconds, more on a busy machine. The next wait is shorter by that: so
        the device has its speed on average, independent of this machine.

        Args:
            work_s: Seconds on a device of speed 1.
            begun_s: Start of the work by the device's clock; None: now.
        """
        took_s = work_s / self.speed
        self.busy_s += took_s
        until_s = (self.now_s() if begun_s is None else begun_s) + took_s - min(self._overslept_s, took_s)
        while (left_s := until_s - self._clock()) > 0:
            self._sleep(left_s)
        self._overslept_s = self._clock() - until_s

    def now_s(self) -> float:
        """Return the device's clock."""
        return self._clock()


class TimedBlock(nn.Module):
    """A block that computes the same as another one and takes a given time.

    The block's own computing counts towards that time. If no input needs a gradient, as in a model's first block, the
    time of its own backward is added: there is no gradient that could wait.

    Args:
        block: A cheap block, whose results are real.
        forward_s: Seconds on a device of speed 1.
        backward_s: Seconds on a device of speed 1.
        device: Device of this process.
        samples: Samples that take these times, in the first dimension of the input; None: any number does.
    """

    def __init__(
        self,
        block: nn.Module,
        forward_s: float,
        backward_s: float,
        device: VirtualDevice,
        samples: int | None = None,
    ) -> None:
        super().__init__()
        self.block, self.samples = block, samples
        self.forward_s, self.backward_s, self.device = forward_s, backward_s, device

    def forward(self, *values: Tensor) -> Tensor:
        """Return the block's output, after the device's time for it."""
        begun_s = self.device.now_s()
        part = 1.0 if self.samples is None else len(values[0]) / self.samples
        backward = _BackwardWait(self.device, part * self.backward_s)
        if torch.is_grad_enabled() and any(value.requires_grad for value in values):
            backward.ends_at_input = True
            entered = _EnterBlock.apply(backward, *values)
            values = entered if isinstance(entered, tuple) else (entered,)
        output = self.block(*values)
        if output.is_meta:
            return output
        self.device.compute(part * self.forward_s, begun_s)
        return _LeaveBlock.apply(output, backward)

    def extra_repr(self) -> str:
        """Return its times, since blocks with other times are of another kind."""
        return f"forward_s={self.forward_s}, backward_s={self.backward_s}"


class _BackwardWait:
    """One backward of a block: from the arrival of its output's gradient until that of its input leaves."""

    def __init__(self, device: VirtualDevice, work_s: float) -> None:
        self._device, self._work_s = device, work_s
        self._started_s = 0.0
        self.ends_at_input = False
        """The block's own backward lies between begin and end; else it comes behind both."""

    def start(self) -> None:
        """The gradient of the output is there."""
        self._started_s = self._device.now_s()
        if not self.ends_at_input:
            self.wait_until_done()

    def wait_until_done(self) -> None:
        self._device.compute(self._work_s, self._started_s)


class _EnterBlock(torch.autograd.Function):
    """Hands on what it is given; the gradient leaves when the device is done."""

    @staticmethod
    def forward(ctx: Any, backward: _BackwardWait, *values: Tensor) -> Any:
        ctx.ending = backward
        ctx.set_materialize_grads(False)
        handed = tuple(value.view_as(value) for value in values)
        ctx.mark_non_differentiable(
            *(new for new, value in zip(handed, values, strict=True) if not value.is_floating_point())
        )
        return handed if len(handed) > 1 else handed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.ending.wait_until_done()
        return None, *gradients


class _LeaveBlock(torch.autograd.Function):
    """Hands on what it is given; the device begins its backward when the gradient arrives."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, backward: _BackwardWait) -> Tensor:
        ctx.beginning = backward
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.beginning.start()
        return gradients[0], None
