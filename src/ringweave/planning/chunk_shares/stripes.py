"""Stripes: leader fractions of a message for the least busy links, then laid out as whole units and domain trees.

In a multi-level allreduce every domain w (a switch, or a node with several ranks) has a leader for each byte of the
message, which is the leader of one of its members. For a vertex d below w, let z(d, w) be the fraction of the message
whose leader in w is d or below d. The choices nest: z(d, w) <= z(d, w') for w' between d and w. The members d of w have
sum z(d, w) = 1. Further down, for w above v, the fractions of the members d of v add up to z(v, w).

Two amounts leave d. On the way up: the bytes whose leader at the root is elsewhere, once, 1 - z(d, root). On the way
down: the data that leaders below d send to the m_w - 1 other members of each domain w above d, (m_w - 1) z(d, w). The
same amounts enter d, in the other order. So the link of d, with rate r, needs

    tau_d = (1 - z(d, root) + sum over w above d of (m_w - 1) z(d, w)) / r

seconds per byte of the message, and the largest of these is minimised. That is a linear program, and every solution can
be laid out in the message. A switch may also be no domain; its members are then members of the domain above
(`share_tree.load_factors` has the load of its link). Parts of the message may go through trees without different
switches: a rack sends one partial sum for one byte, and as many as it has nodes for another. The program decides how
much goes through which tree. Equal subtrees get equal fractions, which makes the program small. On one switch it is
solved by filling up: x_i = max(0, (tau B_i - 1)/(N - 2)), with tau such that the sum is 1.

The parts of the message lie one after the other. In each part, from the root down, a domain v knows for each unit how
far up it leads (its *reach*): to the root, to some domain between, or only itself. For each reach the units are
distributed among its members in the ratio of the fractions, in the order of the message. A member leads all other units
only for itself. All choices therefore nest by construction.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.planning.chunk_shares.share_tree import (
    MessagePart,
    ShareTree,
    SymmetryClasses,
    busiest_link_s_per_byte,
    find_symmetry_classes,
)
from ringweave.schedules import Domain, Stripe

_BUSIEST_ROUNDING = 1 + 1e-9
_GOOD_ENOUGH_RATIO = 1.001
_MAX_CLASSES = 400
_MAX_CLASSES_TOGETHER = 20_000
"""Limit on the classes of all trees that are tried together."""

_RemovedClasses = frozenset[int]
"""Classes of domains that are removed from a tree."""


@dataclass(frozen=True, slots=True)
class LeaderFractions:
    """Solution for one hierarchy."""

    parts: tuple[MessagePart, ...]
    """Parts of the message, the largest first."""
    busiest_s_per_byte: float
    """The largest tau."""
    is_symmetric: bool
    """True if there is one part, and all vertices of a depth are alike: every member of a domain leads the same."""


def solve_fractions(tree: ShareTree, bound_s_per_byte: float | None = None) -> LeaderFractions:
    """Return the fractions that make the busiest link least busy, and then the others.

    `bound_s_per_byte`: if the whole tree misses this, parts of the message go through trees without some domains: the
    members of a domain with a fast link are then members of the domain above. None uses the whole tree only.

    Raises:
        RingweaveError: The linear program's solver fails.

    Cost:
        Linear where all members of a domain are alike or only the links to the root decide; elsewhere a linear program
        with a variable for each kind of vertex and each domain above it, and then some with as many trees as have
        20,000 kinds together, half a second each.
    """
    kinds = find_symmetry_classes(tree)
    if kinds.is_symmetric or all(kinds.is_uniform(kind) for kind in kinds.children[0]):
        solved = _fill_at_root(tree, kinds)
        enough = bound_s_per_byte or busiest_link_s_per_byte(solved.parts, depth=1)
        if kinds.is_symmetric or solved.busiest_s_per_byte <= enough * _BUSIEST_ROUNDING:
            return solved
    from ringweave.planning.chunk_shares import linear_program  # which loads HiGHS

    chosen = _choose_removed_domains(kinds, bound_s_per_byte) if bound_s_per_byte else [frozenset()]
    trees = [kinds.without(removed) for removed in chosen]
    parts = [
        _expand_classes(
            tree.without({vertex for vertex, kind in enumerate(kinds.class_of_vertex) if kind in removed}),
            remaining,
            *z,
        )
        for removed, remaining, z in zip(chosen, trees, linear_program.solve_shares(trees), strict=True)
    ]
    kept = sorted((part for part in parts if part.weight), key=lambda part: -part.weight)
    return LeaderFractions(tuple(kept), busiest_link_s_per_byte(kept), is_symmetric=False)


def _choose_removed_domains(kinds: SymmetryClasses, bound_s_per_byte: float) -> list[_RemovedClasses]:
    """Return the domains to remove, for each part: as few parts as are about as good as all that were tried.

    The search starts from the whole tree and the tree without any domains. It tries all trees that differ in one domain
    from a used one, until the bound is reached or none helps.
    """
    from ringweave.planning.chunk_shares import linear_program

    domains = [kind for kind, below in enumerate(kinds.children) if kind and below]
    whole: _RemovedClasses = frozenset()
    used, near = [whole], [frozenset(domains)]
    best, _ = linear_program.min_busiest([kinds])
    while best > bound_s_per_byte * _GOOD_ENOUGH_RATIO and len(kinds.parents) <= _MAX_CLASSES:
        near += [removed ^ {kind} for removed in used for kind in domains]
        tried = list(dict.fromkeys([*used, *near]))[: max(len(used) + 1, _MAX_CLASSES_TOGETHER // len(kinds.parents))]
        least, weights = linear_program.min_busiest([kinds.without(removed) for removed in tried])
        if least * _GOOD_ENOUGH_RATIO > best:
            break
        used = [removed for removed, weight in zip(tried, weights, strict=True) if weight > 0]
        best, near = least, []
    return _drop_spare_trees(kinds, used, best)


def _drop_spare_trees(kinds: SymmetryClasses, used: list[_RemovedClasses], best: float) -> list[_RemovedClasses]:
    """Drop the trees that are not needed: every part of a message costs messages of its own."""
    from ringweave.planning.chunk_shares import linear_program

    for removed in list(used):
        others = [each for each in used if each != removed]
        if (
            others
            and linear_program.min_busiest([kinds.without(each) for each in others])[0] <= best * _GOOD_ENOUGH_RATIO
        ):
            used = others
    return used


def _fill_at_root(tree: ShareTree, kinds: SymmetryClasses) -> LeaderFractions:
    """Fill up at the root; below it, every member leads the same. This is right where only links to the root decide."""
    top = kinds.children[0]
    shares = dict(
        zip(top, fill_shares([kinds.rates[kind] for kind in top], [kinds.counts[kind] for kind in top]), strict=True)
    )
    led: list[list[float]] = [[]]
    for kind, parent in enumerate(kinds.parents[1:], start=1):
        fraction = 1 / kinds.num_members[parent] if parent else shares[kind]
        led.append([*(z * fraction for z in led[parent]), fraction])
    part = _expand_classes(tree, kinds, 1.0, led)
    return LeaderFractions((part,), busiest_link_s_per_byte([part]), kinds.is_symmetric)


def _expand_classes(tree: ShareTree, kinds: SymmetryClasses, weight: float, by_class: list[list[float]]) -> MessagePart:
    """Give every vertex the fractions of its class."""
    return MessagePart(tree, weight, [by_class[kind] for kind in kinds.class_of_vertex if kind >= 0])


def fill_shares(rates: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return shares of nodes on one switch, `counts[i]` of rate `rates[i]` each: the least tau for all that own any.

    Where the slowest link alone decides, no other link is made busier than necessary.
    """
    total = sum(counts)
    if total <= 2:
        return [1 / total] * len(rates)
    owners = sorted(range(len(rates)), key=lambda i: -rates[i])
    used, together, level = 0, 0.0, 0.0
    for index in owners:
        if used and level * rates[index] <= 1:
            break
        used += counts[index]
        together += counts[index] * rates[index]
        level = (total - 2 + used) / together
    return [max(0.0, (level * rate - 1) / (total - 2)) for rate in rates]


