"""Which programs are kept: as many as memory allows, the same on all ranks."""

import pytest

from ringweave import planning, schedules, topology
from ringweave.comm.running import keeping
from ringweave.comm.running.keeping import Promises
from ringweave.schedules.programs import Pipelining, compile_program

LARGE = 128 * 8
"""Parts of a message of 128 segments on eight ranks."""


def test_the_first_to_ask_for_a_kind_makes_it_and_the_others_get_what_it_made() -> None:
    promises: Promises[str] = Promises()
    promised, is_new = promises.look_up("kind", 4)
    assert is_new
    promised.set_result("made")
    again, is_new = promises.look_up("kind", 4)
    assert not is_new
    assert again.result() == "made"


def test_small_programs_are_kept_by_their_number() -> None:
    promises: Promises[None] = Promises()
    for kind in range(600):
        promises.look_up(kind, 8)
    assert len(promises) == 512
    assert not promises.look_up(599, 8)[1]
    assert promises.look_up(0, 8)[1]


def test_large_programs_are_kept_by_what_they_take_and_the_latest_used_stay() -> None:
    promises: Promises[None] = Promises()
    promises.look_up("every time", LARGE)
    for kind in range(600):
        promises.look_up(kind, LARGE)
        assert not promises.look_up("every time", LARGE)[1]
    assert len(promises) == keeping._MAX_PARTS // LARGE == 64
    assert not promises.look_up(599, LARGE)[1]


def test_the_buckets_of_a_model_are_kept_whatever_they_take() -> None:
    promises: Promises[None] = Promises()
    assert all(promises.look_up(bucket, 128 * 64)[1] for bucket in range(64))
    assert not any(promises.look_up(bucket, 128 * 64)[1] for bucket in range(64))


def test_room_comes_back_when_large_programs_have_gone() -> None:
    promises: Promises[None] = Promises()
    for kind in range(70):
        promises.look_up(("large", kind), 128 * 64)
    for kind in range(600):
        promises.look_up(("small", kind), 8)
    assert len(promises) == 512


@pytest.mark.parametrize("name", [name for name in schedules.NAMES if name not in (schedules.HOST, "ps")])
def test_a_program_has_at_most_eight_instructions_for_each_part(name: str) -> None:
    """All that can be chosen: the server of `ps`, which has more, is never the fastest."""
    cluster = topology.one_machine([1] * 8)
    schedule = planning.plan_group(cluster, [node.name for node in cluster.nodes]).generate(name)
    for group_rank in range(8):
        transfers = schedules.project(schedule, group_rank)
        program = compile_program(schedule, transfers, 100_000, Pipelining(num_segments=16, lag=1, window=8))
        assert 0 < len(program.instructions) <= 8 * 16 * 8
