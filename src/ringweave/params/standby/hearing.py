"""Which rings a server hears, as its process has it."""

import ipaddress
import threading
import time
from collections.abc import Callable, Sequence

from ringweave import wire
from ringweave.params.rules.audience import Audience, Reach
from ringweave.params.serving.attending import ring_of
from ringweave.params.serving.service import ParameterService
from ringweave.wire import PeerStatus

_FRESH_PER_LEASE = 0.5
"""When the lease is over, what was heard in its second half shows that not all was lost with the other server."""


class Hearing:
    """Which rings this server hears, by what comes in on their connections; for any number of threads."""

    def __init__(self, host: str, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`host` is the address at which this server listens; see `Leadership` for `lease_s`."""
        self._host, self._lease_s, self._clock = host, lease_s, clock
        self._audience, self._lock = Audience(_FRESH_PER_LEASE * lease_s), threading.Lock()
        self._rings: frozenset[int] = frozenset()
        self._received: dict[tuple[wire.Identity, str], float] = {}
        self._looked_s = clock()
        self._heard_s: dict[wire.Identity, float] = {}

    def hear(self, peers: Sequence[PeerStatus], service: ParameterService) -> None:
        """Look at all connections, again and again. What is new may have come just after the last look."""
        rings = service.attendance.expected()
        job, now_s = service.job, self._clock()
        since_s, self._looked_s = self._looked_s, now_s
        received = {(peer.identity, peer.address): peer.traffic["bytes_received"] for peer in peers}
        with self._lock:
            self._rings = frozenset(rings)
            for (peer, address), num_bytes in received.items():
                if peer.role == "worker" and num_bytes > self._received.get((peer, address), 0):
                    ring = ring_of(job, peer) if job else None
                    self._heard_s[peer] = since_s
                    self._audience.heard(
                        -1 if ring is None else ring, since_s, is_elsewhere=self._is_elsewhere(address)
                    )
            self._received = received

    def reach(self) -> Reach:
        """What is heard now."""
        with self._lock:
            return self._audience.reach(self._rings, self._clock())

    def lately(self, peers: Sequence[PeerStatus]) -> list[wire.Identity]:
        """Those who are connected and were heard lately: others may be cut off, and their connections not know it."""
        with self._lock:
            since_s = self._clock() - self._lease_s
            return [each for each in {peer.identity for peer in peers} if self._heard_s.get(each, since_s) > since_s]

    def _is_elsewhere(self, address: str) -> bool:
        """Whether it can only be heard over the network; of a job on one machine, where nothing is cut off, all can."""
        host = address.rpartition(":")[0]
        return host != self._host or ipaddress.ip_address(host).is_loopback
