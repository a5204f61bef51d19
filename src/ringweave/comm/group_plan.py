"""Group plan: the plan of one group, made or received at its first use, and its choice of a schedule by size."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ringweave import schedules, topology
from ringweave.comm import peer_data
from ringweave.comm.group_info import MAX_STREAMS, GroupInfo
from ringweave.comm.probing.network_measurement import NetworkMeasurement
from ringweave.cost import ENCRYPTION_S_PER_BYTE, Assumptions
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError
from ringweave.planning import Plan, ScheduleChoice, plans
from ringweave.planning.group_planner import GroupPlacement
from ringweave.schedules import CollectiveKind

_MAX_CHOICES = 4096

_PLAN_KEY, _WHOLE_PLAN_KEY = "plan", "whole-plan"
MAX_SHARED_PLAN_BYTES = 3 * plans.MAX_PLAN_BYTES
"""Limit on the first rank's message: the plan's text in JSON, where quotation marks take two bytes each, and the
winners."""
_MAX_POLL_S = 0.2
_FIRST_POLL_S = 0.005
"""First poll interval, doubled up to the maximum: without probing a plan takes some milliseconds."""
"""Poll intervals while waiting for the plan. A rank does not wait in the store: all other threads of the process would
wait for their turn there, and the wait could not be interrupted."""


class GroupPlan:
    """Plan of one group, made when it is first needed; the same on all ranks.

    Among several nodes the first rank makes it and sends its text to the others, so that all compute with the same
    numbers; within one node it does so where the group is to be tuned. The winners of earlier runs are sent along.

    A group that all members wait for begins with a plan of exact allreduces. The whole plan follows when a collective
    first needs more of it, which is the same one on all ranks.
    """

    def __init__(
        self,
        make: Callable[[bool], Plan],
        load: Callable[[Plan], Mapping[str, str] | None],
        broadcast: "PlanBroadcast | None",
        *,
        is_whole: bool = True,
    ) -> None:
        """Without `broadcast`, nothing is sent: every rank makes the plan itself, and the group is not tuned.

        Args:
            make: Makes the plan: the whole one, or, called with False, that of exact allreduces.
            load: Winner of each message class with this plan in earlier runs; None if the group is not to be tuned.
            broadcast: Way from the first rank to the others.
            is_whole: Begin with the whole plan.
        """
        self._make = make
        self._broadcast = broadcast
        self._is_whole = self._begins_whole = is_whole
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._first: Plan | None = None
        self._tuned: Mapping[str, str] | None = None
        self._choices: dict[tuple[CollectiveKind, int, str | None, int | None, str], ScheduleChoice] = {}
        self._is_aborted = False
        if broadcast is not None and broadcast.group.group_rank == 0:
            self._plan = self._first = make(is_whole)
            self._tuned = load(self._plan)
            broadcast.send(self._plan, self._tuned)

    def wait_for_plan(self, timeout_s: float | None = None, *, is_whole: bool = False) -> Plan:
        """Return the plan; wait at most `timeout_s` for the first rank, or the group's timeout if None.

        Args:
            timeout_s: Limit.
            is_whole: More than exact allreduces is needed; all ranks ask for that.

        Raises:
            PeerError: It did not come in time, or before the group was aborted.
        """
        with self._lock:
            if self._plan is None:
                self._plan, self._tuned = self._obtain(timeout_s, is_whole=self._begins_whole)
                self._first = self._plan
            if is_whole and not self._is_whole:
                whole, _ = self._obtain(timeout_s, is_whole=True)
                if self._plan is self._first:  # a survey may have replaced it
                    self._plan = whole
                self._is_whole = True
            return self._plan

    def _obtain(self, timeout_s: float | None, *, is_whole: bool) -> tuple[Plan, Mapping[str, str] | None]:
        """Make a plan, or receive it from the first rank."""
        key = _PLAN_KEY if is_whole == self._begins_whole else _WHOLE_PLAN_KEY
        if self._broadcast is None:
            return self._make(is_whole), None
        if self._broadcast.group.group_rank > 0:
            return self._broadcast.receive(timeout_s, lambda: self._is_aborted, key)
        plan = self._make(is_whole)
        self._broadcast.send(plan, None, key)
        return plan, None

    def abort(self) -> None:
        """Wake any thread that waits for the plan: the group has ended."""
        self._is_aborted = True

    @property
    def is_tunable(self) -> bool:
        """Return True if measurements may change the choices; known once the plan is."""
        return self._tuned is not None

    @property
    def tuned(self) -> Mapping[str, str]:
        """Winner of each message class in earlier runs."""
        return self._tuned or {}

    def replace(self, plan: Plan) -> None:
        """Replace the plan; all ranks do so at the same collective."""
        with self._lock:
            self._plan = plan
            self._choices.clear()

    def choose(
        self,
        num_bytes: int,
        forced: str | None,
        kind: CollectiveKind = "allreduce",
        largest_block_bytes: int | None = None,
        wire: str = plans.EXACT,
    ) -> ScheduleChoice:
        """Return the plan's choice for messages of that kind and size, cached.

        Args:
            num_bytes: Size of the message.
            forced: Name of a schedule; None leaves the choice to the plan.
            kind: The collective.
            largest_block_bytes: Size of the largest block where blocks differ; the native backend has none such.
            wire: Wire format of an allreduce, or `auto`.

        Raises:
            PeerError: The first rank did not send the plan in time.
        """
        if forced == schedules.NATIVE and largest_block_bytes is None:
            return NATIVE_CHOICE
        key = (kind, num_bytes, forced, largest_block_bytes, wire)
        if key not in self._choices:
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            plan = self.wait_for_plan()
            self._choices[key] = (
                plan.choose(num_bytes, forced, kind, wire)
                if largest_block_bytes is None
                else plan.choose_for_blocks(num_bytes, largest_block_bytes, forced, kind)
            )
        return self._choices[key]


@dataclass(frozen=True, slots=True)
class PlanBroadcast:
    """Broadcast of the plan from the first rank to the others, over the store."""

    store: Store
    group: GroupInfo
    timeout: timedelta
    """Limit on waiting for the plan, where no other limit is given."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    sleep: Callable[[float], None] = time.sleep
    """Called between two polls."""

    def send(self, plan: Plan, tuned: Mapping[str, str] | None, key: str = _PLAN_KEY) -> None:
        """Publish the plan; called on the first rank."""
        known = None if tuned is None else dict(tuned)
        self.store.set(key, json.dumps({"plan": str(plan), "tuned": known}))

    def receive(
        self, timeout_s: float | None = None, is_aborted: Callable[[], bool] = lambda: False, key: str = _PLAN_KEY
    ) -> tuple[Plan, Mapping[str, str] | None]:
        """Return the plan and winners that the first rank sent.

        Args:
            timeout_s: Limit; the first rank may still be measuring the network. None is the group's timeout.
            is_aborted: Whether the group was aborted.
            key: Key in the store.

        Raises:
            PeerError: Nothing came in time, or before the abort.
            DisagreementError: The received text is no plan.
        """
        effective_timeout_s = self.timeout.total_seconds() if timeout_s is None else timeout_s
        deadline, poll_s = self.clock() + effective_timeout_s, _FIRST_POLL_S
        try:
            while not self.store.check([key]):
                if is_aborted():
                    raise self._missing_plan_error("before the group was cut")
                if self.clock() >= deadline:
                    raise self._missing_plan_error(f"within {effective_timeout_s:g} s")
                self.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
            value = self.store.get(key)
        except PeerError:
            raise
        except RuntimeError as cause:
            raise self._missing_plan_error("before the store was gone") from cause
        expected = f"the plan that {self.group.rank_text(0)} made"
        return peer_data.decode_peer_data(
            value, "plan of the group", _parse_shared_plan, expected=expected, max_bytes=MAX_SHARED_PLAN_BYTES
        )

    def _missing_plan_error(self, until: str) -> PeerError:
        return PeerError(
            f"process group: {self.group.rank_text(0)} sent no plan {until}, expected one when the group is formed. "
            "Look into the log of that rank."
        )


