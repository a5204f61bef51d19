"""When device tensors go by the bridge, and what a script sees of a result on a device."""

from pathlib import Path

import pytest
import torch

from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.plan_choice import allows_nccl, shares_gpu, uses_bridge
from ringweave.comm.work import PendingWork
from ringweave.environment import DEVICE_PATH, DEVICE_PATHS, WorkerEnvironment
from ringweave.errors import UsageError
from tests.comm.bridge.bridged_functions import ThreadDevice


def members(nodes: str, gpus: list[tuple[str, ...]]) -> GroupInfo:
    places = [RankLocation(node, "127.0.0.1", gpus=seen) for node, seen in zip(nodes, gpus, strict=True)]
    return GroupInfo(tuple(RankInfo(rank, place, ()) for rank, place in enumerate(places)), 0, b"")


@pytest.mark.parametrize(
    ("nodes", "gpus", "shared"),
    [
        ("aa", [("0",), ("0",)], True),
        ("aa", [("0",), ("1",)], False),
        ("aa", [("0", "1"), ("0", "1")], False),
        ("aaa", [("0", "1")] * 3, True),
        ("ab", [("0",), ("0",)], False),
        ("aab", [("0",), ("GPU-1",), ("0",)], False),
        ("aaa", [(), (), ("0",)], False),
        ("aa", [(), ()], False),
    ],
)
def test_a_gpu_is_shared_where_more_ranks_than_gpus_are_seen(
    nodes: str, gpus: list[tuple[str, ...]], shared: bool
) -> None:
    assert shares_gpu([member.location for member in members(nodes, gpus).ranks]) == shared


def test_the_bridge_is_for_forced_schedules_shared_gpus_and_several_nodes() -> None:
    alone, shared = members("aa", [("0",), ("1",)]), members("aa", [("0",), ("0",)])
    assert not uses_bridge(alone, WorkerEnvironment())
    assert not uses_bridge(alone, WorkerEnvironment(schedule="native"))
    assert uses_bridge(alone, WorkerEnvironment(schedule="ring"))
    assert uses_bridge(shared, WorkerEnvironment())
    assert uses_bridge(members("ab", [("0",), ("0",)]), WorkerEnvironment())
    assert uses_bridge(alone, WorkerEnvironment(device_path="bridge"))
    assert not uses_bridge(shared, WorkerEnvironment(device_path="native", schedule="ring"))


def test_other_collectives_go_to_nccl_unless_ranks_share_a_gpu_or_the_bridge_is_asked_for() -> None:
    alone, shared = members("aa", [("0",), ("1",)]), members("aa", [("0",), ("0",)])
    assert allows_nccl(alone, WorkerEnvironment(schedule="ring"))
    assert allows_nccl(members("ab", [("0",), ("0",)]), WorkerEnvironment())
    assert not allows_nccl(shared, WorkerEnvironment())
    assert not allows_nccl(alone, WorkerEnvironment(device_path="bridge"))
    assert allows_nccl(shared, WorkerEnvironment(device_path="native"))


def test_the_variable_names_a_way() -> None:
    for path in DEVICE_PATHS:
        environ = WorkerEnvironment(device_path=path).to_environ()
        assert WorkerEnvironment.from_environ(environ).device_path == path
    assert DEVICE_PATH not in WorkerEnvironment(cluster_path=Path("c.yaml")).to_environ()
    assert WorkerEnvironment.from_environ({DEVICE_PATH: ""}).device_path == "auto"
    text = "RINGWEAVE_DEVICE_PATH: 'gloo', expected one of auto, bridge, native. Correct or unset it."
    with pytest.raises(UsageError, match=text):
        WorkerEnvironment.from_environ({DEVICE_PATH: "gloo"})


class Result:
    """On a device whose work is done when the test says so."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.ordered, self.done = 0, False
        self.streams = ThreadDevice(0)
        self.stream = self.streams.make_stream()

    def order_stream(self) -> None:
        self.ordered += 1

    def is_complete(self) -> bool:
        return self.done

    def result_stream(self):
        return self.streams.use(self.stream)


def test_callbacks_run_on_the_stream_of_the_result_and_get_the_tensors() -> None:
    result, tensor = Result(), torch.ones(2)
    work = PendingWork([tensor], result)
    seen = []
    early = work.get_future().then(lambda done: seen.append(result.streams.current_stream()))
    work.set_finished()
    assert not work.finish_without_future()
    assert not work.is_completed()
    work.resolve_future()
    early.wait()
    assert seen == [result.stream]
    result.done = True
    assert work.is_completed()
    assert work.wait()
    assert result.ordered == 1
    assert work.get_future().value()[0] is tensor


def test_a_failure_orders_no_stream() -> None:
    result = Result()
    work = PendingWork([torch.ones(2)], result)
    work.set_finished(RuntimeError("a rank died"))
    assert work.finish_without_future()
    assert work.is_completed()
    with pytest.raises(RuntimeError, match="a rank died"):
        work.wait()
    with pytest.raises(RuntimeError, match="a rank died"):
        work.get_future().wait()
    assert result.ordered == 0


def test_no_nccl_in_a_group_with_a_host_that_only_calls_out() -> None:
    infos = members("ab", [("0",), ("0",)]).ranks
    relayed = RankLocation("b", "127.64.0.9", gpus=("0",))
    group = GroupInfo((infos[0], RankInfo(1, relayed, ())), 0, b"")
    assert not allows_nccl(group, WorkerEnvironment())
    assert not allows_nccl(group, WorkerEnvironment(device_path="native"))
