"""The backend's allreduce against torch in one process, in real processes."""

import functools
from pathlib import Path

import pytest

from ringweave import planning, schedules, topology
from ringweave.comm.plan_choice import MIN_SCHEDULED_BYTES
from ringweave.testing.ranks import run_ranks
from tests.comm import counting_functions, rank_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(("num_ranks", "num_elements"), [(3, 40_009), (4, 10)])
def test_every_operation_and_dtype_is_exact(num_ranks: int, num_elements: int) -> None:
    checked = run_ranks(rank_functions.check_every_op_and_dtype, num_ranks, num_elements)
    assert len(checked[0]) > 70
    assert len({tuple(pairs) for pairs in checked}) == 1


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_results_have_the_same_bits_on_all_ranks_and_from_run_to_run(num_ranks: int) -> None:
    run_ranks(rank_functions.check_bits_equal_and_repeatable, num_ranks, 1_000_003)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_any_shape_and_stride(num_ranks: int) -> None:
    run_ranks(rank_functions.check_shapes, num_ranks)


def test_many_buckets_in_flight() -> None:
    run_ranks(rank_functions.check_many_in_flight, 3)


def test_a_callback_may_wait_for_another_collective() -> None:
    run_ranks(rank_functions.check_collectives_in_callbacks, 2)


def test_overlapping_groups() -> None:
    run_ranks(rank_functions.check_groups, 4)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ring_really_sends_its_messages_peer_to_peer(num_ranks: int) -> None:
    num_elements = 3_000_000
    nodes = ["node0"] * num_ranks
    plan = planning.plan_group(topology.one_machine([num_ranks]), nodes)
    segments = plan.choose(4 * num_elements, "ring").num_segments
    environ = {"RINGWEAVE_SCHEDULE": "ring"}
    for sent, counters in run_ranks(
        counting_functions.count_messages, num_ranks, num_elements, "ring", environ=environ
    ):
        assert sent == 2 * (num_ranks - 1) * segments
        assert counters["sent_in_this_one"]["messages"] == sent
        assert counters["ring"] == {"collectives": 2, "bytes": 2 * 4 * num_elements, "messages": 2 * sent}
        assert "native" not in counters


def test_each_nic_has_a_leader_on_demand(tmp_path: Path) -> None:
    path, nodes = tmp_path / "cluster.yaml", ["a", "a", "b", "b"]
    nics = "nics: [{name: n0, rate: 1Gbit/s}, {name: n1, rate: 1Gbit/s}]"
    path.write_text("name: c\nnodes:\n" + "".join(f"  - {{name: {n}, devices: 2, {nics}}}\n" for n in "ab"))
    environ = {"RINGWEAVE_CLUSTER": str(path), "RINGWEAVE_SCHEDULE": "leader-matrix"}
    run = functools.partial(run_ranks, counting_functions.count_between_nodes, 4, 100_000, nodes, nodes=nodes)
    one = run(environ=environ)
    assert [count > 0 for count in one] == [True, False, True, False]
    each = run(environ=environ | {"RINGWEAVE_LEADER_PER_NIC": "1"})
    assert all(count > 0 for count in each)


def test_small_messages_go_to_the_host_library() -> None:
    num_elements = MIN_SCHEDULED_BYTES // 4 - 1
    for sent, counters in run_ranks(counting_functions.count_messages, 2, num_elements, "ring"):
        assert sent == 0
        assert counters["native"]["collectives"] == 2
        assert "ring" not in counters


def test_forced_host_sends_nothing_itself() -> None:
    environ = {"RINGWEAVE_SCHEDULE": "native"}
    for sent, counters in run_ranks(counting_functions.count_messages, 2, 1_000_000, "ring", environ=environ):
        assert sent == 0
        assert counters["native"]["collectives"] == 2


def test_an_operation_that_a_dtype_lacks_is_refused_and_the_group_goes_on() -> None:
    for text in run_ranks(rank_functions.refuse_and_go_on, 2):
        assert "reduce operation band: 'torch.float32', expected a dtype for which torch computes it" in text
        assert "Convert the tensor" in text


SCHEDULES = [name for name in schedules.SCHEDULE_NAMES if name != schedules.NATIVE]


@pytest.mark.parametrize("nodes", [None, ["a", "a", "b", "b", "b"], list("abcde")], ids=["one node", "3 + 2", "five"])
def test_every_schedule_on_every_placement(nodes: list[str] | None) -> None:
    for collectives in run_ranks(rank_functions.check_schedules, 5, SCHEDULES, 100_003, nodes=nodes):
        assert collectives == {name: [name] for name in SCHEDULES}
