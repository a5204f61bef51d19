"""What a group's adviser is made of."""

from collections.abc import Mapping
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from ringweave import topology
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.tuning.selector import GENERATION_GROUP_PREFIX, REDUCE_GROUP_PREFIX, GroupEventLog, make_selector
from ringweave.environment import WorkerEnvironment
from ringweave.planning import Plan
from ringweave.planning.autotune.tuning_messages import TuningReport
from ringweave.planning.group_planner import GroupPlacement

NODES = ("a-0", "a-1", "a-2", "a-3")
MEMBERS = GroupInfo(
    tuple(RankInfo(rank, RankLocation(node, "127.0.0.1"), ()) for rank, node in enumerate(NODES)), 0, b""
)
TEXT = "name: c\nnodes: [{name: a, nic: 1Gbit/s, devices: 1, count: 4}]\n"


@pytest.mark.parametrize(
    ("group", "expected"), [("0", 1), (f"{GENERATION_GROUP_PREFIX}1.2", 0), (f"{REDUCE_GROUP_PREFIX}1.2", 0)]
)
def test_groups_that_all_wait_for_simulate_nothing(
    group: str, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    simulated: list[int] = []

    def estimate(self: GroupPlacement, plan: Plan, num_bytes: int, rates: Mapping[str, float]) -> dict[str, float]:
        simulated.append(num_bytes)
        return {}

    monkeypatch.setattr(GroupPlacement, "simulate_candidates", estimate)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where = GroupPlacement(cluster=topology.loads(TEXT), nodes=NODES)
    scribe = GroupEventLog(None, 0, group)
    limit = timedelta(seconds=60)
    director = make_selector(HashStore(), MEMBERS, WorkerEnvironment.from_environ({}), where, limit, scribe)
    adviser = director._make_autotuner(director.wait_for_plan())
    assert adviser.decide(TuningReport(num_bytes=10**6), 0.0).is_trial
    assert len(simulated) == expected
    # And they begin with what a sum of gradients needs; the rest is planned for whoever asks.
    assert (director.wait_for_plan().collective("allgather") is None) == (expected == 0)
    assert director.wait_for_plan(is_whole=True).collective("allgather") is not None
    adviser.complete_plan(director.wait_for_plan())
    assert adviser.decide(TuningReport(num_bytes=10**6, kind="allgather"), 0.0).is_trial
    assert adviser.plan.collective("allgather") is not None
