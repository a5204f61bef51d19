"""What went over a connection, counted."""

import threading
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Traffic:
    """Counters of one connection; one thread sends and one receives, so each counter has one writer."""

    bytes_sent: int = 0
    """Bytes of frames, before encryption."""
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    failures: int = 0
    """Calls that ended without an answer: failed, refused, cancelled."""
    calls: int = 0
    """Calls that were answered."""
    latency_sum_s: float = 0.0
    """Sum over the answered calls of the seconds from the call to its answer."""
    latency_max_s: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        """That of both connections."""
        return Traffic(
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
            messages_sent=self.messages_sent + other.messages_sent,
            messages_received=self.messages_received + other.messages_received,
            failures=self.failures + other.failures,
            calls=self.calls + other.calls,
            latency_sum_s=self.latency_sum_s + other.latency_sum_s,
            latency_max_s=max(self.latency_max_s, other.latency_max_s),
        )

    def as_dict(self) -> dict[str, float]:
        """The counters by name."""
        return asdict(self)


class Latencies:
    """Adds the ends of calls to a connection's counters; from any thread."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._lock = threading.Lock()

    def answered(self, seconds: float) -> None:
        """A call was answered after so many seconds."""
        with self._lock:
            self._traffic.calls += 1
            self._traffic.latency_sum_s += seconds
            self._traffic.latency_max_s = max(self._traffic.latency_max_s, seconds)

    def failed(self) -> None:
        """A call ended without an answer."""
        with self._lock:
            self._traffic.failures += 1