_GRIDS = (60, 120, 240, 360, 720, 1260, 2520, 5040, 10080, 27720, 55440, 110880, 360360, 720720, 1441440)
_TOLERANCE = 1.005

UnitRange = tuple[int, int, int]
"""First unit, unit after the last, and their reach or member."""


@dataclass(frozen=True, slots=True)
class StripeLayout:
    """Layout of a part of the message."""

    tree: ShareTree
    """Tree that the part goes through."""
    num_units: int
    led_by: list[list[UnitRange]]
    """For each domain, the member that leads it, in the order of the part; empty for a rank."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Layout of the fractions in a message."""

    stripes: tuple[StripeLayout, ...]
    """Parts in the order of the message."""
    busiest_s_per_byte: float
    """Largest tau with whole units."""

    @property
    def num_units(self) -> int:
        return sum(stripe.num_units for stripe in self.stripes)


def lay_out_message(solved: LeaderFractions) -> MessageLayout:
    """Return the coarsest grid on which the busiest link is at most 0.5 % busier than with exact fractions.

    Where all members of every domain are alike, there is one unit per rank, and no link is busier.

    Cost:
        Linear in vertices and stretches, for each grid that is tried.
    """
    tree = solved.parts[0].tree
    if solved.is_symmetric:
        return MessageLayout(
            (StripeLayout(tree, tree.num_leaves, [*_lay_out_symmetric(tree)]),), solved.busiest_s_per_byte
        )
    *coarser, finest = [grid for grid in _GRIDS if grid >= tree.num_leaves] or [_GRIDS[-1]]
    for grid in coarser:
        found = _lay_out_on_grid(solved.parts, grid)
        if found.busiest_s_per_byte <= solved.busiest_s_per_byte * _TOLERANCE:
            return found
    return _lay_out_on_grid(solved.parts, finest)


