"""Simulated times of the schedules with the best predictions; streams share links in virtual time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from ringweave import sim
from ringweave.environment import EXACT
from ringweave.planning.plans import Plan, ScheduleChoice
from ringweave.schedules import CollectiveKind, Schedule
from ringweave.sim import HostModel
from ringweave.topology import Cluster

MAX_SIMULATED_RANKS = 64
"""Largest group whose candidates are simulated while it waits."""
_MAX_CANDIDATES, _CANDIDATE_RATIO = 6, 2.0
"""Most candidates, and their largest predicted time relative to the least: the formula is off by up to 31 % one time in
twenty either way (docs/explanation/cost-and-simulation.md)."""
_TARGET_MESSAGES, _MAX_MESSAGES = 500, 1500
"""Messages per candidate: target where its segments allow it, and maximum. A message takes about 100 us of processor
time."""
_TARGET_BURSTS, _MAX_BURSTS = 4000, 8000
"""The same for bursts; bursts become larger before they become more."""
_MAX_BURST_BYTES = 32 * 2**10


def simulate_best(  # noqa: PLR0913 - plan, message, options
    plan: Plan,
    cluster: Cluster,
    num_bytes: int,
    *,
    count: int,
    kind: CollectiveKind = "allreduce",
    wire: str = EXACT,
    rates: Mapping[str, float] | None = None,
    machine: HostModel | None = None,
    on_progress: Callable[[str, int, int], None] = lambda schedule, done, total: None,
) -> dict[str, float]:
    """Return the simulated seconds of the best schedules by prediction, by name, in that order.

    Args:
        plan: The plan of the group, made for this cluster.
        cluster: The group's cluster.
        num_bytes: Size of the message.
        count: Number of schedules.
        kind: The collective; a broadcast starts at rank 0.
        wire: Format of what passes slow links, one of `plan.wires`.
        rates: Measured bytes per second by directed link name, as in the plan.
        machine: Costs of processors, memory and kernels; None simulates the network alone.
        on_progress: Called now and then with the name of a schedule, its simulated amount and its total.

    Raises:
        UsageError: A candidate has too many messages to simulate each.

    Cost:
        About 75 us for each message of each segment: 0.5 s each for 25 MB among 8 ranks.
    """
    return {
        choice.schedule: sim.simulate(
            plan.generate(choice.schedule, kind, wire=wire),
            cluster,
            plan.nodes,
            num_bytes,
            pipelining=choice.pipelining,
            rates=rates,
            machine=machine,
            progress=functools.partial(on_progress, choice.schedule),
        ).seconds
        for choice in plan.choices(num_bytes, kind, wire)[:count]
    }


def estimate_candidates(
    plan: Plan,
    cluster: Cluster,
    num_bytes: int,
    *,
    kind: CollectiveKind = "allreduce",
    wire: str = EXACT,
    rates: Mapping[str, float] | None = None,
    machine: HostModel | None = None,
) -> dict[str, float]:
    """Return the simulated seconds of the likely fastest candidates, by name, from their first segments.

    A message in many segments is simulated for a few of them, and for half as many; the time of the others is
    extrapolated. So the cost does not depend on the size of the message. On the nine clusters of
    docs/explanation/cost-and-simulation.md at 1, 5 and 25 MB the best three by simulation included one within 4 % of
    the fastest measured; those by formula, one within 46 %.

    Args:
        plan: The plan of the group, made for this cluster.
        cluster: The group's cluster.
        num_bytes: Size of the message.
        kind: The collective; a broadcast starts at rank 0.
        wire: Format of what passes slow links, one of `plan.wires`.
        rates: Measured bytes per second by directed link name, as in the plan.
        machine: Costs of processors, memory and kernels; None is `HostModel.assumed()`.

    Returns:
        Seconds by name; empty if the group is too large, or has at most one likely candidate.

    Cost:
        0.1 to 0.8 s of processor time for 3 to 8 ranks; at most about 1.5 s.
    """
    found = plan.choices(num_bytes, kind, wire)
    candidates = [choice for choice in found if choice.predicted_s <= _CANDIDATE_RATIO * found[0].predicted_s][
        :_MAX_CANDIDATES
    ]
    if len(candidates) < 2 or len(plan.nodes) > MAX_SIMULATED_RANKS:
        return {}
    estimates: dict[str, float] = {}
    for choice in candidates:
        schedule = plan.generate(choice.schedule, kind, wire=wire)
        seconds = _estimate_candidate(
            schedule, plan.nodes, cluster, num_bytes, choice, rates, machine or HostModel.assumed()
        )
        if seconds is None:
            return {}  # simulated times must not be compared with formulas
        estimates[choice.schedule] = seconds
    return estimates


def _estimate_candidate(
    schedule: Schedule,
    nodes: Sequence[str],
    cluster: Cluster,
    num_bytes: int,
    choice: ScheduleChoice,
    rates: Mapping[str, float] | None,
    machine: HostModel,
) -> float | None:
    """Return None if even a few segments are too much."""
    count, is_owned = choice.num_segments, schedule.collective.owners is not None
    num_messages = sum(int(each.num_chunks.sum()) if is_owned else len(each) for each in schedule.rounds) or 1
    few = min(count, max(2, _TARGET_MESSAGES // num_messages))
    runs = [few] if few == count else [few, few // 2]
    copies = 2 if schedule.collective.kind == "allreduce" else 1
    moved_bytes = copies * (len(nodes) - 1) * num_bytes / count * sum(runs)
    burst_bytes = min(_MAX_BURST_BYTES, max(machine.burst_bytes, moved_bytes / _TARGET_BURSTS))
    if num_messages * sum(runs) > _MAX_MESSAGES or moved_bytes / burst_bytes > _MAX_BURSTS:
        return None
    coarse = dataclasses.replace(machine, burst_bytes=burst_bytes)
    seconds = [
        sim.simulate(
            schedule,
            cluster,
            nodes,
            max(4, math.ceil(num_bytes * segments / count)),
            pipelining=dataclasses.replace(choice.pipelining, num_segments=segments),
            rates=rates,
            machine=coarse,
        ).seconds
        for segments in runs
    ]
    if len(runs) == 1:
        return seconds[0]
    return seconds[0] + (seconds[0] - seconds[1]) / (runs[0] - runs[1]) * (count - few)
