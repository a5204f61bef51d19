"""Moving pieces of messages between two ranks: the seam that executors use."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from ringweave.schedules.programs.staging import NO_STAGE, Layout


class TransferFailedError(Exception):
    """A message did not get through.

    `peer` is the group rank at the other end, None where it is not known; `hung` tells a time-out from a closed
    connection.
    """

    def __init__(self, peer: int | None, text: str, *, hung: bool) -> None:
        super().__init__(text)
        self.peer = peer
        self.hung = hung


class MismatchError(Exception):
    """A peer sent another message than the one that was expected: it runs something else than we do."""

    def __init__(self, peer: int, *, got: tuple[int, int], expected: tuple[int, int]) -> None:
        (got_tag, got_bytes), (tag, num_bytes) = got, expected
        super().__init__(
            f"a message of {got_bytes} bytes in collective #{got_tag >> 32} came, expected {num_bytes} bytes in "
            f"#{tag >> 32}. Make every rank of the group call the same collectives in the same order with the same "
            "sizes."
        )
        self.peer = peer


class Content(Protocol):
    """What has arrived, where another rank of this node keeps it until it is released."""

    def copy_to(self, region: Tensor) -> None:
        """Bring it into `region`, which is as long."""
        ...

    def combine_into(self, region: Tensor, scratch: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        """Combine it into `region`, which is as long and of the type of its elements.

        `scratch` may be written: as long as `region` or longer, and of the same type.
        """
        ...


class Transport(Protocol):
    """Peer-to-peer messages within a group; messages between two ranks arrive in the order of sending."""

    def expose(self, tensor: Tensor) -> Any:
        """The memory of a contiguous one-dimensional tensor: sliced by elements, it gives what is sent and received."""
        ...

    def connect(self, peers: Iterable[int], timeout_s: float | None = None) -> None:
        """Make sure that `peers` can be reached; they do the same with us.

        Args:
            peers: Group ranks.
            timeout_s: How long they may take to begin with it; None is what the transport gives them.

        Raises:
            TransferFailedError: A peer is gone, or did not come in time.
        """
        ...

    def begin(self, layout: Layout, element_bytes: int) -> None:
        """Get ready for a collective that shows so much content to the ranks of this node."""
        ...

    def send(self, piece: Any, peer: int, tag: int, stage: int = NO_STAGE) -> Any:
        """Start sending, and return a handle; the piece must not change until it has left.

        `stage` is the content's number in the layout, for a peer that may read it from memory that is shared.
        """
        ...

    def receive(self, piece: Any, peer: int, tag: int) -> Any:
        """Expect the next message from `peer`, with this tag and size, and return a handle."""
        ...

    def wait(self, handle: Any, timeout_s: float) -> Content | None:
        """Block until the message is through.

        Returns:
            None when a received message lies in its piece; else what can be read until `release`.

        Raises:
            TransferFailedError: A peer is gone, or silent for `timeout_s`.
            MismatchError: A peer sent something else.
        """
        ...

    def release(self, handle: Any) -> None:
        """What `wait` returned has been read."""
        ...

    def end(self, timeout_s: float) -> None:
        """Block until the peers have been told all that a collective has to tell them.

        Raises:
            TransferFailedError: A peer is gone, or silent for `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Let go of the connections when nothing is in flight any more."""
        ...

    def abort(self) -> None:
        """Cut all connections at once, from any thread: what is in flight fails, here and at the peers."""
        ...
