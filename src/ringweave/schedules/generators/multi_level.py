"""Allreduce over domains inside domains: up to one leader per chunk, level by level, and back.

With the ranks of a node, the nodes of a rack and the racks of a cluster as domains, and the leaders of the chunks
spread over ranks and racks by what their links carry, both the links of the hosts and the uplinks carry what the lower
bound says. The levels use different links: they overlap when the schedule runs in several segments.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ringweave.errors import ScheduleError, explain
from ringweave.schedules.generators.domains import Domain, Level, Stripe, Tree
from ringweave.schedules.joining import beside, one_after_the_other, then
from ringweave.schedules.schedule import Collective, How, Kind, Round, Rounds, Schedule


def multi_level(domain: Domain, shares: Sequence[int]) -> Schedule:
    """Allreduce over a tree of domains, each chunk on a way of its own.

    From the deepest level up, the leaders of a domain's members send a chunk to the domain's leader of that chunk: in
    round t the leader of the member t places after the leader's own, round and round. Then the complete chunks come
    back the same way down. All domains of a level and all chunks work at the same time; neighbouring chunks that go
    from the same to the same rank are one operation; who leads on several levels sends itself nothing.

    Args:
        domain: The tree; its depth may vary. A domain with a single member passes through.
        shares: Relative size of each chunk, as whole numbers; a chunk of share 0 is left out.

    Returns:
        A schedule of the chunks that have a share; twice m-1 rounds for each level whose largest domain has m members.

    Raises:
        ScheduleError: The tree does not name every rank once, a domain is empty, a leader leads none of its members,
            or leaders and shares differ in number.

    Cost:
        Of a chunk, the leader of a domain of m members receives and sends m-1 times its size on that level, the
        leaders of the other members once.
    """
    return multi_level_striped([Stripe(domain, tuple(shares))])


def multi_level_striped(stripes: Sequence[Stripe]) -> Schedule:
    """`multi_level` with a tree of its own for each of several parts of the message, all at the same time.

    So a byte can pass a domain as one partial sum, and another one as several: where a rack is a domain of one tree and
    its nodes are members of the domain above in another, its uplink and its nodes can both be busy as is best.

    Args:
        stripes: The parts, in the order of the message, over the same ranks.

    Raises:
        ScheduleError: As `multi_level`; or the trees have different ranks.
    """
    up = [multi_level_reduce_scatter(domain, shares) for domain, shares in stripes]
    down = [multi_level_allgather(domain, shares) for domain, shares in stripes]
    return then("multi-level", beside(*up), beside(*down))


def multi_level_reduce_scatter(domain: Domain, shares: Sequence[int]) -> Schedule:
    """The way up of `multi_level`: the leaders of the whole tree own the chunks."""

    def up(level: Level, distance: int) -> Round:
        return _round(level, distance, level.leader_after(distance), level.leader, How.REDUCE)

    return _half("reduce-scatter", domain, shares, up)


def multi_level_allgather(domain: Domain, shares: Sequence[int]) -> Schedule:
    """The way down of `multi_level`: the leaders of the whole tree own the chunks."""

    def down(level: Level, distance: int) -> Round:
        return _round(level, distance, level.leader, level.leader_after(distance), How.COPY)

    return _half("allgather", domain, shares, down)


def multi_level_broadcast(domain: Domain, shares: Sequence[int], root: int) -> Schedule:
    """Broadcast down a tree of domains, along a chain of the members' leaders in each domain.

    The root leads every domain that it is in; the others keep their leaders, so that different chunks enter a domain by
    different ranks. A chain, because the link of each domain carries the message once, and segments follow each other.

    Args:
        domain: The tree.
        shares: Relative size of each chunk; a chunk of share 0 is left out.
        root: The rank that has the message.

    Returns:
        A schedule of m-1 rounds for each level whose largest domain has m members.

    Raises:
        ScheduleError: As `multi_level`; or the root is no rank of the tree.
    """
    tree = Tree(domain, len(shares))
    if not 0 <= root < tree.num_ranks:
        raise ScheduleError(
            explain("root", got=root, expected=f"ranks 0..{tree.num_ranks - 1}", do="Name a rank of the tree")
        )
    kept = _with_a_share(shares)

    def along(level: Level, distance: int) -> Round:
        return _round(level, distance, level.leader_after(distance - 1), level.leader_after(distance), How.COPY)

    parts = [
        (f"broadcast at depth {depth}", _rounds(level, along)) for depth, level in enumerate(tree.levels(kept, root))
    ]
    rounds, phases = one_after_the_other(*parts)
    collective = Collective("broadcast", root=root)
    kept_shares = tuple(shares[chunk] for chunk in kept)
    return Schedule("multi-level broadcast", collective, tree.num_ranks, kept_shares, rounds, phases)


def _half(kind: Kind, domain: Domain, shares: Sequence[int], move: Callable[[Level, int], Round]) -> Schedule:
    kept = _with_a_share(shares)
    tree = Tree(domain, len(shares))
    parts = [(f"{kind} at depth {d}", _rounds(level, move)) for d, level in enumerate(tree.levels(kept))]
    rounds, phases = one_after_the_other(*(parts if kind == "allgather" else parts[::-1]))
    collective = Collective(kind, tuple(domain.leaders[chunk] for chunk in kept))
    kept_shares = tuple(shares[chunk] for chunk in kept)
    return Schedule(f"multi-level {kind}", collective, tree.num_ranks, kept_shares, rounds, phases)


def _with_a_share(shares: Sequence[int]) -> list[int]:
    """The chunks that have one; all, for Schedule to refuse, where none has."""
    return [chunk for chunk, share in enumerate(shares) if share] or list(range(len(shares)))


def _rounds(level: Level, move: Callable[[Level, int], Round]) -> Rounds:
    return Rounds(int(level.num_members.max(initial=1)) - 1, lambda index: move(level, index + 1))


def _round(level: Level, distance: int, src: np.ndarray, dst: np.ndarray, how: How) -> Round:
    """One operation per run of the domains that have so many members, joined with its neighbour where it can be."""
    ops = Round(src, dst, level.first_chunk, level.num_chunks, np.full(len(src), how, np.uint8))
    turns = level.num_members > distance
    return _joined(ops if turns.all() else ops.where(turns))


def _joined(ops: Round) -> Round:
    first, end = ops.first_chunk, ops.first_chunk + ops.num_chunks
    goes_on = np.zeros(len(ops), np.bool_)
    goes_on[1:] = (ops.src[1:] == ops.src[:-1]) & (ops.dst[1:] == ops.dst[:-1]) & (first[1:] == end[:-1])
    if not goes_on.any():
        return ops
    begins = np.flatnonzero(~goes_on)
    lasts = np.append(begins[1:] - 1, len(ops) - 1)
    return Round(ops.src[begins], ops.dst[begins], first[begins], end[lasts] - first[begins], ops.how[begins])