def _lay_out_on_grid(parts: Sequence[MessagePart], grid: int) -> MessageLayout:
    stripes, got = [], []
    for part, num_units in zip(parts, apportion_units(grid, [part.weight for part in parts]), strict=True):
        if num_units:
            led_by, led = _lay_out_stripe(part.tree, part.led, num_units)
            stripes.append(StripeLayout(part.tree, num_units, led_by))
            got.append(MessagePart(part.tree, num_units / grid, led))
    return MessageLayout(tuple(stripes), busiest_link_s_per_byte(got))


def _lay_out_stripe(
    tree: ShareTree, led: Sequence[Sequence[float]], grid: int
) -> tuple[list[list[UnitRange]], list[list[float]]]:
    """Return `led_by` of a stripe, and the resulting fractions."""
    led_by: list[list[UnitRange]] = [[] for _ in tree.parents]
    reaches: list[list[UnitRange]] = [[] for _ in tree.parents]
    reaches[0] = [(0, grid, 0)]
    got: list[list[float]] = [[] for _ in tree.parents]
    for domain, members in enumerate(tree.children):
        if not members:
            continue
        given, stretches = _distribute_units(reaches[domain], [led[member] for member in members])
        led_by[domain] = [(first, end, members[place]) for first, end, place, _ in stretches]
        for place, member in enumerate(members):
            got[member] = [units / grid for units in itertools.accumulate(given[place])]
        _pass_reaches_down(stretches, members, reaches, (grid, tree.depths[domain] + 1))
        reaches[domain] = []
    return led_by, got


