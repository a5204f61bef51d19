"""Leader fractions: the fraction of a message that each subtree leads on each level, for the least busy links.

In a multi-level allreduce every domain w (a switch, or a node with several ranks) has a leader for each byte of the
message, which is the leader of one of its members. For a vertex d below w, let z(d, w) be the fraction of the message
whose leader in w is d or below d. The choices nest: z(d, w) <= z(d, w') for w' between d and w. The members d of w have
sum z(d, w) = 1. Further down, for w above v, the fractions of the members d of v add up to z(v, w).

Two amounts leave d. On the way up: the bytes whose leader at the root is elsewhere, once, 1 - z(d, root). On the way
down: the data that leaders below d send to the m_w - 1 other members of each domain w above d, (m_w - 1) z(d, w). The
same amounts enter d, in the other order. So the link of d, with rate r, needs

    tau_d = (1 - z(d, root) + sum over w above d of (m_w - 1) z(d, w)) / r

seconds per byte of the message, and the largest of these is minimised. That is a linear program, and every solution can
be laid out in the message (`stripes`). A switch may also be no domain; its members are then members of the domain above
(`share_tree.load_factors` has the load of its link). Parts of the message may go through trees without different
switches: a rack sends one partial sum for one byte, and as many as it has nodes for another. The program decides how
much goes through which tree. Equal subtrees get equal fractions, which makes the program small. On one switch it is
solved by filling up: x_i = max(0, (tau B_i - 1)/(N - 2)), with tau such that the sum is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.planning.chunk_shares.share_tree import (
    MessagePart,
    ShareTree,
    SymmetryClasses,
    busiest_link_s_per_byte,
    find_symmetry_classes,
)

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
