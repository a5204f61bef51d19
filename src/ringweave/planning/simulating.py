"""A second opinion on the candidates that are predicted to be fastest: streams that share links, on virtual time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

from ringweave import sim
from ringweave.planning.choices import Choice
from ringweave.planning.plans import Plan
from ringweave.schedules.programs import Pipelining
from ringweave.sim import Machine
from ringweave.topology import Cluster

MOST_RANKS = 64
"""Of a group whose candidates are simulated while it waits."""
_NUM_DOUBTFUL, _DOUBTFUL = 6, 2.0
"""So many candidates, predicted to take at most so many times the least: the formula is off by up to 31 % one time in
twenty either way (docs/simulation.md)."""
_MESSAGES, _MOST_MESSAGES = 500, 1500
"""Of each candidate, where its segments allow it, and at most; a message takes about 100 us of processor time."""
_BURSTS, _MOST_BURSTS = 4000, 8000
"""Likewise; bursts become larger before there are more."""
_LARGEST_BURST_BYTES = 32 * 2**10


def simulate_best(
    plan: Plan,
    cluster: Cluster,
    num_bytes: int,
    *,
    count: int,
    rates: Mapping[str, float] | None = None,
    machine: Machine | None = None,
    tell: Callable[[str, int, int], None] = lambda schedule, done, total: None,
) -> dict[str, float]:
    """Simulated seconds of the schedules predicted to be fastest, by name, in the order of prediction.

    Args:
        plan: The plan of the group, made for this cluster.
        cluster: Where it runs.
        num_bytes: Size of the message.
        count: How many schedules.
        rates: Measured bytes per second by directed link name, those that the plan was made with.
        machine: What processors, memory and kernels add; None is nothing, the network alone.
        tell: Gets the name of a schedule, and how much of how much of it is simulated, now and then.

    Raises:
        UsageError: A candidate has more messages than can be followed one by one.

    Cost:
        About 75 us for each message of each segment: 0.5 s each for 25 MB among 8 ranks.
    """
    return {
        choice.schedule: sim.simulate(
            plan.generate(choice.schedule),
            cluster,
            plan.nodes,
            num_bytes,
            pipelining=choice.pipelining,
            rates=rates,
            machine=machine,
            tell=functools.partial(tell, choice.schedule),
        ).seconds
        for choice in plan.choices(num_bytes)[:count]
    }


def estimate(
    plan: Plan,
    cluster: Cluster,
    num_bytes: int,
    *,
    rates: Mapping[str, float] | None = None,
    machine: Machine | None = None,
) -> dict[str, float]:
    """Seconds of the candidates that may be the fastest, by name, from simulations of their first segments.

    A message in many segments is simulated for a few of them, and for half as many; what the others add follows. So the
    cost does not depend on the size of the message. On the nine clusters of docs/simulation.md at 1, 5 and 25 MB the
    best three by this held one within 4 % of the fastest that was measured, those by formula one within 46 %.

    Args:
        plan: The plan of the group, made for this cluster.
        cluster: Where it runs.
        num_bytes: Size of the message.
        rates: Measured bytes per second by directed link name, those that the plan was made with.
        machine: What processors, memory and kernels add; None is `Machine.assumed()`.

    Returns:
        Nothing if the group is too large for it, or has at most one candidate in question.

    Cost:
        0.1 to 0.8 s of processor time for 3 to 8 ranks; at most about 1.5 s.
    """
    found = plan.choices(num_bytes)
    doubtful = [choice for choice in found if choice.predicted_s <= _DOUBTFUL * found[0].predicted_s][:_NUM_DOUBTFUL]
    if len(doubtful) < 2 or len(plan.nodes) > MOST_RANKS:
        return {}
    estimates: dict[str, float] = {}
    for choice in doubtful:
        seconds = _estimate_one(plan, cluster, num_bytes, choice, rates, machine or Machine.assumed())
        if seconds is None:
            return {}  # a part of them would be compared with formulas
        estimates[choice.schedule] = seconds
    return estimates


def _estimate_one(
    plan: Plan,
    cluster: Cluster,
    num_bytes: int,
    choice: Choice,
    rates: Mapping[str, float] | None,
    machine: Machine,
) -> float | None:
    """None if even a few segments are too much."""
    schedule, count = plan.generate(choice.schedule), choice.num_segments
    num_messages = max(1, sum(len(round_) for round_ in schedule.rounds))
    few = min(count, max(2, _MESSAGES // num_messages))
    runs = [few] if few == count else [few, few // 2]
    moved_bytes = 2 * (len(plan.nodes) - 1) * num_bytes / count * sum(runs)
    burst_bytes = min(_LARGEST_BURST_BYTES, max(machine.burst_bytes, moved_bytes / _BURSTS))
    if num_messages * sum(runs) > _MOST_MESSAGES or moved_bytes / burst_bytes > _MOST_BURSTS:
        return None
    coarse = dataclasses.replace(machine, burst_bytes=burst_bytes)
    seconds = [
        sim.simulate(
            schedule,
            cluster,
            plan.nodes,
            max(4, math.ceil(num_bytes * segments / count)),
            pipelining=Pipelining(num_segments=segments, lag=choice.lag, window=choice.window),
            rates=rates,
            machine=coarse,
        ).seconds
        for segments in runs
    ]
    if len(runs) == 1:
        return seconds[0]
    return seconds[0] + (seconds[0] - seconds[1]) / (runs[0] - runs[1]) * (count - few)
