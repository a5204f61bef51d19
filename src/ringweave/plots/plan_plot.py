"""Drawing of a cluster and its plan: switches and nodes as a tree with link rates, the leader matrix beside it."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave import cost, units
from ringweave.planning import Plan
from ringweave.plots import figures
from ringweave.schedules import CollectiveKind
from ringweave.topology import CORE, Cluster, Node, Switch, link_name

MAX_ROWS = 40
"""Largest number of rows; with more nodes, several share a row."""
_MIN_ROWS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlineItem:
    """A switch, a node, or several of them that share a row."""

    label: str
    """Name and, for nodes, their devices and leaders."""
    rate_bytes_per_s: float | None
    """Rate of the uplink, per direction; None for the root, and if several differ."""
    rate_text: str
    """The rate as text; a range if several differ."""
    num_nodes: int
    is_switch: bool
    is_binding: bool = False
    """True if the uplink, or that of one of several, is among the links that set the bound."""
    is_measured: bool = False
    """True if a rate of the uplink, or of that of one of several, was measured."""
    is_leader: bool = False
    """True if a leader of the matrix is on the node, or on each of several."""
    children: tuple["OutlineItem", ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the plot that it takes."""
        return sum(child.num_rows for child in self.children) if self.children else 1


def outline_cluster(
    cluster: Cluster,
    binding: Sequence[str],
    notes: Mapping[str, str],
    rates: Mapping[str, float] | None = None,
) -> OutlineItem:
    """Outline the root with everything below it, in at most about `MAX_ROWS` rows.

    With more nodes, equal nodes of a switch share a row. If that is not enough, a switch keeps the children whose links
    bind or are slow, and the others share a row.

    Args:
        cluster: The cluster.
        binding: Names of the links that set the bound.
        notes: Node with leaders -> text about them.
        rates: Measured bytes per second by directed link name, in place of the cluster's.
    """
    is_grouped = cluster.num_nodes > MAX_ROWS
    return _limit_rows(
        _OutlineBuilder(cluster, binding, notes, rates or {}, is_grouped=is_grouped).build_item(None), MAX_ROWS
    )


def rates_text(rates: Sequence[float]) -> tuple[float | None, str]:
    """Return the common rate and its text; None and the range if the rates differ."""
    low, high = min(rates), max(rates)
    if low == high:
        return low, units.show_rate(low)
    return None, f"{units.show_rate(low)} to {units.show_rate(high)}"


def link_rates_text(up: float, down: float) -> tuple[float, str]:
    """Return the smaller of the rates of both directions, and a text for both."""
    if up == down:
        return up, units.show_rate(up)
    return min(up, down), f"{units.show_rate(up)} up, {units.show_rate(down)} down"


class _OutlineBuilder:
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

    def build_item(self, switch: Switch | None) -> OutlineItem:
        """Build the item of a switch, or of the root, with everything below it."""
        name = switch.name if switch else CORE
        children = [self.build_item(below) for below in self._switches.get(name, [])]
        children += [self._row_item(nodes, name) for nodes in self._row_groups(name)]
        rate, words = None, ""
        if switch is not None:
            rate, words = link_rates_text(*self._link_rates(name, switch.parent or CORE, switch.uplink_bytes_per_s))
        return OutlineItem(
            label=name,
            rate_bytes_per_s=rate,
            rate_text=words,
            num_nodes=sum(child.num_nodes for child in children),
            is_switch=True,
            is_binding=switch is not None and self._is_link_in(self._binding, name, switch.parent or CORE),
            is_measured=switch is not None and self._is_link_in(self._rates, name, switch.parent or CORE),
            children=tuple(children),
        )

    def _row_groups(self, switch: str) -> list[list[Node]]:
        nodes = self._nodes.get(switch, [])
        if not self._is_grouped:
            return [[node] for node in nodes]
        alike: dict[object, list[Node]] = {}
        for node in nodes:
            key = (
                self._link_rates(node.name, switch, node.rate_bytes_per_s),
                node.num_devices,
                node.name in self._notes,
                self._is_link_in(self._binding, node.name, switch),
            )
            alike.setdefault(key, []).append(node)
        return list(alike.values())

    def _row_item(self, nodes: Sequence[Node], switch: str) -> OutlineItem:
        first = nodes[0]
        pairs = {self._link_rates(node.name, switch, node.rate_bytes_per_s) for node in nodes}
        rate, words = link_rates_text(*pairs.pop()) if len(pairs) == 1 else rates_text(list(map(min, pairs)))
        name = first.name if len(nodes) == 1 else f"{first.name} .. {nodes[-1].name} ({len(nodes)} nodes)"
        parts = [name, f"{first.num_devices} device{'s' if first.num_devices > 1 else ''}"]
        is_leader = all(node.name in self._notes for node in nodes)
        if is_leader:
            parts.append(self._notes[first.name] if len(nodes) == 1 else "leaders")
        return OutlineItem(
            label=", ".join(parts),
            rate_bytes_per_s=rate,
            rate_text=words,
            num_nodes=len(nodes),
            is_switch=False,
            is_binding=any(self._is_link_in(self._binding, node.name, switch) for node in nodes),
            is_measured=any(self._is_link_in(self._rates, node.name, switch) for node in nodes),
            is_leader=is_leader,
        )

    def _link_rates(self, name: str, parent: str, file_bytes_per_s: float) -> tuple[float, float]:
        """Return the rates upwards and downwards."""
        up, down = (self._rates.get(link_name(*ends), file_bytes_per_s) for ends in ((name, parent), (parent, name)))
        return up, down

    @staticmethod
    def _is_link_in(links: Container[str], name: str, parent: str) -> bool:
        return link_name(name, parent) in links or link_name(parent, name) in links


