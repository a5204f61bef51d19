"""Where a group runs, and the plan of it at any rates. Pure."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringweave import cost
from ringweave.cost import Assumptions
from ringweave.planning import simulating
from ringweave.planning.groups import plan_group
from ringweave.planning.plans import Plan
from ringweave.sim import Machine
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Where a group runs."""

    cluster: Cluster
    nodes: tuple[str, ...]
    """Name of each rank's node in the cluster."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of links that were measured before anything ran, by name, in place of the cluster's."""
    assumptions: Assumptions | None = None
    leader_per_nic: bool = False
    """Each NIC of a node has a leader, not just each node."""

    @property
    def num_nodes(self) -> int:
        """How many different ones."""
        return len(set(self.nodes))

    def plan(self, rates: Mapping[str, float]) -> Plan:
        """The plan when links have these rates, where they differ from what was known before."""
        known = tuple(sorted({**self.rates, **rates}.items()))
        return _plan(self.cluster, self.nodes, known, self.assumptions, self.leader_per_nic)

    def network(self, rates: Mapping[str, float]) -> cost.Network:
        """The network with these rates."""
        return cost.network(self.cluster, self.nodes, {**self.rates, **rates})

    def estimate(self, plan: Plan, num_bytes: int, rates: Mapping[str, float]) -> dict[str, float]:
        """Seconds of the candidates in question by simulation (`simulating.estimate`); nothing inside one node."""
        if self.num_nodes == 1:
            return {}
        known, machine = {**self.rates, **rates}, Machine.assumed(self.assumptions)
        return simulating.estimate(plan, self.cluster, num_bytes, rates=known, machine=machine)


@functools.lru_cache(maxsize=16)
def _plan(
    cluster: Cluster,
    nodes: tuple[str, ...],
    rates: tuple[tuple[str, float], ...],
    assumptions: Assumptions | None,
    leader_per_nic: bool,
) -> Plan:
    """Kept: the members of an elastic job form one group after another, and two at once where somebody joins."""
    return plan_group(cluster, nodes, rates=dict(rates), assumptions=assumptions, leader_per_nic=leader_per_nic)
