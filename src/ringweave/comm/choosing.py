"""Which schedule a message takes: the group's plan, and what goes to the host library instead."""

import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from ringweave import schedules, topology
from ringweave.comm import hearing
from ringweave.comm.members import Members
from ringweave.comm.probing.findings import Findings
from ringweave.cost import Assumptions
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError
from ringweave.planning import Choice, Plan, plan_text
from ringweave.planning.adapting import Situation

MIN_SCHEDULED_BYTES = 64 * 2**10
"""Below this a message goes to the host library untouched: latency decides there, and Python costs more of it."""

MIN_SHARED_BYTES = 3 * 10**6
"""The same for a group on one node that does not adapt: the host library is faster up to here, see docs/log.md."""

_MAX_CHOICES = 4096

_KEY = "plan"
MAX_BYTES = 3 * plan_text.MAX_BYTES
"""Of what the first rank says: the plan's text in JSON, where quotation marks take two bytes each, and what won."""
_LOOK_S = 0.2
_FIRST_LOOK_S = 0.005
"""Then twice as long each time, up to the other: without probing a plan takes some milliseconds."""
"""How often a rank looks whether the plan is there. It does not wait in the store: all other threads of the process
would wait for their turn there, and nobody could end it."""


class GroupPlan:
    """The plan of one group, made when it is first needed; the same on all ranks.

    Among several nodes the first rank makes it and sends its text to the others, so that all compute with the same
    numbers; so it does inside one node where the group is to adapt. With it goes what earlier runs found out.
    """

    def __init__(
        self, make: Callable[[], Plan], load: Callable[[Plan], Mapping[int, str] | None], sending: "Sending | None"
    ) -> None:
        """Nothing is sent where `sending` is None: every rank makes the plan itself, and the group does not adapt.

        Args:
            make: Makes the plan.
            load: What won each class of sizes with this plan in earlier runs; None if the group is not to adapt.
            sending: Between which ranks.
        """
        self._make = make
        self._sending = sending
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._tuned: Mapping[int, str] | None = None
        self._choices: dict[tuple[int, str | None], Choice] = {}
        self._is_cut = False
        if sending is not None and sending.members.group_rank == 0:
            self._plan = make()
            self._tuned = load(self._plan)
            sending.send(self._plan, self._tuned)

    def get(self, timeout_s: float | None = None) -> Plan:
        """The plan; the first rank may take `timeout_s` to send it, None is the group's time-out.

        Raises:
            PeerError: It did not come in time, or before the group was cut.
        """
        with self._lock:
            if self._plan is not None:
                return self._plan
            if self._sending is None:
                plan, self._tuned = self._make(), None
            else:
                plan, self._tuned = self._sending.receive(timeout_s, lambda: self._is_cut)
            self._plan = plan
            return plan

    def cut(self) -> None:
        """Let go whoever waits for the plan, from any thread: the group has ended."""
        self._is_cut = True

    @property
    def adapts(self) -> bool:
        """Whether what is chosen may change with what is measured; known once the plan is."""
        return self._tuned is not None

    @property
    def tuned(self) -> Mapping[int, str]:
        """The schedule that won each class of sizes in earlier runs."""
        return self._tuned or {}

    def replace(self, plan: Plan) -> None:
        """Another plan holds from now on; all ranks do so at the same collective."""
        with self._lock:
            self._plan = plan
            self._choices.clear()

    def choose(self, num_bytes: int, forced: str | None) -> Choice:
        """What the plan has for messages of that size, looked up once for each size.

        Raises:
            PeerError: The first rank did not send the plan in time.
        """
        if forced == schedules.HOST:
            return BY_HOST
        key = (num_bytes, forced)
        if key not in self._choices:
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            self._choices[key] = self.get().choose(num_bytes, forced)
        return self._choices[key]


