"""What `plan` says of leaders: who leads, why, and where in the matrix."""

from collections.abc import Callable, Iterable, Sequence

from ringweave.planning import Plan
from ringweave.topology import Cluster, leaders

MAX_NAMED = 16
_MAX_LINES = 8


def reasons(cluster: Cluster, plan: Plan) -> list[str]:
    """Why each leader of the plan leads, in the order of `plan.leaders`; of a plan with all devices of the cluster."""
    places: dict[str, list[int]] = {}
    for rank, name in enumerate(plan.nodes):
        places.setdefault(name, []).append(rank)
    taken: dict[str, set[str]] = {}
    words = []
    for rank in plan.leaders:
        node = cluster.node(plan.nodes[rank])
        index = places[node.name].index(rank)
        used = taken.setdefault(node.name, set())
        free = [nic for nic in leaders.preferred(node.nics) if nic.name not in used]
        led = len([leader for leader in plan.leaders if plan.nodes[leader] == node.name])
        nic = free[0] if led == 1 else min(free, key=lambda each: leaders.remoteness(node, each, index))
        used.add(nic.name)
        words.append(leaders.reason(node, nic, index))
    return words


def lines(cluster: Cluster, plan: Plan, who: Callable[[int], str]) -> list[str]:
    """Leaders with reasons, then rows and columns of their matrix; `who` names a rank."""
    by_reason: dict[str, list[int]] = {}
    for rank, words in zip(plan.leaders, reasons(cluster, plan), strict=True):
        by_reason.setdefault(words, []).append(rank)
    told = [f"  {listed(map(who, ranks))}: {words}" for words, ranks in by_reason.items()]
    columns = list(zip(*plan.matrix, strict=True))
    return [
        f"leaders  {len(plan.leaders)}, one for each {'node' if _is_per_node(plan) else 'NIC'}",
        *_few(told, "reasons"),
        f"matrix   {len(plan.matrix)} x {plan.num_columns}",
        *_few([f"  row {index}:  {listed(map(who, row))}" for index, row in enumerate(plan.matrix)], "rows"),
        *_few([f"  column {index}:  {listed(map(who, column))}" for index, column in enumerate(columns)], "columns"),
    ]


def listed(names: Iterable[str]) -> str:
    """With commas between, the first ones of many."""
    names = list(names)
    more = f" ... and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _is_per_node(plan: Plan) -> bool:
    return len({plan.nodes[rank] for rank in plan.leaders}) == len(plan.leaders)


def _few(each: Sequence[str], what: str) -> list[str]:
    more = [f"  ... and {len(each) - _MAX_LINES} more {what}"] if len(each) > _MAX_LINES else []
    return [*each[:_MAX_LINES], *more]