def _limit_rows(item: OutlineItem, max_rows: int) -> OutlineItem:
    """Reduce an item to fewer rows."""
    if item.num_rows <= max_rows:
        return item
    kept, rest = item.children, ()
    if len(kept) >= max_rows:
        kept, rest = _choose_children(kept, max_rows - 1)
    budget = max(_MIN_ROWS, (max_rows - bool(rest)) // max(1, len(kept)))
    shown = [_limit_rows(child, budget) for child in kept]
    return dataclasses.replace(item, children=(*shown, *([_merge_items(rest)] if rest else [])))


def _choose_children(
    children: Sequence[OutlineItem], count: int
) -> tuple[tuple[OutlineItem, ...], tuple[OutlineItem, ...]]:
    """Choose the most important children (binding, then slow), in their order; return them and the others."""

    def urgency(at: int) -> tuple[bool, float, int]:
        return not children[at].is_binding, children[at].rate_bytes_per_s or 0.0, at

    chosen = set(sorted(range(len(children)), key=urgency)[: max(1, count)])

    def pick(is_wanted: Callable[[int], bool]) -> tuple[OutlineItem, ...]:
        return tuple(child for at, child in enumerate(children) if is_wanted(at))

    return pick(lambda at: at in chosen), pick(lambda at: at not in chosen)


def _merge_items(items: Sequence[OutlineItem]) -> OutlineItem:
    rates = [item.rate_bytes_per_s for item in items if item.rate_bytes_per_s is not None]
    rate, words = rates_text(rates) if rates else (None, "")
    num_switches, num_nodes = sum(item.is_switch for item in items), sum(item.num_nodes for item in items)
    switches = f"{num_switches} more switches with " if num_switches else ""
    return OutlineItem(
        label=f"{switches}{num_nodes}{'' if num_switches else ' more'} nodes",
        rate_bytes_per_s=rate,
        rate_text=words,
        num_nodes=num_nodes,
        is_switch=False,
        is_binding=any(item.is_binding for item in items),
        is_measured=any(item.is_measured for item in items),
        is_leader=all(item.is_leader for item in items),
    )


_ROW_INCHES, _LEAST_LEVEL_INCHES, _LABEL_INCHES, _CELL_INCHES = 0.34, 1.9, 3.6, 0.85
_RATE_INCHES, _BOX_INCHES = 0.058, 0.4
"""Width of a character of a rate, and of half a switch with its margins."""
_TRUNK_FRACTION = 0.3
"""Position of the trunk, from which the links to the children branch: a fraction of the way to the next level."""
_MAX_MATRIX_ROWS, _MAX_MATRIX_COLUMNS, _MAX_NAME_LETTERS = 12, 10, 11


def draw_plan(
    cluster: Cluster,
    plan: Plan,
    num_bytes: int,
    path: Path,
    rates: Mapping[str, float] | None = None,
    simulated: Mapping[str, float] | None = None,
    kind: CollectiveKind = "allreduce",
) -> None:
    """Draw a cluster and its plan for a message of that size. Times are not measured.

    Only an allreduce has a matrix of leaders.

    Args:
        cluster: The cluster.
        plan: Its plan.
        num_bytes: Size of the message.
        path: A PNG or SVG.
        rates: Measured bytes per second by directed link name, with which the plan was made.
        simulated: Schedule name -> seconds, which decide the choice of schedule; None: the plan decides.
        kind: The collective; a broadcast starts at rank 0.
    """
    bound = cost.bound(cluster, num_bytes, nodes=plan.nodes, rates=rates, kind=kind)
    has_matrix = kind == "allreduce"
    root = outline_cluster(cluster, bound.links, _leader_notes(cluster, plan) if has_matrix else {}, rates=rates)
    depth, tints = _depth(root), _tints_by_switch(cluster)
    cells = _matrix_cells(cluster, plan) if has_matrix else []
    level_inches = max(_LEAST_LEVEL_INCHES, _needed_inches(root))
    widths = [depth * level_inches + _LABEL_INCHES, *((len(row) + 1.2) * _CELL_INCHES for row in cells[:1])]
    height = max(root.num_rows * _ROW_INCHES, (len(cells) + 1) * _ROW_INCHES * 1.6) + 1.8
    figure, axes = figures.new_figure(sum(widths), height, ncols=len(widths), width_ratios=widths, squeeze=False)
    axes[0][0].set_xlim(-0.35, depth + _LABEL_INCHES / level_inches)
    _draw_tree(axes[0][0], root, depth, tints)
    if has_matrix:
        _draw_matrix(axes[0][1], cells, plan)
    what = f"{'' if has_matrix else f'{kind} of '}{units.format_bytes(num_bytes)} among {len(plan.nodes)} ranks"
    choice = _choice_text(plan, num_bytes, simulated, kind)
    title = f"{cluster.name}: {what}, at least {_time_text(bound.seconds)}; {choice}"
    width = int(sum(widths) * 13)
    words = textwrap.fill(f"The bound (red): {bound.binding}", width)
    figure.suptitle(f"{textwrap.fill(title, width)}\n{words}", fontsize=10, x=0.01, ha="left")
    figures.save_figure(figure, path)


def _choice_text(plan: Plan, num_bytes: int, simulated: Mapping[str, float] | None, kind: CollectiveKind) -> str:
    if not simulated:
        chosen = plan.choose(num_bytes, kind=kind)
        return f"{chosen.schedule} predicted {_time_text(chosen.predicted_s)}"
    name = plan.fastest(simulated)
    return f"{name} simulated {_time_text(simulated[name])}"


def _leader_notes(cluster: Cluster, plan: Plan) -> dict[str, str]:
    """Return node with leaders -> text with their positions in the matrix."""
    places: dict[str, list[str]] = {}
    for row, ranks in enumerate(plan.matrix):
        for column, rank in enumerate(ranks):
            name = plan.nodes[rank]
            rank_text = f"rank {rank} " if cluster.node(name).num_devices > 1 else ""
            places.setdefault(name, []).append(f"{rank_text}leads in row {row}, column {column}")
    return {name: "; ".join(words) for name, words in places.items()}


def _tints_by_switch(cluster: Cluster) -> dict[str, str]:
    """Return a light colour for each switch that has nodes."""
    names = dict.fromkeys(node.switch or CORE for node in cluster.nodes)
    return {name: figures.TINTS[index % len(figures.TINTS)] for index, name in enumerate(names)}


def _depth(item: OutlineItem) -> int:
    return 1 + max(map(_depth, item.children)) if item.children else 0


def _draw_tree(axis: Any, root: OutlineItem, depth: int, tints: Mapping[str, str]) -> None:
    axis.set_ylim(root.num_rows - 0.4, -0.9)
    axis.axis("off")
    rates = [each for each in _item_rates(root) if each]
    _draw_item(axis, root, (0, 0), depth, (min(rates), max(rates)), tints)


def _item_rates(item: OutlineItem) -> list[float | None]:
    return [item.rate_bytes_per_s, *(rate for child in item.children for rate in _item_rates(child))]


def _needed_inches(item: OutlineItem) -> float:
    """Return the width of a level in which every rate, the slowest's remark included, has room before the next one."""
    longest = max((len(_link_text(child, is_slowest=True)) for child in item.children), default=0)
    own = (longest * _RATE_INCHES + _BOX_INCHES) / (1 - _TRUNK_FRACTION)
    return max([own, *map(_needed_inches, item.children)]) if item.children else 0.0


def _link_text(item: OutlineItem, *, is_slowest: bool) -> str:
    return f"{item.rate_text}{' (slowest)' if is_slowest else ''}"


def _draw_item(
    axis: Any,
    item: OutlineItem,
    place: tuple[int, int],
    depth: int,
    range_: tuple[float, float],
    tints: Mapping[str, str],
) -> float:
    """Draw an item and everything below it, from a level and row on; return its height from the top."""
    level, row = place
    if not item.children:
        return _draw_leaf(axis, item, row, depth)
    if item.label in tints:
        _draw_band(axis, item, row, level, tints[item.label])
    heights, at = [], row
    for child in item.children:
        heights.append(_draw_item(axis, child, (level + 1, at), depth, range_, tints))
        at += child.num_rows
    middle = sum(heights) / len(heights)
    for child, height in zip(item.children, heights, strict=True):
        until = level + 1 if child.children else depth
        _draw_link(axis, child, level + _TRUNK_FRACTION, (until, height), range_)
    trunk = level + _TRUNK_FRACTION
    axis.plot([level, trunk], [middle, middle], color=figures.GREY, linewidth=1.2, zorder=2)
    axis.plot([trunk, trunk], [min(heights), max(heights)], color=figures.GREY, linewidth=1.2, zorder=2)
    axis.text(
        level, middle, item.label, ha="center", va="center", fontsize=9, weight="bold", zorder=4,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "black"},
    )  # fmt: skip
    return middle


