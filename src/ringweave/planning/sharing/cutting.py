"""Fractions become whole numbers: which stretch of the message each domain's member leads, on a grid of a few units.

The parts of the message lie one after the other. In each, from the root down, a domain v knows, for each unit of the
grid, how far up it leads (its *reach*): to the root, to some domain between, or only itself. For each reach the units
are given out among its members in the ratio of the fractions, in the order of the message; what a member does not get
it leads only for itself. So all choices nest by construction.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringweave.planning.sharing.fractions import Fractions
from ringweave.planning.sharing.hierarchy import Hierarchy
from ringweave.planning.sharing.loading import Part, busiest

_GRIDS = (60, 120, 240, 360, 720, 1260, 2520, 5040, 10080, 27720, 55440, 110880, 360360, 720720, 1441440)
_TOLERANCE = 1.005

Stretch = tuple[int, int, int]
"""First unit, unit after the last, and what holds for them: a reach, or a member."""


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A part of the message, laid out."""

    tree: Hierarchy
    """Which it goes through."""
    num_units: int
    """Units of this part."""
    led_by: list[list[Stretch]]
    """For each domain, in the order of the part, the member that leads it; empty for a rank."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to lay the fractions out in a message."""

    stripes: tuple[LaidOut, ...]
    """In the order of the message."""
    busiest_s_per_byte: float
    """The largest tau with whole units."""

    @property
    def num_units(self) -> int:
        """Units of the message."""
        return sum(stripe.num_units for stripe in self.stripes)


def cut(wanted: Fractions) -> Cut:
    """The coarsest grid on which the busiest link is at most 0.5 % busier than with exact fractions.

    Where all members of every domain are alike the units are as many as the ranks, and none is busier.

    Cost:
        Linear in vertices and stretches, for each grid that is tried.
    """
    tree = wanted.parts[0].tree
    if wanted.is_symmetric:
        return Cut((LaidOut(tree, tree.num_leaves, [*_radix(tree)]),), wanted.busiest_s_per_byte)
    grids = [grid for grid in _GRIDS if grid >= tree.num_leaves] or [_GRIDS[-1]]
    for grid in grids:
        found = _on_grid(wanted.parts, grid)
        if found.busiest_s_per_byte <= wanted.busiest_s_per_byte * _TOLERANCE:
            break
    return found


def _on_grid(parts: Sequence[Part], grid: int) -> Cut:
    stripes, got = [], []
    for part, num_units in zip(parts, _apportioned(grid, [part.weight for part in parts]), strict=True):
        if num_units:
            led_by, led = _laid_out(part.tree, part.led, num_units)
            stripes.append(LaidOut(part.tree, num_units, led_by))
            got.append(Part(part.tree, num_units / grid, led))
    return Cut(tuple(stripes), busiest(got))


def _laid_out(
    tree: Hierarchy, led: Sequence[Sequence[float]], grid: int
) -> tuple[list[list[Stretch]], list[list[float]]]:
    """`led_by` of a stripe, and the fractions that it comes to."""
    led_by: list[list[Stretch]] = [[] for _ in tree.parents]
    reaches: list[list[Stretch]] = [[] for _ in tree.parents]
    reaches[0] = [(0, grid, 0)]
    got: list[list[float]] = [[] for _ in tree.parents]
    for domain, members in enumerate(tree.children):
        if not members:
            continue
        given, stretches = _give_out(reaches[domain], [led[member] for member in members])
        led_by[domain] = [(first, end, members[place]) for first, end, place, _ in stretches]
        for place, member in enumerate(members):
            got[member] = [units / grid for units in itertools.accumulate(given[place])]
        _pass_down(stretches, members, reaches, (grid, tree.depths[domain] + 1))
        reaches[domain] = []
    return led_by, got


def _give_out(
    reaches: Sequence[Stretch], led: Sequence[Sequence[float]]
) -> tuple[list[list[int]], list[tuple[int, int, int, int]]]:
    """Units of each member by reach, and the stretches as (first, end, place of the member, reach)."""
    num_reaches = len(led[0])
    available = [0] * num_reaches
    for first, end, reach in reaches:
        available[reach] += end - first
    given = [[0] * num_reaches for _ in led]
    for reach in range(num_reaches):
        wanted = [z[reach] - (z[reach - 1] if reach else 0.0) for z in led]
        for place, units in enumerate(_apportioned(available[reach], wanted)):
            given[place][reach] = units
    left = [[given[place][reach] for place in range(len(led))] for reach in range(num_reaches)]
    at = [0] * num_reaches
    stretches = []
    for first, end, reach in reaches:
        start = first
        while start < end:
            while not left[reach][at[reach]]:
                at[reach] += 1
            units = min(end - start, left[reach][at[reach]])
            stretches.append((start, start + units, at[reach], reach))
            left[reach][at[reach]] -= units
            start += units
    return given, stretches


def _apportioned(units: int, wanted: Sequence[float]) -> list[int]:
    """Whole units in the ratio of what is wanted, the largest remainders first."""
    positive = [max(0.0, value) for value in wanted]
    total = sum(positive)
    ideal = [units * value / total if total > 0 else units / len(wanted) for value in positive]
    given = [int(exact) for exact in ideal]
    by_remainder = sorted(range(len(given)), key=lambda place: given[place] - ideal[place])
    for place in by_remainder[: units - sum(given)]:
        given[place] += 1
    return given


def _pass_down(
    stretches: Sequence[tuple[int, int, int, int]],
    members: Sequence[int],
    reaches: list[list[Stretch]],
    whole: tuple[int, int],
) -> None:
    """Each member's reaches: what it was given, and between that only itself."""
    grid, own = whole
    for first, end, place, reach in stretches:
        mine = reaches[members[place]]
        before = mine[-1][1] if mine else 0
        if before < first:
            mine.append((before, first, own))
        mine.append((first, end, reach))
    for member in members:
        before = reaches[member][-1][1] if reaches[member] else 0
        if before < grid:
            reaches[member].append((before, grid, own))


def _radix(tree: Hierarchy) -> Iterator[list[Stretch]]:
    """One unit per rank, numbered with the member of the deepest domain as first digit and the root's as last.

    Then the units that a member leads for the domain above it lie together, on every level.
    """
    num_units = tree.num_leaves
    sizes = {tree.depths[vertex]: len(children) for vertex, children in enumerate(tree.children) if children}
    below = {0: 1}
    for depth in range(1, len(sizes)):
        below[depth] = below[depth - 1] * sizes[depth - 1]
    for domain, members in enumerate(tree.children):
        if not members:
            yield []
            continue
        width = below[tree.depths[domain]]
        yield [(first, first + width, members[first // width % len(members)]) for first in range(0, num_units, width)]