def _parse_shared_plan(document: Any) -> tuple[Plan, Mapping[str, str] | None]:
    tuned = document["tuned"]
    known = None if tuned is None else {str(key): str(name) for key, name in tuned.items()}
    return Plan.parse(document["plan"]), known


def group_placement(
    group: GroupInfo, environment: WorkerEnvironment, measured: NetworkMeasurement | None = None
) -> GroupPlacement:
    """Return the group's placement on the probed cluster, or else on that of the environment.

    Without either, every node gets the assumptions of `topology.one_machine`. Coding is taken to be as slow on all
    ranks as on this one, whose host's processors its ranks share. Work of all ranks is taken to last as
    long as on the rank with the smallest CPU quota, for which the others wait.

    Raises:
        ClusterError: The cluster file is wrong.
    """
    nodes, rates = [member.location.node for member in group.ranks], {}
    if measured is not None:
        cluster, rates = measured.cluster(), measured.link_rates
    elif environment.cluster_path is not None:
        cluster = topology.load(environment.cluster_path)
    else:
        names = {node: f"node{index}" for index, node in enumerate(dict.fromkeys(nodes))}
        cluster = topology.one_machine([1] * len(names))  # names its nodes so, at an assumed rate
        nodes = [names[node] for node in nodes]
    least = min((member.location.cores or math.inf for member in group.ranks), default=math.inf)
    own_host = group.own_info.location.host
    num_on_host = sum(member.location.host == own_host for member in group.ranks) if own_host else 1
    processors = min(1.0, least, len(os.sched_getaffinity(0)) / num_on_host)
    sealing = ENCRYPTION_S_PER_BYTE if environment.encrypts else 0.0
    return GroupPlacement(
        cluster=cluster,
        nodes=tuple(nodes),
        rates=rates,
        assumptions=Assumptions(cores=least, processors=processors, encryption_s_per_byte=sealing),
        leader_per_nic=environment.leader_per_nic,
    )


