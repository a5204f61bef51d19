"""When the ranks of a group have its plan."""

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from ringweave import planning, topology
from ringweave.comm import group_plan
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.group_plan import GroupPlan, PlanBroadcast
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError
from ringweave.planning import Plan

CLUSTER = topology.one_machine([1, 1])
NODES = [node.name for node in CLUSTER.nodes]
RANKS = tuple(RankInfo(rank, RankLocation(node, "127.0.0.1"), ()) for rank, node in enumerate(NODES))
FORM_S = 10.0
"""The time-out of the group."""


class Second:
    """The second rank of a group, whose first one sends the plan `sent_s` after it was asked for."""

    def __init__(self, sent_s: float = float("inf"), cut_s: float = float("inf")) -> None:
        self.now_s = 0.0
        self.sent_s, self.cut_s = sent_s, cut_s
        self.plan = planning.plan_group(CLUSTER, NODES)
        self.store = HashStore()
        limit = timedelta(seconds=FORM_S)
        sending = PlanBroadcast(self.store, GroupInfo(RANKS, 1, b""), limit, clock=lambda: self.now_s, sleep=self.sleep)
        self.guide = GroupPlan(self.refuse, lambda plan: None, sending)

    def refuse(self, is_whole: bool) -> Plan:
        raise AssertionError("the first rank makes it")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.sent_s:
            PlanBroadcast(self.store, GroupInfo(RANKS, 0, b""), timedelta(seconds=FORM_S)).send(self.plan, None)
        if self.now_s >= self.cut_s:
            self.guide.abort()


def test_a_first_rank_that_still_measures_the_network_has_as_long_as_the_collective() -> None:
    second = Second(sent_s=3 * FORM_S)
    assert second.guide.wait_for_plan(86_400.0) == second.plan


def test_a_plan_that_comes_soon_is_seen_soon() -> None:
    second = Second(sent_s=0.03)
    assert second.guide.wait_for_plan() == second.plan
    assert second.now_s < 2 * 0.03 + 0.01


def test_a_first_rank_that_sends_no_plan_is_named_when_time_is_up() -> None:
    second = Second()
    with pytest.raises(PeerError, match=r"process group: rank 0 \(node .*\) sent no plan within 10 s, expected one"):
        second.guide.wait_for_plan()
    assert FORM_S <= second.now_s < 2 * FORM_S


def test_who_waits_for_the_plan_when_the_group_is_cut_goes() -> None:
    second = Second(cut_s=20.0)
    with pytest.raises(PeerError, match=r"sent no plan before the group was cut"):
        second.guide.wait_for_plan(86_400.0)
    assert second.now_s < 30.0


class Ranks:
    """Both ranks of a group that begins with exact allreduces."""

    def __init__(self) -> None:
        store, limit = HashStore(), timedelta(seconds=FORM_S)
        self.made: list[bool] = []
        self.guides = [
            GroupPlan(
                self.make, lambda plan: {}, PlanBroadcast(store, GroupInfo(RANKS, rank, b""), limit), is_whole=False
            )
            for rank in range(2)
        ]

    def make(self, is_whole: bool) -> Plan:
        self.made.append(is_whole)
        return planning.plan_group(CLUSTER, NODES, kinds=None if is_whole else ())


def test_the_first_rank_completes_the_plan_when_all_need_more_of_it() -> None:
    ranks = Ranks()
    whole = planning.plan_group(CLUSTER, NODES)
    for guide in ranks.guides:
        assert guide.wait_for_plan() == whole.exact_allreduces
        assert guide.choose(10**6, None).schedule == whole.choose(10**6).schedule
    assert ranks.made == [False]
    for guide in ranks.guides:
        assert guide.wait_for_plan(is_whole=True) == guide.wait_for_plan() == whole
        assert guide.choose(10**6, None, "allgather") == whole.choose(10**6, None, "allgather")
        assert guide.is_tunable
    assert ranks.made == [False, True]


def test_a_plan_that_a_survey_brought_stays_while_a_rank_has_yet_to_receive_the_whole_first_one() -> None:
    ranks, new = Ranks(), planning.plan_group(CLUSTER, NODES, rates={f"{NODES[0]}->core": 1e6})
    first, second = ranks.guides
    second.wait_for_plan()
    second.replace(new)
    first.wait_for_plan(is_whole=True)
    first.replace(new)
    assert first.wait_for_plan(is_whole=True) == second.wait_for_plan(is_whole=True) == new


def test_who_has_the_least_of_a_processor_sets_what_messages_cost() -> None:
    """With a seventh of one, a message in many pieces costs more time than the network takes for it."""

    def pieces(*cores: float) -> int:
        ranks = tuple(RankInfo(r, RankLocation(f"n{r}", f"10.0.0.{r}", cores=part), ()) for r, part in enumerate(cores))
        found = group_plan.group_placement(GroupInfo(ranks, 0, b""), WorkerEnvironment.from_environ({}))
        return found.plan({}).choose(4_500_000).num_segments

    assert pieces(0.0, 0.0, 0.0) == pieces(8.0, 0.0, 8.0)
    assert pieces(1.0, 0.14, 0.0) < pieces(0.0, 0.0, 0.0) / 2