@dataclass(frozen=True, slots=True)
class Sending:
    """How the first rank tells the others its plan."""

    store: Store
    members: Members
    timeout: timedelta
    """How long the plan may take, where no other limit is given."""
    clock: Callable[[], float] = time.monotonic
    """Seconds that only grow."""
    sleep: Callable[[float], None] = time.sleep
    """Between two looks."""

    def send(self, plan: Plan, tuned: Mapping[int, str] | None) -> None:
        """Called on the first rank."""
        known = None if tuned is None else {str(number): name for number, name in tuned.items()}
        self.store.set(_KEY, json.dumps({"plan": str(plan), "tuned": known}))

    def receive(
        self, timeout_s: float | None = None, is_cut: Callable[[], bool] = lambda: False
    ) -> tuple[Plan, Mapping[int, str] | None]:
        """What the first rank sent.

        Args:
            timeout_s: How long it may take: it may still be measuring the network. None is the group's time-out.
            is_cut: Whether nobody wants it any more.

        Raises:
            PeerError: Nothing came in time, or while it was wanted.
            DisagreementError: What came is no plan.
        """
        limit_s = self.timeout.total_seconds() if timeout_s is None else timeout_s
        deadline, look_s = self.clock() + limit_s, _FIRST_LOOK_S
        try:
            while not self.store.check([_KEY]):
                if is_cut():
                    raise self._absence("before the group was cut")
                if self.clock() >= deadline:
                    raise self._absence(f"within {limit_s:g} s")
                self.sleep(look_s)
                look_s = min(2 * look_s, _LOOK_S)
            value = self.store.get(_KEY)
        except PeerError:
            raise
        except RuntimeError as cause:
            raise self._absence("before the store was gone") from cause
        expected = f"the plan that {self.members.name(0)} made"
        return hearing.read(value, "plan of the group", _plan_in, expected=expected, most=MAX_BYTES)

    def _absence(self, until: str) -> PeerError:
        return PeerError(
            f"process group: {self.members.name(0)} sent no plan {until}, expected one when the group is formed. "
            "Look into the log of that rank."
        )


def _plan_in(document: Any) -> tuple[Plan, Mapping[int, str] | None]:
    tuned = document["tuned"]
    known = None if tuned is None else {int(number): str(name) for number, name in tuned.items()}
    return Plan.parse(document["plan"]), known


def situation(members: Members, environment: WorkerEnvironment, found: Findings | None = None) -> Situation:
    """Where these members run: on the cluster of the environment, or else on the one that was found by probing.

    Without both every node is assumed to have what `topology.one_machine` says. The work of all ranks is taken to last
    as long as that of the one with the least part of a processor, for which the others wait.

    Raises:
        ClusterError: The cluster file is wrong.
    """
    nodes, rates = [member.place.node for member in members.ranks], {}
    if environment.cluster_path is not None:
        cluster = topology.load(environment.cluster_path)
    elif found is not None:
        cluster, rates = found.cluster(), found.rates
    else:
        names = {node: f"node{index}" for index, node in enumerate(dict.fromkeys(nodes))}
        cluster = topology.one_machine([1] * len(names))  # whose names these are, and what it assumes of a node's rate
        nodes = [names[node] for node in nodes]
    least = min((member.place.cores or math.inf for member in members.ranks), default=math.inf)
    return Situation(
        cluster=cluster,
        nodes=tuple(nodes),
        rates=rates,
        assumptions=Assumptions(cores=least) if least < math.inf else None,
        leader_per_nic=environment.leader_per_nic,
    )


def is_shared(members: Members, environment: WorkerEnvironment) -> bool:
    """Whether the first rank makes the plan for all: among several nodes, and where one node is to adapt."""
    return members.group_size > 1 and (members.num_nodes > 1 or environment.tuning is True)


def may_adapt(members: Members, environment: WorkerEnvironment) -> bool:
    """Whether measured times may change what a group runs; the first rank's answer counts.

    By default among several nodes, where predictions can be wrong. Not where the same bits are wanted from run to run:
    a schedule is forced, torch is asked for deterministic algorithms, or tuning is off.
    """
    wanted = members.num_nodes > 1 if environment.tuning is None else environment.tuning
    is_fixed = environment.schedule is not None or torch.are_deterministic_algorithms_enabled()
    return wanted and not is_fixed and members.group_size > 1


def is_crowded(nodes: Sequence[str]) -> bool:
    """Whether some node has more of these ranks than this machine has processors."""
    return max(Counter(nodes).values()) > len(os.sched_getaffinity(0))


def host_limit_bytes(members: Members, environment: WorkerEnvironment, *, host_can: bool) -> float:
    """Messages smaller than this go to the host library untouched, at once; infinite where the user wants all to.

    The same on all ranks, because it depends on nothing that differs between them.

    Args:
        members: The group.
        environment: Says what the user wants.
        host_can: Whether the host library computes these messages as they are; what it cannot do takes a schedule,
            however small.

    Raises:
        UsageError: No schedule has the forced name.
    """
    name = schedules.check_name(environment.schedule) if environment.schedule else None
    if not host_can:
        return 0
    if members.group_size == 1 or name == schedules.HOST:
        return math.inf
    is_known_slower = name is None and members.num_nodes == 1 and environment.tuning is not True
    return MIN_SHARED_BYTES if is_known_slower else MIN_SCHEDULED_BYTES


BY_HOST = Choice(schedule=schedules.HOST, num_segments=1, lag=0, window=1, predicted_s=float("inf"))
"""The host library's own way."""
