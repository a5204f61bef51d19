"""A cluster with its plan: machines and racks as a tree with the rates of links, the leaders as a matrix beside it."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringweave import cost, units
from ringweave.pictures import plotting
from ringweave.pictures.outline import Item, outline
from ringweave.planning import Plan
from ringweave.topology import CORE, Cluster

_TINTS = ("#dbe7f3", "#f6e3cf", "#dfeedd", "#eadff0", "#f6dede", "#e4e4e4", "#d8eeee", "#f3efcf")
_BINDING, _PLAIN, _LEADER = "#c1272d", "#5b6770", "#30638e"
_ROW_INCHES, _LEVEL_INCHES, _LABEL_INCHES, _CELL_INCHES = 0.34, 1.9, 3.6, 0.85
_TRUNK = 0.3
"""Of the way from a switch to the next level: where the links to its children part."""
_MOST_ROWS, _MOST_COLUMNS, _MOST_LETTERS = 12, 10, 11


def draw_plan(
    cluster: Cluster,
    plan: Plan,
    num_bytes: int,
    path: Path,
    rates: Mapping[str, float] | None = None,
    simulated: Mapping[str, float] | None = None,
) -> None:
    """Write the picture of a cluster and of what is planned for a message of that size. Times are not measured.

    Args:
        cluster: The machines.
        plan: Made for them.
        num_bytes: Size of the message.
        path: A PNG or SVG.
        rates: Measured bytes per second by directed link name, those that the plan was made with.
        simulated: Seconds by name of schedule, which decide what is chosen; nothing if the plan does.
    """
    bound = cost.bound(cluster, num_bytes, nodes=plan.nodes, rates=rates)
    root = outline(cluster, bound.links, _notes(cluster, plan), rates=rates)
    depth, tints = _depth(root), _tints(cluster)
    cells = _cells(cluster, plan)
    tree_width, grid_width = depth * _LEVEL_INCHES + _LABEL_INCHES, (len(cells[0]) + 1.2) * _CELL_INCHES
    height = max(root.num_rows * _ROW_INCHES, (len(cells) + 1) * _ROW_INCHES * 1.6) + 1.8
    figure, (tree, grid) = plotting.new_figure(
        tree_width + grid_width, height, ncols=2, width_ratios=[tree_width, grid_width]
    )
    _draw_tree(tree, root, depth, tints)
    _draw_matrix(grid, cells, plan)
    title = (
        f"{cluster.name}: {units.format_bytes(num_bytes)} among {len(plan.nodes)} ranks, at least "
        f"{_time(bound.seconds)}; {_winner(plan, num_bytes, simulated)}"
    )
    width = int((tree_width + grid_width) * 13)
    words = textwrap.fill(f"The bound (red): {bound.binding}", width)
    figure.suptitle(f"{textwrap.fill(title, width)}\n{words}", fontsize=10, x=0.01, ha="left")
    plotting.save(figure, path)


def _winner(plan: Plan, num_bytes: int, simulated: Mapping[str, float] | None) -> str:
    if not simulated:
        chosen = plan.choose(num_bytes)
        return f"{chosen.schedule} predicted {_time(chosen.predicted_s)}"
    name = plan.fastest(simulated)
    return f"{name} simulated {_time(simulated[name])}"


def _notes(cluster: Cluster, plan: Plan) -> dict[str, str]:
    """For each node with leaders where they stand in the matrix."""
    places: dict[str, list[str]] = {}
    for row, ranks in enumerate(plan.matrix):
        for column, rank in enumerate(ranks):
            name = plan.nodes[rank]
            who = f"rank {rank} " if cluster.node(name).num_devices > 1 else ""
            places.setdefault(name, []).append(f"{who}leads in row {row}, column {column}")
    return {name: "; ".join(words) for name, words in places.items()}


def _tints(cluster: Cluster) -> dict[str, str]:
    """A light colour for each switch that has nodes."""
    names = dict.fromkeys(node.switch or CORE for node in cluster.nodes)
    return {name: _TINTS[index % len(_TINTS)] for index, name in enumerate(names)}


def _depth(item: Item) -> int:
    return 1 + max(map(_depth, item.children)) if item.children else 0


def _draw_tree(axis: Any, root: Item, depth: int, tints: Mapping[str, str]) -> None:
    axis.set_xlim(-0.35, depth + _LABEL_INCHES / _LEVEL_INCHES)
    axis.set_ylim(root.num_rows - 0.4, -0.9)
    axis.axis("off")
    rates = [each for each in _rates(root) if each]
    _draw_item(axis, root, (0, 0), depth, (min(rates), max(rates)), tints)


def _rates(item: Item) -> list[float | None]:
    return [item.rate_bytes_per_s, *(rate for child in item.children for rate in _rates(child))]


def _draw_item(
    axis: Any, item: Item, place: tuple[int, int], depth: int, range_: tuple[float, float], tints: Mapping[str, str]
) -> float:
    """Draw an item and what is below it, from a level and row on; where it is, from top."""
    level, row = place
    if not item.children:
        return _draw_leaf(axis, item, row, depth)
    if item.label in tints:
        _draw_band(axis, item, row, level, depth, tints[item.label])
    heights, at = [], row
    for child in item.children:
        heights.append(_draw_item(axis, child, (level + 1, at), depth, range_, tints))
        at += child.num_rows
    middle = sum(heights) / len(heights)
    for child, height in zip(item.children, heights, strict=True):
        until = level + 1 if child.children else depth
        _draw_link(axis, child, level + _TRUNK, (until, height), range_)
    trunk = level + _TRUNK
    axis.plot([level, trunk], [middle, middle], color=_PLAIN, linewidth=1.2, zorder=2)
    axis.plot([trunk, trunk], [min(heights), max(heights)], color=_PLAIN, linewidth=1.2, zorder=2)
    axis.text(
        level, middle, item.label, ha="center", va="center", fontsize=9, weight="bold", zorder=4,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "black"},
    )  # fmt: skip
    return middle


def _draw_leaf(axis: Any, item: Item, row: int, depth: int) -> float:
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": _LEADER if item.is_leader else "#aaaaaa"}
    axis.text(depth, row, item.label, ha="left", va="center", fontsize=8, zorder=4, bbox=box)
    return row


def _draw_band(axis: Any, item: Item, row: int, level: int, depth: int, tint: str) -> None:
    """What hangs on a switch, as a patch behind it."""
    from matplotlib.patches import Rectangle

    left, right = level - 0.25, depth + _LABEL_INCHES / _LEVEL_INCHES
    size = right - left, item.num_rows - 0.1
    axis.add_patch(Rectangle((left, row - 0.45), *size, facecolor=tint, edgecolor="none", zorder=level))


def _draw_link(axis: Any, child: Item, trunk: float, below: tuple[float, float], range_: tuple[float, float]) -> None:
    """Across from the trunk to the child, with its rate; slower links are thinner, binding ones red."""
    colour = _BINDING if child.is_binding else _PLAIN
    end, height = below
    slowest, fastest = range_
    width = 1.2
    if child.rate_bytes_per_s and fastest > slowest:
        width += 2.6 * math.log(child.rate_bytes_per_s / slowest) / math.log(fastest / slowest)
    axis.plot([trunk, end], [height, height], color=colour, linewidth=width, zorder=3)
    is_slowest = child.rate_bytes_per_s == slowest < fastest
    text = f"{child.rate}{' (slowest)' if is_slowest else ''}"
    axis.text(trunk + 0.05, height - 0.05, text, ha="left", va="bottom", fontsize=7, color=colour, zorder=5)


def _cells(cluster: Cluster, plan: Plan) -> list[list[tuple[str, str]]]:
    """Name and colour of the leaders of the matrix, its middle left out where it is large."""
    tints = _tints(cluster)
    rows = _ends(plan.matrix, _MOST_ROWS)
    cells = []
    for row in rows:
        if row is None:
            cells.append([("...", "white")] * (1 + min(plan.num_columns, _MOST_COLUMNS)))
            continue
        index, ranks = row
        cells.append([(f"row {index}", "white")])
        for found in _ends(ranks, _MOST_COLUMNS):
            cells[-1].append(_cell(cluster, plan, found[1], tints) if found else ("...", "white"))
    return cells


def _cell(cluster: Cluster, plan: Plan, rank: int, tints: Mapping[str, str]) -> tuple[str, str]:
    node = cluster.node(plan.nodes[rank])
    name = node.name if len(node.name) <= _MOST_LETTERS else f"{node.name[: _MOST_LETTERS - 4]}..{node.name[-2:]}"
    return (name if node.num_devices == 1 else f"{name}/{rank}"), tints[node.switch or CORE]


def _ends(items: Sequence[Any], most: int) -> list[tuple[int, Any] | None]:
    """All with their indices, or the first ones, None, and the last one."""
    numbered: list[tuple[int, Any] | None] = list(enumerate(items))
    return numbered if len(items) <= most else [*numbered[: most - 2], None, numbered[-1]]


def _draw_matrix(axis: Any, cells: Sequence[Sequence[tuple[str, str]]], plan: Plan) -> None:
    from matplotlib.patches import Rectangle

    num_columns = max(map(len, cells)) - 1
    axis.set_xlim(-1.2, num_columns)
    axis.set_ylim(max(len(cells) + 0.5, axis.get_figure().get_figheight() / (_ROW_INCHES * 1.6) - 3), -1.4)
    axis.axis("off")
    axis.set_title(f"leader matrix: {len(plan.matrix)} rows x {plan.num_columns} columns", fontsize=9)
    for at, column in enumerate(_ends(range(plan.num_columns), _MOST_COLUMNS)):
        label = f"col {column[0]}" if column else "..."
        axis.text(at + 0.5, -0.2, label, ha="center", va="bottom", fontsize=7)
    for row, (head, *ranks) in enumerate(cells):
        axis.text(-0.1, row + 0.5, head[0], ha="right", va="center", fontsize=7)
        for column, (name, tint) in enumerate(ranks):
            edge = "white" if name == "..." else _LEADER
            axis.add_patch(Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, facecolor=tint, edgecolor=edge))
            axis.text(column + 0.5, row + 0.5, name, ha="center", va="center", fontsize=7)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