def _draw_leaf(axis: Any, item: OutlineItem, row: int, depth: int) -> float:
    box = {
        "boxstyle": "round,pad=0.25",
        "facecolor": "white",
        "edgecolor": figures.DARK if item.is_leader else figures.LIGHT,
    }
    axis.text(depth, row, item.label, ha="left", va="center", fontsize=8, zorder=4, bbox=box)
    return row


def _draw_band(axis: Any, item: OutlineItem, row: int, level: int, tint: str) -> None:
    """Draw the background of everything below a switch."""
    from matplotlib.patches import Rectangle

    left = level - 0.25
    size = axis.get_xlim()[1] - left, item.num_rows - 0.1
    axis.add_patch(Rectangle((left, row - 0.45), *size, facecolor=tint, edgecolor="none", zorder=level))


def _draw_link(
    axis: Any, child: OutlineItem, trunk: float, below: tuple[float, float], range_: tuple[float, float]
) -> None:
    """Draw the link from the trunk to the child, with its rate; slower links are thinner, binding ones red."""
    colour = figures.ALARM if child.is_binding else figures.GREY
    end, height = below
    slowest, fastest = range_
    width = 1.2
    if child.rate_bytes_per_s and fastest > slowest:
        width += 2.6 * math.log(child.rate_bytes_per_s / slowest) / math.log(fastest / slowest)
    axis.plot([trunk, end], [height, height], color=colour, linewidth=width, zorder=3)
    text = _link_text(child, is_slowest=child.rate_bytes_per_s == slowest < fastest)
    axis.text(trunk + 0.05, height - 0.05, text, ha="left", va="bottom", fontsize=7, color=colour, zorder=5)


