"""Which fraction of a message each subtree leads on each level, so that no link is busier than it must be.

In a multi-level allreduce every domain w (a switch, or a node with several ranks) has a leader for each byte of the
message, which is the leader of one of its members. Let z(d, w), for a vertex d below w, be the fraction of the message
whose leader in w is d or below d. The choices nest: z(d, w) <= z(d, w') for w' between d and w; the members d of w have
sum z(d, w) = 1, and further down the fractions of the members d of v, for w above v, add up to z(v, w).

What leaves d: on the way up, the bytes whose leader at the root is elsewhere, once, 1 - z(d, root); on the way down,
what the leaders below d send to the m_w - 1 other members of each domain w above d, (m_w - 1) z(d, w). What enters d is
the same, in the other order. So the link of d, with rate r, needs

    tau_d = (1 - z(d, root) + sum over w above d of (m_w - 1) z(d, w)) / r

seconds per byte of the message, and the largest of these is minimised. That is a linear program, and every solution can
be laid out in the message (`cutting`). A switch may also be no domain, its members being members of the domain above;
`loading` has what its link carries then. Different parts of the message may go through trees without different
switches, so that of one byte a rack sends one partial sum, of another one as many as it has nodes: the program decides
how much goes through which tree. Subtrees that are alike get the same, which makes the program small. On one switch it
is solved by filling up: x_i = max(0, (tau B_i - 1)/(N - 2)), with tau such that the sum is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.planning.sharing.hierarchy import Hierarchy
from ringweave.planning.sharing.loading import Part, busiest
from ringweave.planning.sharing.orbits import Orbits, orbits

_NOT_BUSIER = 1 + 1e-9
_GOOD_ENOUGH = 1.001
_MAX_KINDS = 400
_MAX_TOGETHER = 20_000
"""Kinds of all trees that are tried at once."""

_Removed = frozenset[int]
"""Kinds of domains that are taken out of a tree."""


@dataclass(frozen=True, slots=True)
class Fractions:
    """The solution for one hierarchy."""

    parts: tuple[Part, ...]
    """Of the message, the largest first."""
    busiest_s_per_byte: float
    """The largest tau."""
    is_symmetric: bool
    """There is one part, and all vertices of a depth are alike: every member of a domain leads the same."""


def fractions(tree: Hierarchy, bound_s_per_byte: float | None = None) -> Fractions:
    """The fractions that make the busiest link least busy, and then the others.

    Args:
        tree: At least two ranks.
        bound_s_per_byte: Where this is not reached, parts of the message go through trees without some domains: the
            members of a domain with a fast link are then members of the domain above. None: all through the whole tree.

    Raises:
        RingweaveError: The solver of the linear program gives up.

    Cost:
        Linear where all members of a domain are alike or only the links to the root decide; elsewhere a linear program
        with a variable for each kind of vertex and each domain above it, and then some with as many trees as have
        20,000 kinds together, half a second each.
    """
    kinds = orbits(tree)
    if kinds.is_symmetric or all(kinds.is_uniform(kind) for kind in kinds.children[0]):
        solved = _filled_at_the_root(tree, kinds)
        enough = bound_s_per_byte or busiest(solved.parts, depth=1)
        if kinds.is_symmetric or solved.busiest_s_per_byte <= enough * _NOT_BUSIER:
            return solved
    from ringweave.planning.sharing import program  # brings scipy, which takes as long as all the rest

    chosen = _worth_removing(kinds, bound_s_per_byte) if bound_s_per_byte else [frozenset()]
    trees = [kinds.without(removed) for removed in chosen]
    parts = [
        _spread(tree.without({vertex for vertex, kind in enumerate(kinds.of_vertex) if kind in removed}), remaining, *z)
        for removed, remaining, z in zip(chosen, trees, program.solve(trees), strict=True)
    ]
    kept = sorted((part for part in parts if part.weight), key=lambda part: -part.weight)
    return Fractions(tuple(kept), busiest(kept), is_symmetric=False)


def _worth_removing(kinds: Orbits, bound_s_per_byte: float) -> list[_Removed]:
    """What to take out, for each part of the message: as few parts as are about as good as all that were tried.

    Trees that differ in one domain from one that is used are tried together, at first the one without any beside them,
    until the bound is reached or none helps.
    """
    from ringweave.planning.sharing import program

    domains = [kind for kind, below in enumerate(kinds.children) if kind and below]
    whole: _Removed = frozenset()
    used, near = [whole], [frozenset(domains)]
    best, _ = program.least([kinds])
    while best > bound_s_per_byte * _GOOD_ENOUGH and len(kinds.parents) <= _MAX_KINDS:
        near += [removed ^ {kind} for removed in used for kind in domains]
        tried = list(dict.fromkeys([*used, *near]))[: max(len(used) + 1, _MAX_TOGETHER // len(kinds.parents))]
        least, weights = program.least([kinds.without(removed) for removed in tried])
        if least * _GOOD_ENOUGH > best:
            break
        used = [removed for removed, weight in zip(tried, weights, strict=True) if weight > 0]
        best, near = least, []
    return _fewer(kinds, used, best)


def _fewer(kinds: Orbits, used: list[_Removed], best: float) -> list[_Removed]:
    """Without the trees that can be spared: every part of a message costs messages of its own."""
    from ringweave.planning.sharing import program

    for removed in list(used):
        others = [each for each in used if each != removed]
        if others and program.least([kinds.without(each) for each in others])[0] <= best * _GOOD_ENOUGH:
            used = others
    return used


def _filled_at_the_root(tree: Hierarchy, kinds: Orbits) -> Fractions:
    """Filling up at the root; below, every member leads the same: right where only the links to the root decide."""
    top = kinds.children[0]
    shares = dict(
        zip(top, fill([kinds.rates[kind] for kind in top], [kinds.counts[kind] for kind in top]), strict=True)
    )
    led: list[list[float]] = [[]]
    for kind, parent in enumerate(kinds.parents[1:], start=1):
        fraction = 1 / kinds.num_members[parent] if parent else shares[kind]
        led.append([*(z * fraction for z in led[parent]), fraction])
    part = _spread(tree, kinds, 1.0, led)
    return Fractions((part,), busiest([part]), kinds.is_symmetric)


def _spread(tree: Hierarchy, kinds: Orbits, weight: float, of_kind: list[list[float]]) -> Part:
    """What all vertices of a kind lead is what it leads."""
    return Part(tree, weight, [of_kind[kind] for kind in kinds.of_vertex if kind >= 0])


def fill(rates: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Shares of nodes on one switch, `counts[i]` of rate `rates[i]` each: the least tau for all that own anything.

    Where the slowest link alone decides, no other is made busier than it has to be.
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
