"""Moving pieces between two ranks: the seam, and its implementation on Gloo's peer-to-peer messages."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

_ABORT_TAG = 2**31 - 1
"""A tag that no message carries."""


class TransferFailedError(Exception):
    """A message did not get through.

    `peer` is the group rank at the other end, None where it is not known; `hung` tells a time-out from a closed
    connection.
    """

    def __init__(self, peer: int | None, text: str, *, hung: bool) -> None:
        super().__init__(text)
        self.peer = peer
        self.hung = hung

    @classmethod
    def from_gloo(cls, peer: int | None, cause: RuntimeError) -> "TransferFailedError":
        """What Gloo's error says."""
        text = _first_line(cause)
        return cls(peer, text, hung="imed out" in text or "imeout" in text)


class Handle(Protocol):
    """A message under way; torch's `Work` is one."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is through; RuntimeError if it fails or `timeout` passes."""
        ...


class Transport(Protocol):
    """Peer-to-peer messages within a group; messages of one tag between two ranks stay in order."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Start sending a contiguous tensor, and return a handle; the tensor must not change until it has left."""
        ...

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a receive into a contiguous tensor, and return a handle."""
        ...

    def wait(self, handle: Handle, peer: int, timeout_s: float) -> None:
        """Block until the message of `handle` is through.

        Raises:
            TransferFailedError: The peer is gone, or did not answer within `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Let go of the connections when nothing is in flight any more."""
        ...

    def abort(self) -> None:
        """Cut all connections at once: what is in flight fails, here and at the peers."""
        ...


class GlooTransport:
    """Messages over a Gloo context of their own, so that they never meet the host library's collectives."""

    def __init__(self, store: Store, group_rank: int, group_size: int, timeout: timedelta) -> None:
        """Connect to every peer; TransferFailedError if one does not come within `timeout`."""
        try:
            self._gloo: Any = ProcessGroupGloo(store, group_rank, group_size, timeout)
        except RuntimeError as cause:
            raise TransferFailedError.from_gloo(None, cause) from cause

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending; see `Transport`."""
        return self._checked(peer, lambda gloo: gloo.send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Post a receive; see `Transport`."""
        return self._checked(peer, lambda gloo: gloo.recv([tensor], peer, tag))

    def wait(self, handle: Handle, peer: int, timeout_s: float) -> None:
        """Block until the message is through; see `Transport`."""
        try:
            handle.wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as cause:
            raise TransferFailedError.from_gloo(peer, cause) from cause

    def close(self) -> None:
        """Drop the last reference: Gloo closes its sockets."""
        self._gloo = None

    def abort(self) -> None:
        """Cut all connections at once."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            cut_pairs(gloo)

    def _checked(self, peer: int, start: Callable[[Any], Work]) -> Work:
        if self._gloo is None:
            raise TransferFailedError(peer, "the connections of this group are closed", hung=False)
        try:
            return start(self._gloo)
        except RuntimeError as cause:
            raise TransferFailedError.from_gloo(peer, cause) from cause


def cut_pairs(gloo: Any) -> None:
    """Close the connections of a Gloo context: what is in flight fails, here and at the peers.

    Gloo's own abort leaves them open (torch 2.13), and they stay open while any message is pending. But a wait that
    times out closes the pair that it waits on, so we wait for a message that never comes, from each peer.
    """
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def _first_line(cause: BaseException) -> str:
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
