"""Whatever rings have under way when a job is killed: what goes on from a snapshot trains on every sample once."""

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.param_server.data_shards import (
    DataPosition,
    DataShard,
    ShardDispatcher,
    Span,
    Spans,
    merge_spans,
    remaining_spans,
    spans_in_epoch,
)

PLACES = st.sets(st.integers(0, 40))


def places_of(spans: Spans) -> list[int]:
    return [place for first, count in spans for place in range(first, first + count)]


@given(places=PLACES, chosen=st.randoms())
def test_spans_are_united_in_any_order_and_are_as_few_as_there_can_be(places, chosen):
    single = [(place, 1) for place in places for _ in range(chosen.randint(1, 2))]
    chosen.shuffle(single)
    found = merge_spans([*single, (3, 0)])
    assert places_of(found) == sorted(places)
    assert all(first + count < then for (first, count), (then, _) in itertools.pairwise(found))


@given(done=PLACES, total=st.integers(0, 40), first=st.integers(0, 40), count=st.integers(0, 40))
def test_what_is_left_of_an_epoch_has_its_places_in_the_order_of_the_whole(done, total, first, count):
    spans = merge_spans((place, 1) for place in done)
    rest = [place for place in range(total) if place not in done]
    assert places_of(remaining_spans(spans, total)) == rest
    count = min(count, max(0, len(rest) - first))
    if count:
        assert places_of(spans_in_epoch(spans, first, count)) == rest[first : first + count]


def test_a_pass_that_is_over_has_no_more_samples_and_the_next_one_begins_with_none():
    position = DataPosition().after_push(1, 7, [(4, 4)]).after_push(1, 7, [(0, 4)])
    assert (position.epoch, position.done, position.num_done) == (7, ((0, 8),), 8)
    over = position.after_pass(1, 7)
    assert over == DataPosition(pass_number=2, epoch=8)
    assert over.after_push(1, 7, [(8, 4)]) == over, "a ring that comes late"
    assert over.after_pass(1, 7) == over
    assert over.after_push(2, 3, [(0, 2)]) == DataPosition(pass_number=2, epoch=3, done=((0, 2),)), (
        "the script names epochs"
    )
    assert position.after_push(2, 7, [(0, 2)]).done == ((0, 2),), "the same epoch begun anew"


@dataclass
class World:
    """Rings that draw from one epoch, and a server that counts what they push."""

    total: int
    num_rings: int
    position: DataPosition = field(default_factory=DataPosition)
    counted: Counter[int] = field(default_factory=Counter)
    """Sample -> how often it is in the parameters."""
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.office = ShardDispatcher(self.num_rings, clock=lambda: 0.0)
        self.start = self.position.done
        self.rest = places_of(remaining_spans(self.start, self.total))
        self.numbers = [0] * self.num_rings
        self.under_way: list[list[DataShard]] = [[] for _ in range(self.num_rings)]

    def take(self, ring: int, wanted: int) -> bool:
        self.numbers[ring] += 1
        ticket = self.office.next_shard(ring, self.numbers[ring], 0, wanted, len(self.rest))
        if ticket.num_samples:
            self.under_way[ring].append(ticket)
        return ticket.num_samples > 0

    def push(self, ring: int, num_tickets: int, dead: float) -> None:
        """Of some tickets: the part of a member of the ring that died before they were reduced is in no push."""
        taken, self.under_way[ring] = self.under_way[ring][:num_tickets], self.under_way[ring][num_tickets:]
        spans: list[Span] = []
        for ticket in taken:
            gone = round(dead * ticket.num_samples)
            self.lost.update(self.rest[ticket.first :][:gone])
            self.counted.update(self.rest[ticket.first + gone : ticket.first + ticket.num_samples])
            spans.extend(spans_in_epoch(self.start, ticket.first + gone, ticket.num_samples - gone))
        if taken:
            self.position = self.position.after_push(0, 0, spans)

    def die(self, ring: int) -> None:
        for ticket in self.under_way[ring]:
            self.lost.update(self.rest[ticket.first : ticket.first + ticket.num_samples])
        self.under_way[ring].clear()

    def resumed(self, num_rings: int) -> "World":
        """Another job that goes on from a snapshot of this one; nothing else of it is left."""
        return World(self.total, num_rings, replace(self.position), Counter(self.counted))


EVENTS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 3), st.integers(1, 9)),
    st.tuples(st.just("push"), st.integers(0, 3), st.integers(1, 3), st.sampled_from([0.0, 0.0, 0.3, 1.0])),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("kill all"), st.integers(1, 4)),
)


@settings(max_examples=400)
@given(total=st.integers(1, 60), num_rings=st.integers(1, 4), events=st.lists(EVENTS, max_size=60))
def test_whatever_happens_and_whoever_dies_each_sample_of_the_epoch_counts_once(total, num_rings, events):
    world = saved = World(total, num_rings)
    saved = world.resumed(num_rings)
    for name, *more in events:
        ring = more[0] % world.num_rings if more else 0
        if name == "take":
            world.take(ring, more[1])
        elif name == "push":
            world.push(ring, more[1], more[2])
        elif name == "die":
            world.die(ring)
        elif name == "snapshot":
            saved = world.resumed(world.num_rings)
        else:
            world = saved.resumed(more[0])
        assert places_of(world.position.done) == sorted(world.counted), "the position is that of the parameters"
    world = saved.resumed(num_rings)
    for ring in range(num_rings):
        while world.take(ring, 4):
            pass
    for ring in range(num_rings):
        world.push(ring, total, 0.0)
    assert world.counted == Counter(range(total)), "all, those too that were lost before the job was killed"
    assert world.position.done == ((0, total),)


@pytest.mark.parametrize("ends", [True, False])
def test_lost_samples_are_drawn_again_only_while_their_epoch_is_not_over(ends):
    world = World(8, 1)
    world.take(0, 4)
    world.push(0, 1, 0.5)
    world.take(0, 4)
    world.push(0, 1, 0.0)
    assert (world.position.done, sorted(world.lost)) == (((2, 6),), [0, 1])
    position = world.position.after_pass(0, 0) if ends else world.position
    assert remaining_spans(position.done, 8) == (((0, 8),) if ends else ((0, 2),))
