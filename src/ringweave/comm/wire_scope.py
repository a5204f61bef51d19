"""Wire scope: the wire format that allreduces are asked to take, and the residuals of their error feedback.

A residual holds what a rank's encoding has cut off so far, in the unit of the sum and in the places of the message. The
rank adds it to what it encodes next in the same place. Residuals may be added up or moved from rank to rank: their sum
over all ranks is what the sum of all messages lacks.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_RESIDUALS = 1024
"""Residuals of a group: more messages than a model has buckets are no gradients."""


@dataclass(frozen=True, slots=True)
class WireScope:
    """Wire format of the allreduces of a thread, or of a group."""

    wire: str
    """`exact`, a format, or `auto`."""
    residual_of: Callable[[Tensor], Tensor | None]
    """Gives the residual of a message: float32, on the host, one-dimensional, as long; None loses the errors."""

    @classmethod
    def of_group(cls, wire: str) -> "WireScope":
        """Return the scope of a group whose script names no format: a message is known by its memory and its length."""
        return cls(wire, MessageResiduals().of_message)


class MessageResiduals:
    """Residuals by the address and length of the message's memory, which DDP's buckets keep."""

    def __init__(self) -> None:
        self._by_memory: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def of_message(self, tensor: Tensor) -> Tensor:
        """Return the residual of a message, zero at first; the one that was not used for longest is forgotten."""
        key = tensor.data_ptr(), tensor.numel()
        if key not in self._by_memory:
            self._by_memory[key] = new_residual(tensor.numel())
        self._by_memory.move_to_end(key)
        while len(self._by_memory) > _MAX_RESIDUALS:
            self._by_memory.popitem(last=False)
        return self._by_memory[key]


def new_residual(num_elements: int) -> Tensor:
    """Return a residual of zeros, which takes no memory before it is used."""
    from ringweave.comm.engine.executor import allocate_pages  # late: most groups encode nothing

    return allocate_pages(num_elements, torch.float32)


_scope: ContextVar[WireScope | None] = ContextVar("ringweave_wire", default=None)


def current() -> WireScope | None:
    """Return the scope of the calling thread; None leaves the format to the group."""
    return _scope.get()


@contextlib.contextmanager
def encoded_as(wire: str, residual: Tensor | None) -> Iterator[None]:
    """Let the allreduces that start within take this format, and this residual."""
    token = _scope.set(WireScope(wire, lambda _: residual))
    try:
        yield
    finally:
        _scope.reset(token)
