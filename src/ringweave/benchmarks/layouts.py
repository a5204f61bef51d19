"""Which rank is on which node: the same for all systems of a comparison. Pure."""

import difflib
import random

from ringweave.errors import UsageError, explain
from ringweave.topology import Cluster

ORDERS = ("block", "round-robin", "shuffled")
"""block: ranks count through the nodes; round-robin: they take turns; shuffled: by chance, the same every time."""
_SEED = 1


def node_of_rank(cluster: Cluster, order: str) -> tuple[str, ...]:
    """Name of the node of each rank, one rank per device."""
    block = [node.name for node in cluster.nodes for _ in node.devices]
    if order == "round-robin":
        most = max(node.num_devices for node in cluster.nodes)
        block = [node.name for turn in range(most) for node in cluster.nodes if turn < node.num_devices]
    if order == "shuffled":
        random.Random(_SEED).shuffle(block)
    return tuple(block)


def distinct(cluster: Cluster, orders: tuple[str, ...]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Layouts by the orders asked for, and a note for each that is the same as an earlier one and is left out."""
    layouts: dict[str, tuple[str, ...]] = {}
    notes = []
    for order in orders:
        layout = node_of_rank(cluster, order)
        same = next((other for other, known in layouts.items() if known == layout), None)
        if same is None:
            layouts[order] = layout
        else:
            notes.append(f"order {order} is left out: on this cluster it is the same as {same}")
    return layouts, notes


def check_order(name: str) -> str:
    """`name` itself if there is such an order.

    Raises:
        UsageError: There is none.
    """
    if name in ORDERS:
        return name
    close = difflib.get_close_matches(name, ORDERS, n=1)
    do = f"Did you mean {close[0]}?" if close else "Name one of them"
    raise UsageError(explain("--orders", got=name, expected=f"{', '.join(ORDERS)}, separated by commas", do=do))