_STREAM_BYTES_PER_S = 1.5e9
"""What one connection carries, whose bytes a processor copies at each end: 1.5 to 1.6 GB/s between two nodes of a lab;
two connections carry 2.9 GB/s, by two threads (measured, two processors)."""


def count_streams(group: GroupInfo, placement: GroupPlacement) -> tuple[int, ...]:
    """Return the number of connections that this rank opens by each NIC to each rank: more than one on fast links.

    Each further one takes a thread, so there are no more than this rank's part of the host's processors.
    """
    own = group.own_info.location
    num_on_host = sum((member.location.host, member.location.node) == (own.host, own.node) for member in group.ranks)
    processors = min(len(os.sched_getaffinity(0)) // num_on_host, int(own.cores or MAX_STREAMS), MAX_STREAMS)
    if processors < 2 or group.num_nodes == 1:
        return ()
    network = placement.network({})
    rates = dict(zip(network.names, map(min, network.up_bytes_per_s, network.down_bytes_per_s), strict=True))
    assumed = placement.assumptions
    s_per_byte = 1 / _STREAM_BYTES_PER_S + (assumed.encryption_s_per_byte if assumed else 0.0)
    of_ranks = [rates[node] / len(own.addresses) for node in placement.nodes]
    own_rate = of_ranks[group.group_rank]
    return tuple(max(1, min(processors, math.ceil(min(own_rate, rate) * s_per_byte))) for rate in of_ranks)


NATIVE_CHOICE = ScheduleChoice(schedule=schedules.NATIVE, num_segments=1, lag=0, window=1, predicted_s=float("inf"))
"""Choice of the native backend."""
