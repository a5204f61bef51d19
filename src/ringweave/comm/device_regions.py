"""Regions of a message on a device: the tensors that it consists of, and their elements in one dimension."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringweave.comm.engine.executor import flatten_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRegion:
    """A tensor on a device that is consecutive elements of a message."""

    tensor: Tensor
    """Any shape and strides."""
    start: int
    """Its first element in the message."""
    is_input: bool
    """The message begins with its content."""
    is_output: bool
    """It gets the message's content at the end."""


class FlatRegion:
    """Elements of a region in one dimension: its own memory, or memory that stands for it on the device."""

    def __init__(self, region: DeviceRegion, dtype: torch.dtype, copy: Callable[[Tensor, Tensor], object]) -> None:
        """View the region's elements as `dtype`; `copy` enqueues a copy, to the first tensor, on the current stream."""
        self.region = region
        tensor = self._contiguous = region.tensor.detach()
        self.is_copied = not tensor.is_contiguous()
        if self.is_copied:
            self._contiguous = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if region.is_input:
                copy(self._contiguous, tensor)
        self.elements = flatten_tensor(self._contiguous)
        if dtype != tensor.dtype:
            self.elements = self.elements.view(dtype)
        self.start, self.stop = region.start, region.start + self.elements.numel()

    def part(self, start: int, stop: int) -> Tensor:
        """Return the elements `start .. stop` of the message, which are its own."""
        return self.elements[start - self.start : stop - self.start]

    def copy_back(self, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Copy the elements to the tensor if they are not its own memory, on the current stream."""
        if self.is_copied and self.region.is_output:
            copy(self.region.tensor.detach(), self._contiguous)

    def keep(self, keep: Callable[[Tensor], object]) -> None:
        keep(self.region.tensor)
        keep(self.elements)


def overlaps(regions: Sequence[FlatRegion], start: int, stop: int) -> Iterator[tuple[FlatRegion, int, int]]:
    """Yield the regions, which are sorted, that have elements `start .. stop`, with the first of these and the end."""
    for index in range(max(0, bisect.bisect_right(regions, start, key=lambda flat: flat.start) - 1), len(regions)):
        flat = regions[index]
        if flat.start >= stop:
            return
        first, until = max(start, flat.start), min(stop, flat.stop)
        if first < until:
            yield flat, first, until