def _matrix_cells(cluster: Cluster, plan: Plan) -> list[list[tuple[str, str]]]:
    """Return name and colour of the leaders of the matrix; the middle of a large one is left out."""
    tints = _tints_by_switch(cluster)
    rows = _elide_middle(plan.matrix, _MAX_MATRIX_ROWS)
    cells = []
    for row in rows:
        if row is None:
            cells.append([("...", "white")] * (1 + min(plan.num_columns, _MAX_MATRIX_COLUMNS)))
            continue
        index, ranks = row
        cells.append([(f"row {index}", "white")])
        for found in _elide_middle(ranks, _MAX_MATRIX_COLUMNS):
            cells[-1].append(_matrix_cell(cluster, plan, found[1], tints) if found else ("...", "white"))
    return cells


def _matrix_cell(cluster: Cluster, plan: Plan, rank: int, tints: Mapping[str, str]) -> tuple[str, str]:
    node = cluster.node(plan.nodes[rank])
    name = (
        node.name if len(node.name) <= _MAX_NAME_LETTERS else f"{node.name[: _MAX_NAME_LETTERS - 4]}..{node.name[-2:]}"
    )
    return (name if node.num_devices == 1 else f"{name}/{rank}"), tints[node.switch or CORE]


def _elide_middle(items: Sequence[Any], max_items: int) -> list[tuple[int, Any] | None]:
    """Return all items with their indices, or the first ones, None, and the last one."""
    numbered: list[tuple[int, Any] | None] = list(enumerate(items))
    return numbered if len(items) <= max_items else [*numbered[: max_items - 2], None, numbered[-1]]


def _draw_matrix(axis: Any, cells: Sequence[Sequence[tuple[str, str]]], plan: Plan) -> None:
    from matplotlib.patches import Rectangle

    num_columns = max(map(len, cells)) - 1
    axis.set_xlim(-1.2, num_columns)
    axis.set_ylim(max(len(cells) + 0.5, axis.get_figure().get_figheight() / (_ROW_INCHES * 1.6) - 3), -1.4)
    axis.axis("off")
    axis.set_title(f"leader matrix: {len(plan.matrix)} rows x {plan.num_columns} columns", fontsize=9)
    for at, column in enumerate(_elide_middle(range(plan.num_columns), _MAX_MATRIX_COLUMNS)):
        label = f"col {column[0]}" if column else "..."
        axis.text(at + 0.5, -0.2, label, ha="center", va="bottom", fontsize=7)
    for row, (head, *ranks) in enumerate(cells):
        axis.text(-0.1, row + 0.5, head[0], ha="right", va="center", fontsize=7)
        for column, (name, tint) in enumerate(ranks):
            edge = "white" if name == "..." else figures.DARK
            axis.add_patch(Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, facecolor=tint, edgecolor=edge))
            axis.text(column + 0.5, row + 0.5, name, ha="center", va="center", fontsize=7)


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
