"""Which rings nothing is heard of any more, by what comes in on the connections of their workers."""

from collections.abc import Callable, Sequence

from ringweave.membership.rules.rhythm import SILENCE, Rhythm
from ringweave.wire import Identity, PeerStatus

_STOPPED_S = 0.5
"""Between two looks: more means that this process itself was stopped, saved, or starved."""


class Listening:
    """Learns how often each ring shows that it is there, as membership does of its members.

    How late it looks itself is in what it learns. No grace comes on top: what is taken for silence without need costs
    little, since a ring that nobody waits for goes on all the same.
    """

    def __init__(self, now_s: float) -> None:
        """Has heard nobody."""
        self._looked_s = now_s
        self._rhythms: dict[int, Rhythm] = {}
        self._received: dict[tuple[Identity, str], float] = {}

    def look(self, peers: Sequence[PeerStatus], ring_of: Callable[[Identity], int | None], now_s: float) -> set[int]:
        """Rings that were heard, and ought to have been since; to be asked again and again.

        Args:
            peers: All that are connected now.
            ring_of: Gives the ring of one of them; None if it is in none.
            now_s: Seconds of any clock.
        """
        if now_s - self._looked_s > _STOPPED_S:
            for rhythm in self._rhythms.values():
                rhythm.excuse(now_s)
        self._looked_s = now_s
        received = {(peer.identity, peer.address): peer.traffic["bytes_received"] for peer in peers}
        heard = {ring_of(peer[0]) for peer, num_bytes in received.items() if num_bytes > self._received.get(peer, 0)}
        self._received = received
        for ring in heard:
            if ring is not None:
                rhythm = self._rhythms.setdefault(ring, Rhythm(SILENCE, now_s))
                if rhythm.is_late(now_s):  # it was away: that is not usual
                    rhythm.excuse(now_s)
                rhythm.observe(now_s)
        return {ring for ring, rhythm in self._rhythms.items() if rhythm.is_late(now_s)}
