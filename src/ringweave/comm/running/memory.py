"""The memory that collectives work in: whole pages from the kernel, which go back to it when nobody refers to them.

Not malloc's: every thread of a process may get a pool of glibc's of its own, and once a program has freed some large
tensors glibc takes tensors of up to 32 MiB out of these pools and keeps up to 64 MiB in each of them for later. Lanes
and their threads come and go with their groups, so that memory of each group would stay.
"""

import mmap

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


def take_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """One-dimensional, on the CPU, zeroed when first touched; the kernel has it back once nobody refers to it."""
    num_bytes = num_elements * dtype.itemsize
    if not num_bytes:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype)


def flatten(tensor: Tensor) -> Tensor:
    """The elements in one dimension: the tensor's own memory, or a copy where that is not contiguous."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.as_strided((tensor.numel(),), (1,))
    if tensor.device.type != "cpu":
        return tensor.flatten()
    copy = take_pages(tensor.numel(), tensor.dtype)
    copy.view(tensor.shape).copy_(tensor)
    return copy


def write_back(message: Tensor, tensor: Tensor) -> None:
    """Bring what `flatten` may have copied home."""
    if message.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(message.view(tensor.shape))


class Scratch:
    """Memory that is kept from run to run: fresh pages cost as much as the additions."""

    def __init__(self) -> None:
        self._memory = take_pages(0, torch.uint8)

    def take(self, num_buffers: int, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
        """So many buffers of so many elements; they last until the next call."""
        stride_bytes = -(-num_elements * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._memory.numel() < num_buffers * stride_bytes:
            self._memory = take_pages(0, torch.uint8)  # goes back before there is more
            self._memory = take_pages(num_buffers * stride_bytes, torch.uint8)
        num_bytes = num_elements * dtype.itemsize
        starts = range(0, num_buffers * stride_bytes, max(1, stride_bytes))
        return [self._memory[start : start + num_bytes].view(dtype) for start in starts]
