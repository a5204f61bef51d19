"""Routes of blocks: the leaders of each rank's block on every level of an allgather, for the least busy links.

A block climbs from its owner to the leader of the whole tree and comes down from there (`schedules.multi_level`). Every
subtree then lets in all that it does not own, once, which no allgather can avoid. With z(d, w) the fraction of the
message whose leader in domain w is in member d or below, n_d of N ranks below d, and m_w members of w, the link of d
lets out

    n_d / N + (m_root - 2) z(d, root) + sum over the other domains w above d of (m_w - 1) z(d, w)

of the message, whichever blocks these are: a block that is led elsewhere leaves its owner's member once on its way up,
and one that is led by its own member needs one copy less on its way down. This is what a link carries in an allreduce
(`stripes`) with n_d / N in place of 1, so the same linear program finds the best z, and the owners may be matched
with the leaders afterwards: a rank leads its own block wherever the fractions let it, which saves hops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ringweave.planning.chunk_shares.share_tree import ShareTree, find_symmetry_classes, load_factors
from ringweave.planning.chunk_shares.stripes import apportion_units
from ringweave.schedules import Domain, Stripe

_UNITS_PER_BLOCK = (1, 2, 3, 4, 6, 8, 12, 24, 60)
_GOOD_ENOUGH_RATIO = 1.005
_MAX_CLASSES = 2000
"""Limit on the kinds of vertices for which the linear program is solved."""
_MAX_UNIT_LEADERS = 1 << 24
"""Limit on units times domains: blocks of large groups are cut less finely."""

_Fractions = list[list[float]]
"""For each vertex, z(d, w) for the domains w above it, from the root down."""
_Places = NDArray[np.intp]


def make_block_stripe(tree: ShareTree) -> Stripe:
    """Return the domains and chunks of an allgather, with a nearly least busy busiest link.

    Args:
        tree: At least two ranks.

    Returns:
        The tree with the leaders of each chunk, and the sizes of the chunks. Chunks are in the order of their owners;
        the shares of each rank's chunks add up to the same number.

    Raises:
        RingweaveError: The linear program's solver fails.

    Cost:
        Linear in domains times ranks where even fractions are good enough; elsewhere one linear program with a variable
        for each kind of vertex and each domain above it.
    """
    problem = _BlockProblem(tree)
    led = problem.even_fractions()
    if problem.busiest_s_per_byte(led) > problem.least_s_per_byte * _GOOD_ENOUGH_RATIO:
        led = problem.best_fractions()
    best = problem.busiest_s_per_byte(led) * _GOOD_ENOUGH_RATIO
    num_leaders = tree.num_leaves * (len(tree) - tree.num_leaves)
    *coarser, finest = [each for each in _UNITS_PER_BLOCK if each == 1 or each * num_leaders <= _MAX_UNIT_LEADERS]
    for per_block in coarser:
        laid_out = _lay_out_blocks(tree, problem.num_ranks, led, per_block)
        if problem.busiest_s_per_byte(laid_out.led) <= best:
            return _build_stripe(tree, laid_out)
    return _build_stripe(tree, _lay_out_blocks(tree, problem.num_ranks, led, finest))


class _BlockProblem:
    """Loads of the links of one tree."""

    def __init__(self, tree: ShareTree) -> None:
        self._tree = tree
        self.num_ranks = [int(rank >= 0) for rank in tree.ranks]
        """Ranks below each vertex."""
        for vertex in range(len(tree) - 1, 0, -1):
            self.num_ranks[tree.parents[vertex]] += self.num_ranks[vertex]
        self._above: list[list[int]] = [[]]
        for parent in tree.parents[1:]:
            self._above.append([*self._above[parent], parent])
        self._owned = [count / tree.num_leaves for count in self.num_ranks]
        let_in = [1 - owned for owned in self._owned[1:]]
        self.least_s_per_byte = max(part / rate for part, rate in zip(let_in, tree.rates[1:], strict=True))
        """Time of the link whose subtree takes longest to let in what others own."""

    def even_fractions(self) -> _Fractions:
        """Return fractions by which every rank leads as much as any other, on every level."""
        return [
            [self.num_ranks[vertex] / self.num_ranks[domain] for domain in above]
            for vertex, above in enumerate(self._above)
        ]

    def busiest_s_per_byte(self, led: _Fractions) -> float:
        """Return the time of the busiest link in either direction, per byte of the message."""
        busiest = self.least_s_per_byte
        for vertex in range(1, len(self._tree)):
            factors = load_factors([len(self._tree.children[domain]) for domain in self._above[vertex]], 1)
            out = self._owned[vertex] + sum(f * z for f, z in zip(factors, led[vertex], strict=True))
            busiest = max(busiest, out / self._tree.rates[vertex])
        return busiest

    def best_fractions(self) -> _Fractions:
        """Return the fractions of the least busy busiest link that differ least from even ones."""
        from ringweave.planning.chunk_shares import linear_program  # which loads HiGHS

        kinds, even = find_symmetry_classes(self._tree), self.even_fractions()
        if len(kinds.parents) > _MAX_CLASSES:
            return even
        of_class = {kind: vertex for vertex, kind in enumerate(kinds.class_of_vertex)}
        vertices = [of_class[kind] for kind in range(len(kinds.parents))]
        solved = linear_program.solve_blocks(
            kinds, [self._owned[v] for v in vertices], [even[v] for v in vertices], self.least_s_per_byte
        )
        return [solved[kind] for kind in kinds.class_of_vertex]


@dataclass(frozen=True, slots=True)
class _BlockLayout:
    """Whole units of blocks, in the order of the leaves, with their leaders."""

    per_block: int
    leader_place: dict[int, _Places]
    """For each domain, the index of the member that leads each unit."""
    led: _Fractions
    """The resulting fractions."""


def _lay_out_blocks(tree: ShareTree, num_ranks: Sequence[int], led: _Fractions, per_block: int) -> _BlockLayout:
    """Share out the units from the root down; leaders nest as in `stripes`, by the reach of each unit."""
    num_units = tree.num_leaves * per_block
    first_unit = per_block * np.cumsum([0, *(rank >= 0 for rank in tree.ranks[:-1])])
    reaches: dict[int, _Places] = {0: np.zeros(num_units, np.intp)}
    leader_place: dict[int, _Places] = {}
    got: _Fractions = [[] for _ in tree.parents]
    for domain, members in enumerate(tree.children):
        if not members:
            continue
        reach, depth = reaches.pop(domain), tree.depths[domain]
        places, counts = np.empty(num_units, np.intp), np.zeros((len(members), depth + 1), np.intp)
        borders = np.append(first_unit[members], first_unit[members[-1]] + per_block * num_ranks[members[-1]])
        for level in range(depth + 1):
            units = np.flatnonzero(reach == level)
            wanted = [led[member][level] - (led[member][level - 1] if level else 0.0) for member in members]
            counts[:, level] = apportion_units(len(units), wanted)
            places[units] = _match_leaders(units, counts[:, level], borders)
        leader_place[domain] = places
        for place, member in enumerate(members):
            got[member] = [units / num_units for units in accumulate(counts[place].tolist())]
            if tree.children[member]:
                reaches[member] = np.where(places == place, reach, depth + 1)
    return _BlockLayout(per_block, leader_place, got)


def _match_leaders(units: _Places, quotas: _Places, borders: _Places) -> _Places:
    """Return the member that leads each unit, so many units each; first of all its own.

    `units`: ascending numbers of units.
    """
    owner = np.searchsorted(borders, units, side="right") - 1
    owner[owner >= len(quotas)] = -1
    first_own = np.searchsorted(units, borders[:-1])
    keeps = (owner >= 0) & (np.arange(len(units)) - first_own[owner] < quotas[owner])
    left = quotas - np.bincount(owner[keeps], minlength=len(quotas))
    places = owner.copy()
    places[~keeps] = np.repeat(np.arange(len(quotas)), left)
    return places


def _build_stripe(tree: ShareTree, laid_out: _BlockLayout) -> Stripe:
    """Return the domain tree with a chunk for each run of units with one owner and the same leaders everywhere."""
    num_units = tree.num_leaves * laid_out.per_block
    begins = np.arange(num_units) % laid_out.per_block == 0
    leading: dict[int, _Places] = {}
    for vertex in range(len(tree) - 1, -1, -1):
        if members := tree.children[vertex]:
            places = laid_out.leader_place[vertex]
            begins[1:] |= places[1:] != places[:-1]
            heads = np.stack([leading[m] if m in leading else np.full(num_units, tree.ranks[m]) for m in members])
            leading[vertex] = heads[places, np.arange(num_units)]
    starts = np.flatnonzero(begins)
    shares = np.diff(np.append(starts, num_units))
    owners = np.array([rank for rank in tree.ranks if rank >= 0])[starts // laid_out.per_block]
    order = np.argsort(owners, kind="stable")
    built: dict[int, Domain | int] = {}
    for vertex in range(len(tree) - 1, -1, -1):
        if members := tree.children[vertex]:
            leaders = leading[vertex][starts[order]].tolist()
            built[vertex] = Domain(tuple(built.pop(member) for member in members), tuple(leaders))
        else:
            built[vertex] = tree.ranks[vertex]
    top = built[0]
    assert isinstance(top, Domain)
    return Stripe(top, tuple(shares[order].tolist()))
