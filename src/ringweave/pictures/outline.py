"""A cluster as rows of a picture: its tree of switches, with what is alike or too much put together."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringweave import units
from ringweave.topology import CORE, Cluster, Node, Switch, link_name

MAX_ROWS = 40
"""Rows up to which every node has its own."""
_LEAST_ROWS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A switch, a node, or several of them that share a row."""

    label: str
    """Name and, for nodes, what is on them."""
    rate_bytes_per_s: float | None
    """Of the link upwards, per direction; None for the root, and where several differ."""
    rate: str
    """The same in words; a range where several differ."""
    num_nodes: int
    """Nodes in it."""
    is_switch: bool
    is_binding: bool = False
    """The link upwards, or that of one of several, is among those that set the bound."""
    is_leader: bool = False
    """A leader of the matrix is on the node, or on each of several."""
    children: tuple["Item", ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the picture that it takes."""
        return sum(child.num_rows for child in self.children) if self.children else 1


def outline(
    cluster: Cluster,
    binding: Sequence[str],
    notes: Mapping[str, str],
    max_rows: int = MAX_ROWS,
    rates: Mapping[str, float] | None = None,
) -> Item:
    """The root with everything below it, in at most about `max_rows` rows.

    Where there are more nodes, those of a switch that are alike share a row; where that is not enough, a switch keeps
    the children whose links bind or are slow, and the others share a row.

    Args:
        cluster: The machines.
        binding: Names of the links that set the bound.
        notes: For each node with leaders what is said about them.
        max_rows: Rows of the picture.
        rates: Measured bytes per second by directed link name, in place of the cluster's.
    """
    is_grouped = cluster.num_nodes > max_rows
    return _limited(_Outliner(cluster, binding, notes, rates or {}, is_grouped=is_grouped).item(None), max_rows)


def show_rates(rates: Sequence[float]) -> tuple[float | None, str]:
    """The rate that all have, and its words; None and the range where they differ."""
    low, high = min(rates), max(rates)
    if low == high:
        return low, units.show_rate(low)
    return None, f"{units.show_rate(low)} to {units.show_rate(high)}"


def show_rates_of_link(up: float, down: float) -> tuple[float, str]:
    """The smaller of the rates of both directions, and words for both."""
    if up == down:
        return up, units.show_rate(up)
    return min(up, down), f"{units.show_rate(up)} up, {units.show_rate(down)} down"


class _Outliner:
    def __init__(
        self,
        cluster: Cluster,
        binding: Sequence[str],
        notes: Mapping[str, str],
        rates: Mapping[str, float],
        *,
        is_grouped: bool,
    ) -> None:
        self._rates = rates
        self._binding = frozenset(binding)
        self._notes = notes
        self._is_grouped = is_grouped
        self._switches: dict[str, list[Switch]] = {}
        self._nodes: dict[str, list[Node]] = {}
        for switch in cluster.switches:
            self._switches.setdefault(switch.parent or CORE, []).append(switch)
        for node in cluster.nodes:
            self._nodes.setdefault(node.switch or CORE, []).append(node)

    def item(self, switch: Switch | None) -> Item:
        """A switch, or the root, with what is below it."""
        name = switch.name if switch else CORE
        children = [self.item(below) for below in self._switches.get(name, [])]
        children += [self._row(nodes, name) for nodes in self._runs(name)]
        rate, words = None, ""
        if switch is not None:
            rate, words = show_rates_of_link(*self._both(name, switch.parent or CORE, switch.uplink_bytes_per_s))
        return Item(
            label=name,
            rate_bytes_per_s=rate,
            rate=words,
            num_nodes=sum(child.num_nodes for child in children),
            is_switch=True,
            is_binding=switch is not None and self._binds(name, switch.parent or CORE),
            children=tuple(children),
        )

    def _runs(self, switch: str) -> list[list[Node]]:
        """Nodes that share a row."""
        nodes = self._nodes.get(switch, [])
        if not self._is_grouped:
            return [[node] for node in nodes]
        alike: dict[object, list[Node]] = {}
        for node in nodes:
            key = (
                self._both(node.name, switch, node.rate_bytes_per_s),
                node.num_devices,
                node.name in self._notes,
                self._binds(node.name, switch),
            )
            alike.setdefault(key, []).append(node)
        return list(alike.values())

    def _row(self, nodes: Sequence[Node], switch: str) -> Item:
        first = nodes[0]
        pairs = {self._both(node.name, switch, node.rate_bytes_per_s) for node in nodes}
        rate, words = show_rates_of_link(*pairs.pop()) if len(pairs) == 1 else show_rates(list(map(min, pairs)))
        name = first.name if len(nodes) == 1 else f"{first.name} .. {nodes[-1].name} ({len(nodes)} nodes)"
        parts = [name, f"{first.num_devices} device{'s' if first.num_devices > 1 else ''}"]
        is_leader = all(node.name in self._notes for node in nodes)
        if is_leader:
            parts.append(self._notes[first.name] if len(nodes) == 1 else "leaders")
        return Item(
            label=", ".join(parts),
            rate_bytes_per_s=rate,
            rate=words,
            num_nodes=len(nodes),
            is_switch=False,
            is_binding=any(self._binds(node.name, switch) for node in nodes),
            is_leader=is_leader,
        )

    def _both(self, name: str, parent: str, built_bytes_per_s: float) -> tuple[float, float]:
        """Rates upwards and downwards."""
        up, down = (self._rates.get(link_name(*ends), built_bytes_per_s) for ends in ((name, parent), (parent, name)))
        return up, down

    def _binds(self, name: str, parent: str) -> bool:
        return link_name(name, parent) in self._binding or link_name(parent, name) in self._binding


def _limited(item: Item, max_rows: int) -> Item:
    """The same in fewer rows."""
    if item.num_rows <= max_rows:
        return item
    kept, rest = item.children, ()
    if len(kept) >= max_rows:
        kept, rest = _chosen(kept, max_rows - 1)
    budget = max(_LEAST_ROWS, (max_rows - bool(rest)) // max(1, len(kept)))
    shown = [_limited(child, budget) for child in kept]
    return dataclasses.replace(item, children=(*shown, *([_together(rest)] if rest else [])))


def _chosen(children: Sequence[Item], count: int) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Those that say most (binding, then slow), in their order, and the others."""

    def urgency(at: int) -> tuple[bool, float, int]:
        return not children[at].is_binding, children[at].rate_bytes_per_s or 0.0, at

    chosen = set(sorted(range(len(children)), key=urgency)[: max(1, count)])

    def pick(is_wanted: Callable[[int], bool]) -> tuple[Item, ...]:
        return tuple(child for at, child in enumerate(children) if is_wanted(at))

    return pick(lambda at: at in chosen), pick(lambda at: at not in chosen)


def _together(items: Sequence[Item]) -> Item:
    rates = [item.rate_bytes_per_s for item in items if item.rate_bytes_per_s is not None]
    rate, words = show_rates(rates) if rates else (None, "")
    num_switches, num_nodes = sum(item.is_switch for item in items), sum(item.num_nodes for item in items)
    switches = f"{num_switches} more switches with " if num_switches else ""
    return Item(
        label=f"{switches}{num_nodes}{'' if num_switches else ' more'} nodes",
        rate_bytes_per_s=rate,
        rate=words,
        num_nodes=num_nodes,
        is_switch=False,
        is_binding=any(item.is_binding for item in items),
        is_leader=all(item.is_leader for item in items),
    )
