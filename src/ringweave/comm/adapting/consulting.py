"""How the ranks of a group consult: numbers up a tree to the first rank, text down to all; and what each says, to all.

The messages are part of a collective: they go over the connections of its lane, at its turn, under its time limit. So a
rank that is gone is found out, named and blamed as in any collective, and nothing can wait in a circle.
"""

import functools
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ringweave.comm import hearing
from ringweave.comm.members import Members
from ringweave.comm.transport.seam import Transport
from ringweave.planning.adapting import rulings
from ringweave.schedules.programs.staging import NO_STAGE, Layout, Stage

FAN_OUT = 8
MAX_BYTES = rulings.MAX_BYTES
_LENGTH = struct.Struct("<q")


class Council:
    """The ranks of a group in a tree, during one collective of one lane."""

    def __init__(self, members: Members, transport: Transport, *, tag: int, timeout_s: float) -> None:
        """`tag` keeps these messages apart from those of other collectives."""
        self._own, self._size = members.group_rank, members.group_size
        self._parent = (self._own - 1) // FAN_OUT if self._own else None
        self._children = _children(self._own, self._size)
        self._transport, self._tag, self._timeout_s = transport, tag, timeout_s
        transport.connect({*self._children, *(() if self._parent is None else (self._parent,))}, timeout_s)

    def consult(self, own: Sequence[float], rule: Callable[[list[float]], str]) -> str:
        """What the first rank says to the combined numbers of all ranks; nobody returns before all have come.

        Args:
            own: This rank's numbers, as many on every rank; they are combined by minimum, leaving not-a-number out.
            rule: Called on the first rank only.

        Raises:
            TransferFailedError: A rank is gone or silent.
            MismatchError: A rank is doing something else.
            DisagreementError: The first rank says more than any ruling has.

        Cost:
            Two messages up and down for each rank, in a tree of eight branches.
        """
        combined = self._gather(own)
        text = rule(combined) if self._parent is None else ""
        return self._spread(text)

    def wait_all(self) -> None:
        """Block until all ranks are here."""
        self.consult([0.0], lambda _: "")

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """(group_size, width): what each rank says, on all ranks; nobody returns before all have come.

        Args:
            own: (width,) on the processor, of the same width and dtype on every rank.

        Raises:
            TransferFailedError: A rank is gone or silent.
            MismatchError: A rank is doing something else.

        Cost:
            One message up and one down for each rank, in a tree of eight branches.
        """
        table = own.new_empty((self._size, *own.shape))
        branches = [_branch(child, self._size) for child in self._children]
        parts = [own.new_empty((len(branch), *own.shape)) for branch in branches]
        self._receive([(_flat(part), child) for part, child in zip(parts, self._children, strict=True)])
        for part, branch in zip(parts, branches, strict=True):
            table[branch] = part
        table[self._own] = own
        if self._parent is not None:
            self._send(_flat(table[_branch(self._own, self._size)] if branches else own), [self._parent])
            self._receive([(_flat(table), self._parent)])
        if self._children:
            self._send(_flat(table), self._children)
        return table

    def _gather(self, own: Sequence[float]) -> list[float]:
        numbers = np.array(own, np.float64)
        landings = [np.empty_like(numbers) for _ in self._children]
        pieces = [torch.from_numpy(landing.view(np.uint8)) for landing in landings]
        self._receive(list(zip(pieces, self._children, strict=True)))
        for landing in landings:
            numbers = np.fmin(numbers, landing)
        if self._parent is not None:
            self._send(torch.from_numpy(numbers.view(np.uint8)), [self._parent])
        return numbers.tolist()

    def _spread(self, text: str) -> str:
        body = text.encode()
        if self._parent is not None:
            head = torch.empty(_LENGTH.size, dtype=torch.uint8)
            self._receive([(head, self._parent)])
            length = _LENGTH.unpack(bytes(head.tolist()))[0]
            hearing.check_length(length, "text of the first rank", most=MAX_BYTES)
            landing = torch.empty(length, dtype=torch.uint8)
            if length:
                self._receive([(landing, self._parent)])
            body = bytes(landing.numpy())
        if self._children:
            self._send(_bytes(_LENGTH.pack(len(body))), self._children)
            if body:
                self._send(_bytes(body), self._children)
        return body.decode(errors="replace")

    def _send(self, content: torch.Tensor, peers: Sequence[int]) -> None:
        stage = Stage(0, len(peers), NO_STAGE, is_awaited=False)
        self._transport.begin(Layout((stage,), content.numel()), 1)
        exposed = self._transport.expose(content)
        for handle in [self._transport.send(exposed[:], peer, self._tag, 0) for peer in peers]:
            self._transport.wait(handle, self._timeout_s)

    def _receive(self, parts: Sequence[tuple[torch.Tensor, int]]) -> None:
        handles = [self._transport.receive(self._transport.expose(piece)[:], peer, self._tag) for piece, peer in parts]
        for handle, (piece, _) in zip(handles, parts, strict=True):
            shown = self._transport.wait(handle, self._timeout_s)
            if shown is not None:
                shown.copy_to(piece)
                self._transport.release(handle)


def _children(rank: int, size: int) -> list[int]:
    return list(range(FAN_OUT * rank + 1, min(size, FAN_OUT * rank + FAN_OUT + 1)))


@functools.lru_cache(maxsize=4096)
def _branch(rank: int, size: int) -> list[int]:
    """A rank and all below it in the tree."""
    return [rank, *(each for child in _children(rank, size) for each in _branch(child, size))]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in place."""
    return tensor.view(-1).view(torch.uint8)


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
