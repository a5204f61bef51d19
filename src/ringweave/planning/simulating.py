"""A second opinion on the candidates that are predicted to be fastest: streams that share links, on virtual time."""

import functools
from collections.abc import Callable, Mapping

from ringweave import sim
from ringweave.planning.plans import Plan
from ringweave.sim import Machine
from ringweave.topology import Cluster


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
