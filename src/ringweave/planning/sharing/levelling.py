"""The stripes, each with its domain tree and shares, that the generator of multi-level schedules takes."""

import numpy as np
from numpy.typing import NDArray

from ringweave.planning.sharing.cutting import LaidOut, cut
from ringweave.planning.sharing.fractions import fractions
from ringweave.planning.sharing.hierarchy import Hierarchy
from ringweave.schedules import Domain, Stripe


def level_stripes(tree: Hierarchy, bound_s_per_byte: float | None = None) -> tuple[Stripe, ...]:
    """Leaders for every chunk on every level so that the busiest link is hardly busier than it must be, and the chunks.

    Args:
        tree: At least two ranks.
        bound_s_per_byte: Where this is not reached, parts of the message go through trees without some domains.

    Returns:
        The parts of the message: their trees of domains, and the sizes of their chunks, in units that are the same for
        all. There is a chunk between any two places of a part at which some domain changes its leader.

    Raises:
        RingweaveError: The solver of the linear program gives up.
    """
    return tuple(stripe_of(laid_out) for laid_out in cut(fractions(tree, bound_s_per_byte)).stripes)


def stripe_of(laid_out: LaidOut) -> Stripe:
    """The domain tree and the shares of a stripe."""
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
    tree: Hierarchy,
    laid_out: LaidOut,
    vertex: int,
    starts: NDArray[np.int64],
    leaders: dict[int, NDArray[np.int32]],
) -> NDArray[np.int32]:
    """The rank that leads the domain, chunk by chunk."""
    led_by = laid_out.led_by[vertex]
    stretch = np.searchsorted([first for first, _, _ in led_by], starts, side="right") - 1
    member = np.array([member for _, _, member in led_by])[stretch]
    leading = np.array(tree.ranks, np.int32)[member]
    for child in tree.children[vertex]:
        if child in leaders:
            mine = member == child
            leading[mine] = leaders.pop(child)[mine]
    return leading
