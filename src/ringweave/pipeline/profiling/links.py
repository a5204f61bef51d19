"""How long messages take between neighbouring stages, each link measured alone and with the receiver waiting.

A sender's own time says little: it may include waiting for a receiver that still computes, or end when the message is
in a buffer. Here the receiver has posted before the clock starts, and its answer stops it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringweave.pipeline.layouts import Layout
from ringweave.pipeline.running.groups import Groups

_ANSWER_BYTES = 8
_LEAST_BYTES = 65536
"""Smaller messages say nothing about a rate: they take as long as empty ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction between two neighbouring stages, measured."""

    latency_s: float
    """Of a message without content."""
    s_per_byte: float
    """What each byte adds."""

    def transfer_s(self, num_bytes: int) -> float:
        """Predicted time of a message."""
        return self.latency_s + num_bytes * self.s_per_byte


def measure_links(
    layout: Layout,
    groups: Groups,
    device: torch.device,
    num_bytes: int,
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """(links forward, links backward), from each stage but the last to the next one and back; the same on every rank.

    All ranks call it at the same time. Links are measured one after the other, so that none disturbs another. Of
    replicas the slowest counts.

    Args:
        layout: Whose stages.
        groups: Of the same layout.
        device: Of this rank.
        num_bytes: Of the large message, at least 64 KiB; take what crosses in training.
        rounds: Of each message; their median counts.
        clock: In seconds.
    """
    num_bytes = max(num_bytes, _LEAST_BYTES)
    stage = layout.stage_of(groups.rank)
    table = torch.zeros(2, layout.num_stages - 1, 2, dtype=torch.float64)
    probe = Probe(groups.pipeline, device, clock)
    for link in range(layout.num_stages - 1):
        for direction, (src, dst) in enumerate(((link, link + 1), (link + 1, link))):
            for place, size in enumerate((0, num_bytes)):
                took_s = [probe.exchange(stage, src, dst, size) for _ in range(rounds + 1)][1:]
                if stage == src:
                    table[direction, link, place] = statistics.median(took_s)
    forward, backward = groups.greatest(table).tolist()
    return tuple(_link(pair, num_bytes) for pair in forward), tuple(_link(pair, num_bytes) for pair in backward)


def _link(pair: list[float], num_bytes: int) -> Link:
    """Of an empty and a full message, each with its answer."""
    empty_s, full_s = pair
    return Link(latency_s=empty_s / 2, s_per_byte=max(0.0, full_s - empty_s) / num_bytes)


class Probe:
    """One message and its answer."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float]) -> None:
        self._group, self._device, self._clock = group, device, clock
        self._answer = torch.zeros(_ANSWER_BYTES, dtype=torch.uint8, device=device)

    def exchange(self, stage: int, src: int, dst: int, num_bytes: int) -> float:
        """Seconds on the sender, from its start to the receiver's answer; 0 elsewhere."""
        if stage == dst:
            message = torch.empty(num_bytes + _ANSWER_BYTES, dtype=torch.uint8, device=self._device)
            arriving = dist.irecv(message, group=self._group, group_src=src)
            dist.send(self._answer, group=self._group, group_dst=src)
            assert arriving is not None
            arriving.wait()
            dist.send(self._answer, group=self._group, group_dst=src)
        if stage != src:
            return 0.0
        message = torch.zeros(num_bytes + _ANSWER_BYTES, dtype=torch.uint8, device=self._device)
        dist.recv(self._answer, group=self._group, group_src=dst)
        begun_s = self._clock()
        dist.send(message, group=self._group, group_dst=dst)
        dist.recv(self._answer, group=self._group, group_src=dst)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock() - begun_s