def _distribute_units(
    reaches: Sequence[UnitRange], led: Sequence[Sequence[float]]
) -> tuple[list[list[int]], list[tuple[int, int, int, int]]]:
    """Return the units of each member by reach, and the stretches as (first, end, place of the member, reach)."""
    num_reaches = len(led[0])
    available = [0] * num_reaches
    for first, end, reach in reaches:
        available[reach] += end - first
    given = [[0] * num_reaches for _ in led]
    for reach in range(num_reaches):
        wanted = [z[reach] - (z[reach - 1] if reach else 0.0) for z in led]
        for place, units in enumerate(apportion_units(available[reach], wanted)):
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


def apportion_units(units: int, wanted: Sequence[float]) -> list[int]:
    """Return whole units in the wanted ratio, the largest remainders first."""
    positive = [max(0.0, value) for value in wanted]
    total = sum(positive)
    ideal = [units * value / total if total > 0 else units / len(wanted) for value in positive]
    given = [int(exact) for exact in ideal]
    by_remainder = sorted(range(len(given)), key=lambda place: given[place] - ideal[place])
    for place in by_remainder[: units - sum(given)]:
        given[place] += 1
    return given


def _pass_reaches_down(
    stretches: Sequence[tuple[int, int, int, int]],
    members: Sequence[int],
    reaches: list[list[UnitRange]],
    whole: tuple[int, int],
) -> None:
    """Append to each member's reaches the stretches that it was given; between them it leads only itself."""
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


def _lay_out_symmetric(tree: ShareTree) -> Iterator[list[UnitRange]]:
    """Give each rank one unit, numbered with the member of the deepest domain as first digit and the root's as last.

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


def make_stripes(tree: ShareTree, bound_s_per_byte: float | None = None) -> tuple[Stripe, ...]:
    """Return the parts of the message with their chunks and leaders, with a nearly least busy busiest link.

    `bound_s_per_byte`: if the whole tree misses this, parts of the message go through trees without some domains.

    Returns:
        The parts of the message: their trees of domains, and the sizes of their chunks, in common units. A chunk lies
        between any two places of a part at which some domain changes its leader.

    Raises:
        RingweaveError: The linear program's solver fails.
    """
    return tuple(
        build_stripe(laid_out) for laid_out in lay_out_message(solve_fractions(tree, bound_s_per_byte)).stripes
    )


def build_stripe(laid_out: StripeLayout) -> Stripe:
    """Return the domain tree and the shares of a stripe."""
    tree = laid_out.tree
    borders = sorted({0, laid_out.num_units, *(first for led in laid_out.led_by for first, _, _ in led)})
    starts = np.array(borders[:-1])
    members: dict[int, Domain | int] = {}
    leaders: dict[int, NDArray[np.int32]] = {}
    for vertex in range(len(tree) - 1, -1, -1):
        if tree.ranks[vertex] >= 0:
            members[vertex] = tree.ranks[vertex]
            continue
        leading = _leading_ranks(tree, laid_out, vertex, starts, leaders)
        children = tree.children[vertex]
        members[vertex] = Domain(tuple(members.pop(child) for child in children), tuple(leading.tolist()))
        leaders[vertex] = leading
    top = members[0]
    assert isinstance(top, Domain)
    return Stripe(top, tuple(np.diff(borders).tolist()))


def _leading_ranks(
    tree: ShareTree,
    laid_out: StripeLayout,
    vertex: int,
    starts: NDArray[np.int64],
    leaders: dict[int, NDArray[np.int32]],
) -> NDArray[np.int32]:
    """Return the rank that leads the domain, chunk by chunk."""
    led_by = laid_out.led_by[vertex]
    stretch = np.searchsorted([first for first, _, _ in led_by], starts, side="right") - 1
    member = np.array([member for _, _, member in led_by])[stretch]
    leading = np.array(tree.ranks, np.int32)[member]
    for child in tree.children[vertex]:
        if child in leaders:
            mine = member == child
            leading[mine] = leaders.pop(child)[mine]
    return leading
