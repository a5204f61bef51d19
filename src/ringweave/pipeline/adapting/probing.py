"""Rates of the links between neighbouring stages, timed again and again with the receiver waiting.

A probe is short, since nobody trains meanwhile: one message each way at the same time (links are full duplex), and
links that share no stage at once. Only where the time differs from the one before it is repeated, and the fastest
counts: whatever else runs makes a message slower, nothing makes it faster than its link.

Such a message is too short for its own rate: a limited link lets a burst through at first, and the answer takes its
time. So it is compared with what the same message took when the links were profiled, and each begins after a pause in
which the link may let through a whole burst again.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.profiling.links import Probe

MESSAGE_S = 0.003
"""What a message is to take at the rate that is believed, beside the burst: next to nothing of a window."""
BURST_BYTES, MOST_BYTES = 128 * 1024, 2**20
"""A limited link lets less than that through at once; no message is longer than the other."""
MOST_PAUSE_S = 0.01
MORE_ROUNDS, FIRST_ROUNDS = 2, 5
_PAYLOAD, _READY, _DONE = 1, 2, 3


class Prober:
    """Times the links of one pipeline; the same calls on all its ranks at the same time."""

    def __init__(
        self,
        pipeline: Pipeline,
        rates: Sequence[float],
        drift: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`rates` in bytes per second are those that links have now; beyond a factor of `drift` a probe is repeated."""
        self._pipeline, self._drift, self._clock, self._sleep = pipeline, drift, clock, sleep
        self._stage, self._num_links = pipeline.stage, pipeline.layout.num_stages - 1
        self.num_bytes = [int(min(BURST_BYTES + MESSAGE_S * rate, MOST_BYTES)) for rate in rates]
        """Of a message on each link."""
        self._pause_s = min(MOST_PAUSE_S, max((BURST_BYTES / rate for rate in rates if rate > 0), default=0.0))
        self._rates = tuple(rates)
        self._first = self._fastest(FIRST_ROUNDS)
        self._before = self._first

    def probe(self) -> list[tuple[float, ...]]:
        """Bytes per second of each link, of the slower direction, the same on all ranks; () where nothing is known."""
        seconds = self._fastest(1)
        pairs = zip(seconds, self._before, strict=True)
        if any(not before / self._drift < now < before * self._drift for now, before in pairs):
            seconds = list(map(min, seconds, self._fastest(MORE_ROUNDS)))
        self._before = seconds
        links = zip(self._rates, self._first, seconds, strict=True)
        return [(rate * first / now,) if rate * first * now > 0 else () for rate, first, now in links]

    def _fastest(self, rounds: int) -> list[float]:
        """Seconds of a message and its answer on each link."""
        return [min(column) for column in zip(*(self._once() for _ in range(rounds)), strict=True)]

    def _once(self) -> list[float]:
        found = torch.zeros(self._num_links, dtype=torch.float64)
        for parity in range(min(2, self._num_links)):
            self._sleep(self._pause_s)
            for link in range(parity, self._num_links, 2):
                if self._stage in (link, link + 1):
                    found[link] = self._exchange(link)
        return self._pipeline.groups.greatest(found).tolist()

    def _exchange(self, link: int) -> float:
        """Seconds on this rank, until the other end has all."""
        peer = link + 1 if self._stage == link else link
        num_bytes = self.num_bytes[link]
        if self._pipeline.device.type == "cpu":
            return self._message(peer, num_bytes)
        # NCCL tells no messages apart by tags: one direction after the other.
        probe = Probe(self._pipeline.groups.pipeline, self._pipeline.device, self._clock)
        return max(probe.exchange(self._stage, *way, num_bytes) for way in ((link, link + 1), (link + 1, link)))

    def _message(self, peer: int, num_bytes: int) -> float:
        """Both ways at once: seconds until the other end has all of ours."""
        group = self._pipeline.groups.pipeline
        arriving, leaving = torch.empty(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
        mark = torch.zeros(1, dtype=torch.uint8)
        payload = dist.irecv(arriving, group=group, group_src=peer, tag=_PAYLOAD)
        answer = dist.irecv(torch.empty_like(mark), group=group, group_src=peer, tag=_DONE)
        ready = dist.isend(mark, group=group, group_dst=peer, tag=_READY)
        dist.recv(torch.empty_like(mark), group=group, group_src=peer, tag=_READY)
        begun_s = self._clock()
        sent = dist.isend(leaving, group=group, group_dst=peer, tag=_PAYLOAD)
        _wait(payload)
        done = dist.isend(mark, group=group, group_dst=peer, tag=_DONE)
        _wait(answer)
        took_s = self._clock() - begun_s
        for work in (ready, sent, done):
            _wait(work)
        return took_s


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
