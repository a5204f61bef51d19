"""A link of limited rate in virtual time, which lets some bytes through at once after a rest, as tc's tbf does."""

from collections.abc import Callable

from ringweave.rpc.state_transfer import BackgroundThrottle

_TICK_S = 0.001


class Link:
    """One reader's chunks, and what others send beside them: each has the same part of the rate while both send."""

    def __init__(self, rate: float, burst_bytes: float, others: Callable[[float], int] = lambda _: 0) -> None:
        """`rate` in bytes per second; `others` says how many streams there are beside ours at a time."""
        self._rate, self._burst_bytes, self._others = rate, burst_bytes, others
        self._tokens = burst_bytes
        self.now_s = 0.0
        self.taken_s = 0.0
        """Seconds of the whole link that our bytes took while others wanted to send."""
        self.contended_s = 0.0

    def wait(self, seconds: float) -> None:
        """Nothing of ours is under way."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self._pass(min(_TICK_S, until_s - self.now_s), 0.0)

    def send(self, num_bytes: float) -> None:
        """Until so many bytes of ours are through."""
        while num_bytes > 0:
            num_bytes -= self._pass(_TICK_S, num_bytes)

    def _pass(self, seconds: float, wanted: float) -> float:
        """How many of our bytes get through."""
        num_others = self._others(self.now_s)
        self.now_s += seconds
        self._tokens += self._rate * seconds
        passed = min(wanted, self._tokens / (1 + num_others))
        self._tokens = 0.0 if num_others else min(self._burst_bytes, self._tokens - passed)
        if num_others:
            self.contended_s += seconds
            self.taken_s += passed / self._rate
        return passed


def read(link: Link, pace: BackgroundThrottle, num_bytes: float, *, gap_s: float = 0.002) -> float:
    """Seconds that it takes to read so many bytes, each chunk asked for so long after the one before."""
    began_s = link.now_s
    while num_bytes > 0:
        asked_s, chunk = link.now_s, min(pace.chunk_bytes, num_bytes)
        link.wait(gap_s)
        link.send(chunk)
        link.wait(pace.pause_s(round(chunk), link.now_s - asked_s))
        num_bytes -= chunk
    return link.now_s - began_s
