"""Tensors copied side by side into memory that is used again, in the order in which a file has them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringweave.training.checkpoints.encoding import DTYPES

NUM_KEPT = 2
"""Buffers: one that is being written, one that waits for its turn or is being filled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """Tensors as they were at one moment."""

    entries: Mapping[str, dict[str, Any]]
    """Name -> dtype, shape and data_offsets, as the header of a safetensors file has them."""
    num_bytes: int
    buffer: Tensor
    """Of uint8, at least num_bytes long."""
    wait_copied: Callable[[], None]
    """Blocks until the bytes are there: copies from a GPU are under way when the training goes on."""

    def content(self) -> memoryview:
        """The bytes of all tensors, without a copy."""
        return memoryview(self.buffer.numpy().data)[: self.num_bytes]


class Stage:
    """Memory to copy tensors to. It is kept, since the first touch of new memory takes longer than the copy."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """The tensors as they are now. On a GPU the copy is queued behind what is queued there already."""
        entries, num_bytes = lay_out(tensors)
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        buffer = self._take(num_bytes, is_pinned=bool(devices))
        for name, tensor in tensors.items():
            first, end = entries[name]["data_offsets"]
            place = buffer[first:end].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=tensor.device.type == "cuda")
        return Staged(entries=entries, num_bytes=num_bytes, buffer=buffer, wait_copied=_mark(devices))

    def give_back(self, staged: Staged) -> None:
        """Its bytes are not needed any more."""
        if len(self._free) < NUM_KEPT:
            self._free.append(staged.buffer)

    def _take(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= num_bytes and buffer.is_pinned() == is_pinned:
                return buffer
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def lay_out(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """(entries of a safetensors header, bytes of all): large elements first, so that each is aligned to its size."""
    entries, first = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        end = first + math.prod(tensor.shape) * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
        first = end
    return entries, first


def _mark(devices: set[torch.device]) -> Callable[[], None]:
    events = []
    for device in devices:
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(device))

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait
