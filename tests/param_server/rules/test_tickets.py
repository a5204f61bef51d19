import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import TrainingError
from ringweave.param_server.data_shards import ShardDispatcher


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.booleans()), max_size=80), st.integers(1, 500))
def test_every_sample_is_on_exactly_one_ticket(calls, epoch_samples):
    office, numbers, given_out = ShardDispatcher(4), [0] * 4, []
    for ring, wanted, repeats in [*calls, *[(ring, epoch_samples, False) for ring in range(4)]]:
        numbers[ring] += 1
        ticket = office.next_shard(ring, numbers[ring], 0, wanted, epoch_samples)
        given_out += range(ticket.first, ticket.first + ticket.num_samples)
        if repeats:
            assert office.next_shard(ring, numbers[ring], 0, wanted, epoch_samples) == ticket
    assert given_out == list(range(epoch_samples))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.001, 5.0), st.booleans()), max_size=80),
    st.integers(1, 500),
)
def test_rings_at_any_pace_take_all_and_never_more_or_less_than_suits_them(asked, turns, epoch_samples):
    """A ring computes what it has asked for, and has no room for more; nor can it share less than it says."""
    wanted, least = zip(*asked, strict=True)
    now_s, rings = 0.0, len(wanted)
    office, numbers, given_out, going = ShardDispatcher(rings, clock=lambda: now_s), [0] * rings, [], set(range(rings))
    rest = [(ring, 0.5, True) for ring in range(rings)] * epoch_samples
    for ring, seconds, pushes in [*turns, *rest]:
        now_s += seconds
        if ring not in going:
            continue
        numbers[ring] += 1
        left = epoch_samples - len(given_out)
        ticket = office.next_shard(ring, numbers[ring], 0, wanted[ring], epoch_samples, least[ring])
        given_out += range(ticket.first, ticket.first + ticket.num_samples)
        assert ticket.num_samples <= wanted[ring]
        if rings > 1 and ticket.num_samples:
            assert ticket.num_samples >= min(least[ring], wanted[ring], left)
        if ticket.num_samples == 0:
            going.remove(ring)
            office.note_idle(ring)
        elif pushes:
            office.note_push(ring, ticket.num_samples)
    assert given_out == list(range(epoch_samples))


def test_rings_may_be_in_different_epochs():
    office = ShardDispatcher(2)
    assert office.next_shard(0, 1, 0, 10, 10).num_samples == 10
    assert office.next_shard(0, 2, 1, 6, 10).first == 0
    assert office.next_shard(1, 1, 0, 5, 10).num_samples == 0
    assert office.next_shard(1, 2, 1, 6, 10).first == 6


def test_tickets_out_of_order_are_refused():
    with pytest.raises(
        TrainingError, match=r"data shard of ring 0: \(2, 0, 5\), expected number 1, at least one sample"
    ):
        ShardDispatcher(1).next_shard(0, 2, 0, 5, 10)


def test_one_ring_has_whole_tickets_and_a_last_one():
    office = ShardDispatcher(1)
    assert [office.next_shard(0, number, 0, 8, 20).num_samples for number in (1, 2, 3, 4)] == [8, 8, 4, 0]


def test_a_rest_that_is_too_small_for_a_ticket_is_made_larger_where_it_does_not_fit_into_the_last():
    """Two rings that want 22 and 2 of 26: the second has no room for the four that the first leaves."""
    office = ShardDispatcher(2)
    tickets = [
        office.next_shard(ring, number, 0, want, 26, 2) for ring, number, want in ((0, 1, 22), (1, 1, 2), (1, 2, 2))
    ]
    assert [ticket.num_samples for ticket in tickets] == [20, 2, 2]


def test_ranks_of_rings_that_end_an_epoch_have_two_samples_each():
    """Two rings of four ranks with four samples each, and five whole tickets for them."""
    office, numbers, found = ShardDispatcher(2), [0, 0], []
    for turn in range(10):
        ring = turn % 2
        numbers[ring] += 1
        found.append(office.next_shard(ring, numbers[ring], 0, 16, 80, 8).num_samples)
    assert found == [16, 16, 16, 16, 8, 8, 0, 0, 0, 0]


def test_the_last_tickets_are_parts_of_what_is_left():
    """Two rings by turns: none begins with a whole ticket when there is not one for each any more."""
    office, numbers, found = ShardDispatcher(2), [0, 0], []
    for turn in range(12):
        ring = turn % 2
        numbers[ring] += 1
        found.append(office.next_shard(ring, numbers[ring], 0, 64, 320).num_samples)
    assert found == [64, 64, 64, 64, 32, 16, 16, 0, 0, 0, 0, 0]


def test_who_wants_all_that_is_left_gets_it():
    """So does a ring that breaks off the epoch for all."""
    office = ShardDispatcher(2)
    office.next_shard(0, 1, 0, 64, 320)
    office.next_shard(1, 1, 0, 64, 320)
    assert office.next_shard(0, 2, 0, 320, 320).num_samples == 192
