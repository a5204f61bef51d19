"""Which programs are kept: as many as memory allows, the same on all ranks."""

import pytest

from ringweave import planning, schedules, topology
from ringweave.comm.engine import executor
from ringweave.comm.engine.executor import ProgramCache
from ringweave.schedules.program import Pipelining, compile_program

LARGE = 128 * 8
"""Parts of a message of 128 segments on eight ranks."""


def test_the_first_to_ask_for_a_kind_makes_it_and_the_others_get_what_it_made() -> None:
    promises: ProgramCache[str] = ProgramCache()
    promised, is_new = promises.get_or_reserve("kind", 4)
    assert is_new
    promised.set_result("made")
    again, is_new = promises.get_or_reserve("kind", 4)
    assert not is_new
    assert again.result() == "made"


def test_small_programs_are_kept_by_their_number() -> None:
    promises: ProgramCache[None] = ProgramCache()
    for kind in range(600):
        promises.get_or_reserve(kind, 8)
    assert len(promises) == 512
    assert not promises.get_or_reserve(599, 8)[1]
    assert promises.get_or_reserve(0, 8)[1]


def test_large_programs_are_kept_by_what_they_take_and_the_latest_used_stay() -> None:
    promises: ProgramCache[None] = ProgramCache()
    promises.get_or_reserve("every time", LARGE)
    for kind in range(600):
        promises.get_or_reserve(kind, LARGE)
        assert not promises.get_or_reserve("every time", LARGE)[1]
    assert len(promises) == executor._MAX_PARTS // LARGE == 64
    assert not promises.get_or_reserve(599, LARGE)[1]


def test_the_buckets_of_a_model_are_kept_whatever_they_take() -> None:
    promises: ProgramCache[None] = ProgramCache()
    assert all(promises.get_or_reserve(bucket, 128 * 64)[1] for bucket in range(64))
    assert not any(promises.get_or_reserve(bucket, 128 * 64)[1] for bucket in range(64))


def test_room_comes_back_when_large_programs_have_gone() -> None:
    promises: ProgramCache[None] = ProgramCache()
    for kind in range(70):
        promises.get_or_reserve(("large", kind), 128 * 64)
    for kind in range(600):
        promises.get_or_reserve(("small", kind), 8)
    assert len(promises) == 512


@pytest.mark.parametrize("name", [name for name in schedules.SCHEDULE_NAMES if name not in (schedules.NATIVE, "ps")])
def test_a_program_has_at_most_eight_instructions_for_each_part(name: str) -> None:
    """All that can be chosen: the server of `ps`, which has more, is never the fastest."""
    cluster = topology.one_machine([1] * 8)
    schedule = planning.plan_group(cluster, [node.name for node in cluster.nodes]).generate(name)
    for group_rank in range(8):
        transfers = schedules.project_rank(schedule, group_rank)
        program = compile_program(schedule, transfers, 100_000, Pipelining(num_segments=16, lag=1, window=8))
        assert 0 < len(program.instructions) <= 8 * 16 * 8
