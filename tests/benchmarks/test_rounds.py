from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import CommunicationError, PeerError
from ringweave_bench import rounds


@given(st.integers(1, 9), st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
def test_every_system_has_every_round_and_the_order_alternates(num_rounds: int, systems: list[str]) -> None:
    found = list(rounds.alternate_systems(num_rounds, systems))
    assert Counter(found) == {(index, name): 1 for index in range(num_rounds) for name in systems}
    assert [index for index, _ in found] == sorted(index for index, _ in found)
    for index in range(num_rounds):
        assert [name for i, name in found if i == index] == (systems if index % 2 == 0 else systems[::-1])


@pytest.mark.parametrize(("num_bytes", "calls"), [(4, 20), (100_000, 20), (200_000, 10), (1_000_000, 2), (10**8, 1)])
def test_small_messages_go_several_times_a_round(num_bytes: int, calls: int) -> None:
    assert rounds.calls_per_round(num_bytes) == calls


def test_patience_grows_with_the_bound_and_the_size() -> None:
    assert rounds.round_timeout_s(25_000_000, 1.0) == 60 + 40 + 5
    assert rounds.round_timeout_s(4, 0.0) < 61


def test_a_round_of_a_real_process(start_session, place) -> None:
    session = start_session("sums")
    assert session.version == "fake 1.0"
    rounds.prepare_buffers(session, "allreduce", 4000)
    for index in range(2):
        found = rounds.play_round(session, place, index, 300.0)
        assert 0 < found.seconds < 300
        assert 0 < found.processor_s < 300
        assert (found.bytes_on_links, found.schedules) == ({}, {"ring": 1})


def test_a_wrong_sum_ends_the_benchmark(start_session, place) -> None:
    session = start_session("wrong")
    rounds.prepare_buffers(session, "allreduce", 4000)
    with pytest.raises(
        CommunicationError, match=r"result of fake \(only one\) in element 3: 4\.0, expected 3; 1 elements"
    ) as e:
        rounds.play_round(session, place, 0, 300.0)
    assert "Do not trust this system here: its times are not reported. [rank 0, round 0]" in str(e.value)
    assert not isinstance(e.value, PeerError)


@pytest.mark.parametrize(
    ("manner", "limit_s", "said"),
    [("dies", 300.0, "rank 0 ended"), ("hangs", 0.3, "rank 0 did not answer within 0.3 s")],
)
def test_a_rank_that_fails_in_a_round(start_session, place, manner: str, limit_s: float, said: str) -> None:
    session = start_session(manner)
    rounds.prepare_buffers(session, "allreduce", 4000)
    with pytest.raises(
        PeerError, match=rf"fake \(only one\) failed in 'run': {said}, expected all ranks to answer"
    ) as e:
        rounds.play_round(session, place, 0, limit_s)
    if manner == "dies":
        assert "Its last words:\n    I cannot go on\n" in str(e.value)
