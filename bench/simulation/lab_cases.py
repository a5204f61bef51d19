"""Measurements of measure_every_schedule.py on a lab cluster, and the simulation of the same."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ringweave import planning, sim, topology
from ringweave.lab import bring_up
from ringweave.planning import Plan, ScheduleChoice
from ringweave.schedules.program import RankProgram
from ringweave.sim.simulation import compile_all_programs

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule and a size on one cluster, on all its devices, with the plan's own pipelining."""

    cluster: str
    num_cpus: int
    """Processors of the machine that played all nodes."""
    rates: Mapping[str, float]
    """Bytes per second by directed link name, measured."""
    measured: Mapping[str, Any]
    """Schedule, bytes, and seconds and processor time of each round."""

    @property
    def choice(self) -> ScheduleChoice:
        """Return the schedule as the plan would run it."""
        return planned(self.cluster)[1].choose(self.measured["bytes"], forced=self.measured["schedule"])

    @property
    def nodes(self) -> tuple[str, ...]:
        return planned(self.cluster)[1].nodes

    def programs(self) -> list[RankProgram]:
        plan, choice = planned(self.cluster)[1], self.choice
        return compile_all_programs(
            plan.generate(choice.schedule), plan.nodes, self.measured["bytes"], choice.pipelining
        )

    def simulate(self, machine: sim.HostModel) -> sim.SimulationResult:
        """Simulate the case: ranks share the processors, links let a full bucket pass at once, as in the lab."""
        (cluster, plan), choice = planned(self.cluster), self.choice
        return sim.simulate(
            plan.generate(choice.schedule),
            cluster,
            plan.nodes,
            self.measured["bytes"],
            pipelining=choice.pipelining,
            rates=self.rates,
            machine=dataclasses.replace(machine, num_processors=self.num_cpus, bucket_bytes=bring_up.MIN_BURST_BYTES),
        )


def cases_of(document: Mapping[str, Any]) -> list[Case]:
    """Return the cases of one file."""
    cpus, rates = document["machine"]["num_cpus"], document["rates_bytes_per_s"]
    return [Case(document["cluster"], cpus, rates, measured) for measured in document["measured"]]


@cache
def planned(name: str) -> tuple[topology.Cluster, Plan]:
    """An example cluster, and the plan for all its devices."""
    cluster = topology.load(CLUSTERS / f"{name}.yaml")
    return cluster, planning.plan_group(cluster, [node.name for node in cluster.nodes for _ in node.devices])
