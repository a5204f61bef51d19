from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ringweave.schedules import ReceiveOp, Transfer, project_all_ranks, project_rank
from ringweave.schedules.generators.ring import ring
from tests.schedules import generated


def test_a_rank_of_a_ring() -> None:
    assert project_rank(ring(2), 1) == (
        Transfer(0, 0, True, 1, 1, ReceiveOp.REDUCE),
        Transfer(0, 0, False, 0, 1, ReceiveOp.REDUCE),
        Transfer(1, 0, True, 0, 1, ReceiveOp.COPY),
        Transfer(1, 0, False, 1, 1, ReceiveOp.COPY),
    )
    assert project_rank(ring(1), 0) == ()


@given(st.sampled_from(sorted(generated.EVERYTHING)), st.integers(2, 6), generated.RANDOM)
def test_every_operation_is_a_send_here_and_a_receive_there_in_the_same_order(
    name: str, num_ranks: int, random: Random
) -> None:
    schedule = generated.EVERYTHING[name](num_ranks, random)
    parts = [project_rank(schedule, rank) for rank in range(num_ranks)]
    assert project_all_ranks(schedule) == parts
    for part in parts:
        assert [t.round_index for t in part] == sorted(t.round_index for t in part)
        by_turn = [(t.round_index, not t.sends) for t in part]
        assert by_turn == sorted(by_turn)
    num_ops = sum(len(round_) for round_ in schedule.rounds)
    assert sum(t.sends for part in parts for t in part) == num_ops
    for src in range(num_ranks):
        for dst in range(num_ranks):
            sent = [
                (t.round_index, t.first_chunk, t.num_chunks, t.how) for t in parts[src] if t.sends and t.peer == dst
            ]
            received = [
                (t.round_index, t.first_chunk, t.num_chunks, t.how) for t in parts[dst] if not t.sends and t.peer == src
            ]
            assert sent == received
