import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.cost import ScheduleDemand
from ringweave.planning.plans import MAX_PIECE_BYTES, MAX_SEGMENTS, MAX_WINDOW, MIN_PIECE_BYTES, best_pipelining
from ringweave.schedules import CollectiveKind

MB = 10**6
RING_OF_8 = ScheduleDemand(
    num_rounds=14,
    num_latencies=14,
    waves_s_per_byte=7e-8,
    busiest_s_per_byte=7e-8,
    busiest="n0->core",
    num_messages=28,
    num_segment_messages=28,
    num_receives=14,
    streams_meet=False,
    largest_piece=1 / 8,
    message_s=30e-6,
    processor_message_s=62e-6,
    local_piece_bytes=1e6,
    latency_s=50e-6,
)


def changed(**values: float) -> ScheduleDemand:
    fields = {name: getattr(RING_OF_8, name) for name in ScheduleDemand.__slots__}
    return ScheduleDemand(**(fields | values))


@given(
    st.integers(0, 10**10),
    st.floats(0.001, 1.0),
    st.floats(1.0, 8.0),
    st.integers(1, 200),
    st.sampled_from([0.0, 30e-6, 1e-3]),
)
def test_pieces_stay_between_their_limits_where_the_segments_allow(
    num_bytes: int, largest: float, overlap: float, num_rounds: int, message_s: float
) -> None:
    asked = changed(largest_piece=largest, waves_s_per_byte=7e-8 * overlap, num_rounds=num_rounds, message_s=message_s)
    choice = best_pipelining("ring", asked, num_bytes)
    piece = largest * num_bytes / choice.num_segments
    assert 1 <= choice.num_segments <= MAX_SEGMENTS
    assert 2 <= choice.window <= MAX_WINDOW
    assert piece <= MAX_PIECE_BYTES or choice.num_segments == MAX_SEGMENTS
    assert piece >= MIN_PIECE_BYTES * 0.8 or choice.num_segments == 1
    expected_s = asked.predicted_s(num_bytes, num_segments=choice.num_segments, lag=choice.lag)
    assert math.isclose(choice.predicted_s, expected_s)


@pytest.mark.parametrize(("num_rounds", "lag"), [(1, 1), (8, 1), (9, 2), (14, 2), (200, 25)])
def test_about_eight_segments_overlap(num_rounds: int, lag: int) -> None:
    asked = changed(num_rounds=num_rounds, num_receives=num_rounds)
    assert best_pipelining("direct", asked, 25 * MB).lag == lag


def test_all_segments_follow_each_other_along_a_chain() -> None:
    asked = changed(num_rounds=31, num_receives=1)
    assert best_pipelining("ring", asked, 25 * MB).lag == 1


def test_the_window_holds_what_two_segments_receive() -> None:
    assert best_pipelining("direct", RING_OF_8, 25 * MB).window == 28
    assert best_pipelining("direct", changed(num_receives=100), 25 * MB).window == MAX_WINDOW


def test_messages_that_cost_much_are_not_cut_finely() -> None:
    waves = {"waves_s_per_byte": 14e-8}
    fine = best_pipelining("direct", changed(**waves), 25 * MB).num_segments
    assert best_pipelining("direct", changed(message_s=3e-3, **waves), 25 * MB).num_segments < fine


def test_streams_that_meet_are_cut_as_finely_as_costs_nothing() -> None:
    meeting = changed(streams_meet=True)
    coarse, fine = best_pipelining("direct", RING_OF_8, 25 * MB), best_pipelining("direct", meeting, 25 * MB)
    assert fine.num_segments == MAX_SEGMENTS > coarse.num_segments
    assert coarse.predicted_s <= fine.predicted_s <= 1.02 * coarse.predicted_s
    dear = changed(streams_meet=True, message_s=3e-3)
    assert best_pipelining("direct", dear, 25 * MB).num_segments < MAX_SEGMENTS


@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "broadcast"])
def test_pieces_of_blocks_are_larger_where_they_cost_processor_time(kind: CollectiveKind) -> None:
    meeting = changed(streams_meet=True, waves_s_per_byte=12e-8)
    fine = best_pipelining("direct", meeting, 25 * MB)
    coarse = best_pipelining("direct", meeting, 25 * MB, kind)
    assert MAX_SEGMENTS == fine.num_segments > 1.5 * coarse.num_segments
    saved_s = meeting.processor_s(fine.num_segments) - meeting.processor_s(coarse.num_segments)
    assert 0 < coarse.predicted_s - fine.predicted_s < saved_s
    free = changed(streams_meet=True, waves_s_per_byte=12e-8, processor_message_s=0.0)
    assert best_pipelining("direct", free, 25 * MB, kind).predicted_s <= fine.predicted_s


def test_rings_of_blocks_are_cut_although_the_prediction_gains_nothing() -> None:
    ring = best_pipelining("ring", RING_OF_8, 25 * MB, "allgather")
    assert ring.num_segments > 16
    assert RING_OF_8.processor_s(ring.num_segments) < 0.03 * ring.predicted_s


def test_a_tiny_message_is_not_cut() -> None:
    assert best_pipelining("ring", RING_OF_8, MB // 8).num_segments == 1


@pytest.mark.parametrize(("num_bytes", "num_segments"), [(0, 1), (MB, 1), (24 * MB, 3), (10**10, 128)])
def test_inside_a_node_pieces_have_the_size_that_is_assumed(num_bytes: int, num_segments: int) -> None:
    assert best_pipelining("direct", changed(num_latencies=0), num_bytes).num_segments == num_segments
    larger = changed(num_latencies=0, local_piece_bytes=4e6)
    assert best_pipelining("direct", larger, 96 * MB).num_segments == 3
