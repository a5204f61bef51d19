"""Rings of known speeds, simulated one event at a time: when each of them comes to rest at the end of an epoch."""

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.param_server.data_shards import ShardDispatcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How one ring trains."""

    samples_per_s: float
    wants: int
    drain_s: float = 0.0
    """From its last push until it rests."""


class Rings:
    """Takes, pushes and rests as rings do, on a clock of its own."""

    def __init__(self, kinds: list[Kind]) -> None:
        self.now_s = 0.0
        self.kinds, self.numbers = kinds, [0] * len(kinds)
        self.office = ShardDispatcher(len(kinds), clock=lambda: self.now_s)
        self.given: list[tuple[int, int]] = []

    def epoch(self, epoch: int, num_samples: int) -> list[float]:
        """When each ring comes to rest, from the begin of the epoch on."""
        began_s, rested_s = self.now_s, [0.0] * len(self.kinds)
        self.given = []
        events = [(began_s, 0, ring, 0) for ring in range(len(self.kinds))]
        while events:
            self.now_s, is_rest, ring, samples = heapq.heappop(events)
            if is_rest:
                self.office.note_idle(ring)
                rested_s[ring] = self.now_s - began_s
                continue
            if samples:
                self.office.note_push(ring, samples)
            self.numbers[ring] += 1
            kind = self.kinds[ring]
            ticket = self.office.next_shard(ring, self.numbers[ring], epoch, kind.wants, num_samples)
            self.given.append((ticket.first, ticket.num_samples))
            if ticket.num_samples:
                next_s = self.now_s + ticket.num_samples / kind.samples_per_s
                heapq.heappush(events, (next_s, 0, ring, ticket.num_samples))
            else:
                heapq.heappush(events, (self.now_s + kind.drain_s, 1, ring, 0))
        return rested_s


def is_exact(rings: Rings, num_samples: int) -> bool:
    given = sorted(first for first, count in rings.given if count)
    return sum(count for _, count in rings.given) == num_samples and len(set(given)) == len(given)


def test_rings_that_slowed_down_end_with_the_others() -> None:
    """One ring has become four times slower than its tickets say: 64 samples take it 4 s, the other one 1 s."""
    rings = Rings([Kind(samples_per_s=64, wants=64), Kind(samples_per_s=16, wants=64)])
    rings.epoch(0, 1024)
    ends_s = rings.epoch(1, 1024)
    assert is_exact(rings, 1024)
    assert max(ends_s) == pytest.approx(1024 / 80, rel=0.05)  # the same work in no time at all at the end


def test_a_ring_that_lingers_gets_no_more_when_it_would_be_late() -> None:
    """Its last push takes 3 s over its link, so it stops as much earlier."""
    slow = Kind(samples_per_s=50, wants=25, drain_s=3.0)
    rings = Rings([Kind(samples_per_s=400, wants=200), slow])
    first_s, second_s = (rings.epoch(epoch, 4000) for epoch in range(2))
    assert is_exact(rings, 4000)
    assert first_s[1] - first_s[0] > 2.5  # nothing was known yet
    assert max(second_s) <= (4000 + 3.0 * 50) / 450 + 0.5
    assert second_s[1] > 5.0  # it took part


def test_who_gets_nothing_in_an_epoch_is_tried_again() -> None:
    rings = Rings([Kind(samples_per_s=400, wants=200), Kind(samples_per_s=50, wants=25, drain_s=60.0)])
    took_part = []
    for epoch in range(8):
        rings.epoch(epoch, 2000)
        assert is_exact(rings, 2000)
        took_part.append(any(count == 25 for _, count in rings.given))
    assert took_part[0]
    assert any(took_part[1:])
    assert not all(took_part)


def test_what_a_dead_ring_would_have_taken_is_for_the_others() -> None:
    """A fast ring dies in the midst of an epoch that it would have ended."""
    rings = Rings([Kind(samples_per_s=90, wants=90), Kind(samples_per_s=10, wants=10)])
    rings.epoch(0, 1000)
    office, now_s, taken = rings.office, rings.now_s, 0
    rings.numbers[0] += 1
    taken += office.next_shard(0, rings.numbers[0], 1, 90, 300).num_samples
    office.note_away(0)
    while True:
        rings.numbers[1] += 1
        samples = office.next_shard(1, rings.numbers[1], 1, 10, 300).num_samples
        if not samples:
            break
        taken += samples
        rings.now_s += samples / 10
        office.note_push(1, samples)
    assert (taken, rings.now_s > now_s + 20) == (300, True)


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.integers(1, 500), st.floats(0, 20)), min_size=1, max_size=5),
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
)
def test_whatever_the_pace_every_sample_is_given_out_once(
    kinds: list[tuple[float, int, float]], epochs: list[int]
) -> None:
    rings = Rings([Kind(samples_per_s=speed, wants=wants, drain_s=linger_s) for speed, wants, linger_s in kinds])
    for epoch, num_samples in enumerate(epochs):
        rings.epoch(epoch, num_samples)
        assert is_exact(rings, num_samples)
