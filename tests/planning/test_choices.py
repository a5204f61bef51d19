import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.cost import Demand
from ringweave.planning.choices import MAX_PIECE_BYTES, MAX_SEGMENTS, MAX_WINDOW, MIN_PIECE_BYTES, pipelined

MB = 10**6
RING_OF_8 = Demand(
    num_rounds=14,
    num_latencies=14,
    waves_s_per_byte=7e-8,
    busiest_s_per_byte=7e-8,
    busiest="n0->core",
    num_messages=28,
    num_receives=14,
    receives_in_a_round=1,
    largest_piece=1 / 8,
    message_s=30e-6,
    latency_s=50e-6,
)


def changed(**values: float) -> Demand:
    fields = {name: getattr(RING_OF_8, name) for name in Demand.__slots__}
    return Demand(**(fields | values))


@given(
    st.integers(0, 10**10),
    st.floats(0.001, 1.0),
    st.floats(1.0, 8.0),
    st.integers(1, 200),
    st.sampled_from([0.0, 30e-6, 1e-3]),
)
def test_pieces_stay_between_their_limits_where_64_segments_allow(
    num_bytes: int, largest: float, overlap: float, num_rounds: int, message_s: float
) -> None:
    asked = changed(largest_piece=largest, waves_s_per_byte=7e-8 * overlap, num_rounds=num_rounds, message_s=message_s)
    choice = pipelined("ring", asked, num_bytes)
    piece = largest * num_bytes / choice.num_segments
    assert 1 <= choice.num_segments <= MAX_SEGMENTS
    assert 2 <= choice.window <= MAX_WINDOW
    assert piece <= MAX_PIECE_BYTES or choice.num_segments == MAX_SEGMENTS
    assert piece >= MIN_PIECE_BYTES * 0.8 or choice.num_segments == 1
    expected_s = asked.predicted_s(num_bytes, num_segments=choice.num_segments, lag=choice.lag)
    assert math.isclose(choice.predicted_s, expected_s)


def test_a_ring_gains_nothing_by_overlapping() -> None:
    choice = pipelined("ring", RING_OF_8, 25 * MB)
    assert (choice.lag, choice.window) == (0, 2)


def test_overlapping_has_to_be_worth_two_percent() -> None:
    assert pipelined("ring", changed(waves_s_per_byte=7e-8 * 1.015), 25 * MB).lag == 0
    assert pipelined("ring", changed(waves_s_per_byte=7e-8 * 1.1), 25 * MB).lag == 4


def test_what_loads_one_direction_after_the_other_overlaps_with_four_segments_in_flight() -> None:
    choice = pipelined("direct", changed(waves_s_per_byte=14e-8, num_rounds=10), 25 * MB)
    assert (choice.lag, choice.window) == (3, 28)


def test_a_small_message_is_not_cut() -> None:
    assert pipelined("ring", changed(waves_s_per_byte=14e-8), MB).num_segments == 1


@pytest.mark.parametrize(("num_bytes", "num_segments"), [(0, 1), (MB, 1), (24 * MB, 3), (10**10, 64)])
def test_inside_a_node_pieces_are_about_a_megabyte(num_bytes: int, num_segments: int) -> None:
    assert pipelined("direct", changed(num_latencies=0), num_bytes).num_segments == num_segments
