"""Which schedule a message takes: the group's plan, and what goes to the host library instead."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from ringweave import planning, schedules, topology
from ringweave.comm.members import Members
from ringweave.comm.probing.findings import Findings
from ringweave.cost import Assumptions
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError
from ringweave.planning import Choice, Plan

MIN_SCHEDULED_BYTES = 64 * 2**10
"""Below this a message goes to the host library untouched: latency decides there, and Python costs more of it."""

MIN_SHARED_BYTES = 3 * 10**6
"""The same for a group on one node, where the host library is faster up to here: see docs/log.md."""

_CROWDED_PIECE_BYTES = 4e6
"""Pieces inside a node with more ranks than processors, where waking a rank costs a change of context."""

_MAX_CHOICES = 4096

_KEY = "plan"


class GroupPlan:
    """The plan of one group, made when it is first needed; the same on all ranks.

    Among several nodes the first rank makes it and sends its text to the others, so that all compute with the same
    numbers.
    """

    def __init__(self, make: Callable[[], Plan], store: Store, members: Members, timeout: timedelta) -> None:
        """`make` makes it; `timeout` bounds the wait for the first rank's."""
        self._make = make
        self._store = store
        self._members = members
        self._timeout = timeout
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._choices: dict[tuple[int, str | None], Choice] = {}
        if members.num_nodes > 1 and members.group_rank == 0:
            self._plan = make()
            store.set(_KEY, str(self._plan))

    def get(self) -> Plan:
        """The plan.

        Raises:
            PeerError: The first rank did not send it in time.
        """
        with self._lock:
            if self._plan is None:
                self._plan = self._make() if self._members.num_nodes == 1 else self._receive()
            return self._plan

    def choose(self, num_bytes: int, forced: str | None) -> Choice:
        """What the plan has for messages of that size, looked up once for each size.

        Raises:
            PeerError: The first rank did not send the plan in time.
        """
        key = (num_bytes, forced)
        if key not in self._choices:
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            self._choices[key] = self.get().choose(num_bytes, forced)
        return self._choices[key]

    def _receive(self) -> Plan:
        try:
            self._store.wait([_KEY], self._timeout)
            return Plan.parse(self._store.get(_KEY).decode())
        except RuntimeError as cause:
            raise PeerError(
                f"process group: {self._members.name(0)} sent no plan within {self._timeout.total_seconds():g} s, "
                "expected one when the group is formed. Look into the log of that rank."
            ) from cause


def make_plan(members: Members, environment: WorkerEnvironment, found: Findings | None = None) -> Plan:
    """The plan for these members on the cluster of the environment, or else on the one that was found by probing.

    Without both every node is assumed to have what `topology.one_machine` says.

    Raises:
        ClusterError: The cluster file is wrong, or lacks a member's node.
    """
    nodes = [member.place.node for member in members.ranks]
    assumed = assumptions(nodes)
    if environment.cluster_path is not None:
        return planning.plan_group(topology.load(environment.cluster_path), nodes, assumptions=assumed)
    if found is not None:
        return planning.plan_group(found.cluster(), nodes, rates=found.rates, assumptions=assumed)
    names = {node: f"node{index}" for index, node in enumerate(dict.fromkeys(nodes))}
    cluster = topology.one_machine([1] * len(names))  # whose names these are, and what it assumes of a node's rate
    return planning.plan_group(cluster, [names[node] for node in nodes], assumptions=assumed)


def assumptions(nodes: Sequence[str]) -> Assumptions:
    """What is assumed of ranks on these nodes, whose machines are taken to have as many processors as this one."""
    crowded = max(Counter(nodes).values()) > len(os.sched_getaffinity(0))
    return Assumptions(local_piece_bytes=_CROWDED_PIECE_BYTES) if crowded else Assumptions()


def choose(num_bytes: int, members: Members, plan: GroupPlan, *, forced: str | None, host_can: bool) -> Choice:
    """What a message takes: the forced schedule, else the plan's choice; small messages go to the host library.

    The same on all ranks, because it depends on nothing that differs between them.

    Args:
        num_bytes: Size of the message.
        members: The group.
        plan: Its plan.
        forced: Name of the schedule that the user asked for, if any.
        host_can: Whether the host library computes this message as it is; what it cannot do takes a schedule, however
            small.

    Raises:
        UsageError: No schedule has the forced name, or this group cannot run it.
        PeerError: The plan did not come.
    """
    name = schedules.check_name(forced) if forced else None
    least = MIN_SHARED_BYTES if name is None and members.num_nodes == 1 else MIN_SCHEDULED_BYTES
    if host_can and (num_bytes < least or members.group_size == 1 or name == schedules.HOST):
        return _HOST
    return plan.choose(num_bytes, None if name == schedules.HOST else name)


_HOST = Choice(schedule=schedules.HOST, num_segments=1, lag=0, window=1, predicted_s=float("inf"))
