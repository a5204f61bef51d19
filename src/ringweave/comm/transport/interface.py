"""Transport interface: the messages between two ranks that executors use."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from ringweave.schedules.program import StagingLayout


class TransferFailedError(Exception):
    """A message did not get through.

    `peer` is the group rank at the other end, None if unknown; `hung` distinguishes a timeout from a closed connection.
    """

    def __init__(self, peer: int | None, text: str, *, hung: bool) -> None:
        super().__init__(text)
        self.peer = peer
        self.hung = hung


class MismatchError(Exception):
    """A peer sent a message other than the expected one: it runs something else."""

    def __init__(self, peer: int, *, got: tuple[int, int], expected: tuple[int, int]) -> None:
        (got_tag, got_bytes), (tag, num_bytes) = got, expected
        super().__init__(
            f"a message of {got_bytes} bytes in collective #{got_tag >> 32} came, expected {num_bytes} bytes in "
            f"#{tag >> 32}. Make every rank of the group call the same collectives in the same order with the same "
            "sizes."
        )
        self.peer = peer


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTraffic:
    """Traffic to one peer of another node, over all connections, by the kernel's counts."""

    sent_bytes: int = 0
    """Bytes that the peer has acknowledged."""
    busy_s: float = 0.0
    """Seconds in which some were on the way."""
    limited_s: float = 0.0
    """Seconds of these in which the peer's process took no more."""

    def plus(self, other: "LinkTraffic") -> "LinkTraffic":
        return LinkTraffic(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            busy_s=self.busy_s + other.busy_s,
            limited_s=self.limited_s + other.limited_s,
        )

    def since(self, before: "LinkTraffic") -> "LinkTraffic":
        """Return the traffic after an earlier sum."""
        return LinkTraffic(
            sent_bytes=self.sent_bytes - before.sent_bytes,
            busy_s=round(self.busy_s - before.busy_s, 6),
            limited_s=round(self.limited_s - before.limited_s, 6),
        )


class ReceivedContent(Protocol):
    """A received piece that another rank of this node keeps until it is released."""

    def copy_to(self, region: Tensor) -> None:
        """Copy it into `region`, which is as long."""
        ...

    def combine_into(self, region: Tensor, scratch: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        """Combine it into `region`, which has its length and dtype.

        `scratch` may be written: as long as `region` or longer, and of the same type.
        """
        ...


class Transport(Protocol):
    """Peer-to-peer messages within a group; messages between two ranks arrive in the order of sending."""

    def expose(self, tensor: Tensor) -> Any:
        """Return the memory of a contiguous 1-D tensor; slices of it, by elements, are sent and received."""
        ...

    def connect(self, peers: Iterable[int], timeout_s: float | None = None) -> None:
        """Make sure that `peers` can be reached; they do the same with us.

        `timeout_s`: limit on waiting for them to start; None is the transport's limit.

        Raises:
            TransferFailedError: A peer is dead, or did not connect in time.
        """
        ...

    def begin_collective(self, layout: "StagingLayout", element_bytes: int) -> None:
        """Prepare for a collective that shares this layout with the ranks of the node."""
        ...

    def send(self, piece: Any, peer: int, tag: int, stage: int = ...) -> Any:
        """Start sending, and return a handle; the piece must not change until it is sent.

        `stage` is the content's number in the layout, for a peer that may read it from shared memory; without
        one it has none.
        """
        ...

    def receive(self, piece: Any, peer: int, tag: int) -> Any:
        """Expect the next message from `peer`, with this tag and size, and return a handle."""
        ...

    def wait(self, handle: Any, timeout_s: float) -> ReceivedContent | None:
        """Block until the message is through.

        Returns:
            None if a received message lies in its piece; else content that can be read until `release`.

        Raises:
            TransferFailedError: A peer is dead, or silent for `timeout_s`.
            MismatchError: A peer sent something else.
        """
        ...

    def release(self, handle: Any) -> None:
        """Release the content that `wait` returned."""
        ...

    def end_collective(self, timeout_s: float) -> None:
        """Block until the peers have received all acknowledgements of the collective.

        Raises:
            TransferFailedError: A peer is dead, or silent for `timeout_s`.
        """
        ...

    def traffic(self) -> Mapping[int, LinkTraffic]:
        """Return the traffic so far to peers of other nodes, by group rank; from any thread."""
        ...

    def close(self) -> None:
        """Close the connections when nothing is in flight any more."""
        ...

    def abort(self) -> None:
        """Abort all connections at once, from any thread: messages in flight fail, here and at the peers."""
        ...
