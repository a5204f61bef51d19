"""What a peer may ask for; everything that a connection allocates or waits for is bounded by one of these."""

from dataclasses import dataclass, fields

from ringweave.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one server or client."""

    max_body_bytes: int = 1 << 20
    """Bytes of a message without its buffers."""
    max_buffers: int = 4096
    """Buffers in one message: one for each tensor of a large model is not too much."""
    max_message_bytes: int = 1 << 30
    """Bytes of all buffers of one message; larger state moves in chunks (`wire.states`)."""
    max_bytes_in_flight: int = 2 << 30
    """Bytes of buffers that a server holds for all its peers together; who comes later waits, unread."""
    max_calls: int = 4
    """Calls of one connection that are under way at once."""
    max_connections: int = 1024
    """Peers that are let in."""
    max_strangers: int = 64
    """Connections that have not yet proved who they are."""
    handshake_s: float = 5.0
    """What a stranger has for each step of proving who it is: the handshake, the hello."""
    patience_s: float = 10.0
    """How long a frame may stand still; also what a frame may take beside the time for its bytes."""
    slowest_bytes_per_s: float = 250_000.0
    """A frame that comes or goes more slowly than this on the whole is cut off: 2 Mbit/s is below any usable link."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise UsageError(
                    explain(each.name, got=getattr(self, each.name), expected="more than 0", do="Raise the limit")
                )
        if self.max_message_bytes > self.max_bytes_in_flight:
            raise UsageError(
                explain(
                    "max_message_bytes",
                    got=self.max_message_bytes,
                    expected=f"at most max_bytes_in_flight, {self.max_bytes_in_flight}",
                    do="Raise max_bytes_in_flight, or no such message could ever be taken",
                )
            )

    def frame_s(self, num_bytes: int) -> float:
        """Seconds that a frame of so many bytes may take from its first byte to its last."""
        return self.patience_s + num_bytes / self.slowest_bytes_per_s
