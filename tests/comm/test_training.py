"""What trainers call beside allreduce, through our group: DDP, FSDP2, HSDP, checkpoints, functional collectives."""

from pathlib import Path

import pytest

from ringweave.testing.ranks import run_ranks
from tests.comm import rank_functions, training_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_ddp_equals_one_process_and_uses_the_ring() -> None:
    num_steps = 5
    environ = {"RINGWEAVE_SCHEDULE": "ring"}
    for counters in run_ranks(training_functions.check_ddp, 3, num_steps, 0.5, environ=environ):
        assert counters["ring"]["collectives"] > num_steps  # several buckets in most steps
        assert counters["ring"]["bytes"] > 8 * 2 * 256 * 256 * num_steps


def test_buckets_of_ddp_are_reduced_while_the_backward_pass_goes_on() -> None:
    environ = {"RINGWEAVE_SCHEDULE": "ring"}
    for finished in run_ranks(training_functions.finish_buckets_within_backward, 2, 3, 0.5, environ=environ):
        assert len(finished) == 3
        assert min(finished[1:]) >= 1  # DDP makes its final buckets after the first step


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_fsdp_equals_one_process(shape: tuple[int, ...]) -> None:
    run_ranks(training_functions.check_fsdp, 4, 3, shape)


def test_distributed_checkpoint(tmp_path: Path) -> None:
    run_ranks(training_functions.check_checkpoint, 2, str(tmp_path / "checkpoint"))


def test_the_host_library_does_all_other_collectives() -> None:
    run_ranks(rank_functions.check_other_collectives, 3)


def test_the_host_library_never_deadlocks_with_the_interpreter() -> None:
    run_ranks(rank_functions.gather_and_broadcast_objects, 4, 300)


def test_functional_collectives() -> None:
    run_ranks(rank_functions.check_functional, 3)


def test_a_destroyed_group_leaves_nothing_and_another_can_follow() -> None:
    assert run_ranks(rank_functions.destroy_and_look, 2) == [(True, 0), (True, 0)]


def test_groups_are_ringweaves_own_and_say_so() -> None:
    for world, name, sub_group in run_ranks(training_functions.names_of_groups, 2):
        assert world == sub_group == "RingweaveProcessGroup"
        assert name == "ringweave"
