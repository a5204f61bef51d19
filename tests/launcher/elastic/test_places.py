import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import topology
from ringweave.environment import WorkerEnvironment
from ringweave.launcher.workers import HostPort, WorkerGroup, build_worker_group, spread_slots, with_later_workers


def group_of(counts: list[int]) -> WorkerGroup:
    meeting = HostPort(host="127.0.0.1", port=1)
    nodes = topology.one_machine(counts).nodes
    return build_worker_group(nodes, ("python",), meeting, num_cpus=8, common_environment=WorkerEnvironment())


@pytest.mark.parametrize(
    ("counts", "total", "most", "places"),
    [([2], 4, 9, [4]), ([3, 1], 6, 9, [3, 3]), ([3, 1], 7, 9, [4, 3]), ([2], 1, 9, [2]), ([2], 100, 5, [5])],
)
def test_places_are_where_there_are_fewest_workers(counts: list[int], total: int, most: int, places: list[int]) -> None:
    assert spread_slots(counts, total, limits=[most] * len(counts)) == places


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=3), more=st.integers(0, 6))
def test_further_workers_have_ranks_and_devices_of_their_own(counts: list[int], more: int) -> None:
    group, places = group_of(counts), spread_slots(counts, sum(counts) + more, limits=[100] * len(counts))
    found = with_later_workers(group, topology.one_machine(places).nodes, num_cpus=8).workers
    assert found[: group.world_size] == group.workers
    assert [worker.global_rank for worker in found] == list(range(sum(counts) + more))
    taken = sorted((worker.node, worker.local_rank) for worker in found)
    assert taken == [(f"node{index}", place) for index, count in enumerate(places) for place in range(count)]
    for worker in found[group.world_size :]:
        environ = worker.environ
        assert (environ["RANK"], environ["LOCAL_RANK"]) == (str(worker.global_rank), str(worker.local_rank))
        assert int(environ["WORLD_SIZE"]) > worker.global_rank
        assert int(environ["LOCAL_WORLD_SIZE"]) > worker.local_rank
        assert environ["MASTER_PORT"] == "1"
