"""Multi-level collectives over nested domains: each chunk has a leader in every domain and moves up and down by levels.

Domains are, for instance, the ranks of a node, the nodes of a rack and the racks of a cluster. If the leaders of the
chunks are spread over ranks and racks by the rates of their links, both host links and uplinks carry what the lower
bound says. The levels use different links, so they overlap when the schedule runs in several segments.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules.compose import compose_allreduce, compose_side_by_side, concatenate_rounds
from ringweave.schedules.schedule import Collective, CollectiveKind, LazyRounds, ReceiveOp, Round, Schedule

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Domain:
    """Ranks, or domains of ranks, that are close to each other. A bare rank is its own leader for every chunk."""

    members: tuple["Domain | int", ...]
    """Its ranks or domains."""
    leaders: tuple[int, ...]
    """For each chunk, the rank that leads this domain: the leader of one of its members."""

    def walk(self) -> Iterator["Domain"]:
        """Yield this domain and all domains below it, in preorder."""
        yield self
        for member in self.members:
            if isinstance(member, Domain):
                yield from member.walk()


class Stripe(NamedTuple):
    """A part of a message with a domain tree of its own."""

    domain: Domain
    shares: tuple[int, ...]
    """Relative size of each chunk, in the same unit for all parts of the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainLevel:
    """All domains of one depth. A run is a range of chunks in which no leader changes in its domain."""

    first_chunk: _Ints
    """For each run, like the next six."""
    num_chunks: _Ints
    num_members: _Ints
    members_at: _Ints
    """Index of its domain's first member in `rank_of` and `domain_of`."""
    leader: _Ints
    place: _Ints
    """Index of the member that leads the domain."""
    owner_place: _Ints
    """Index of the member that has the chunks' owner; -1 if none has, or owners do not matter."""
    rank_of: _Ints
    """For each member: the rank, or -1 for a domain."""
    domain_of: _Ints
    """For each member: index of its domain at the level below; 0 for a rank."""
    heads: _Ints
    """Leaders of the domains at the level below, (domains, chunks)."""

    def leader_in_chain(self, position: int) -> _Ints:
        """Return, for each run, the leader at a position of the domain's chain.

        The chain starts at the owner's member, goes on with the leading one, then follows the order of the members.
        """
        has_owner = self.owner_place >= 0
        first = (self.place + (self.place == self.owner_place)) % self.num_members
        skips = has_owner & (position > (self.owner_place - first) % self.num_members)
        within = np.where(has_owner, first - self.place + position - 1 + skips, position)
        start = np.where(has_owner, self.owner_place - self.place, 0)
        return self.leader_at_distance(start if position == 0 else within)

    def leader_at_distance(self, distance: int | _Ints) -> _Ints:
        """Return, for each run, the leader of the member `distance` places after the leading member."""
        member = self.members_at + (self.place + np.asarray(distance, np.int32)) % self.num_members
        ranks = self.rank_of[member]
        if self.heads.size:
            ranks = np.where(ranks >= 0, ranks, self.heads[self.domain_of[member], self.first_chunk])
        return ranks


class DomainTree:
    """A tree of domains, checked and indexed.

    Raises:
        ScheduleError: A domain has no member, or leaders for another number of chunks, or the tree does not name every
            rank from 0 once.
    """

    def __init__(self, top: Domain, num_chunks: int) -> None:
        self._domains: list[list[Domain]] = []
        self._parents: list[list[tuple[int, int]]] = []  # for each domain its parent and its index in it
        below, parents = [top], [(0, 0)]
        while below:
            self._domains.append(below)
            self._parents.append(parents)
            places = [(i, p) for i, domain in enumerate(below) for p in range(len(domain.members))]
            parents = [(i, p) for i, p in places if isinstance(below[i].members[p], Domain)]
            below = [member for domain in below for member in domain.members if isinstance(member, Domain)]
        self._parents.append([])  # below the deepest
        self._check_domains(num_chunks)
        self.num_ranks = self._count_ranks()
        self._within = self._domain_of_ranks()

    def levels(
        self, chunks: Sequence[int], root: int | None = None, owners: Sequence[int] | None = None
    ) -> list[DomainLevel]:
        """Return the levels from the top down, for the named chunks, which are renumbered from 0.

        Args:
            chunks: Indices into `Domain.leaders`.
            root: A rank that owns all chunks, and leads only where it is alone: next to it other members lead in turn
                what it should lead. None keeps the leaders.
            owners: Rank that owns each of these chunks; None if owners do not matter.

        Raises:
            ScheduleError: A domain's leader leads none of its members.

        Cost:
            Four bytes for each domain and chunk.
        """
        kept, heads, built = np.asarray(chunks, np.intp), np.zeros((0, 0), np.int32), []
        owners = owners if root is None else [root] * len(kept)
        for depth in reversed(range(len(self._domains))):
            leaders = np.stack([self._checked_leaders(depth, at)[kept] for at in range(len(self._domains[depth]))])
            if root is not None and self._within[depth][0, root] >= 0:
                self._relieve_root(depth, leaders[self._within[depth][0, root]], root, heads)
            level, of_run = self._level(depth, leaders, heads, owners)
            self._check_leaders(depth, level, of_run, kept)
            built.append(level)
            heads = leaders
        return built[::-1]

    def _relieve_root(self, depth: int, leaders: _Ints, root: int, heads: _Ints) -> None:
        """Let other members than the root lead its domain; above, the leaders follow those of its member."""
        at, own_place = self._within[depth][:, root]
        members = self._domains[depth][at].members
        place = self._within[depth][1, leaders]
        if members[own_place] == root and len(members) > 1:
            mine = np.flatnonzero(place == own_place)
            place[mine] = (own_place + 1 + np.arange(len(mine)) % (len(members) - 1)) % len(members)
        first_head = sum(isinstance(m, Domain) for domain in self._domains[depth][:at] for m in domain.members)
        below = first_head + np.cumsum([isinstance(member, Domain) for member in members]) - 1
        for index in np.unique(place):
            led = place == index
            member = members[index]
            leaders[led] = heads[below[index], led] if isinstance(member, Domain) else member

    def _level(
        self, depth: int, leaders: _Ints, heads: _Ints, owners: Sequence[int] | None
    ) -> tuple[DomainLevel, _Ints]:
        domains, owner_places = self._domains[depth], self._owner_places(depth, leaders.shape, owners)
        begins = np.ones(leaders.shape, np.bool_)
        begins[:, 1:] = (leaders[:, 1:] != leaders[:, :-1]) | (owner_places[:, 1:] != owner_places[:, :-1])
        for (parent, _), head in zip(self._parents[depth + 1], heads, strict=True):
            begins[parent, 1:] |= head[1:] != head[:-1]
        of_run, first = (column.astype(np.int32) for column in np.nonzero(begins))
        end = np.where(np.append(of_run[1:] == of_run[:-1], False), np.roll(first, -1), leaders.shape[1])
        members = [member for domain in domains for member in domain.members]
        ranks = np.array([-1 if isinstance(member, Domain) else member for member in members], np.int32)
        sizes = np.array([len(domain.members) for domain in domains], np.int32)
        leader = leaders[of_run, first]
        level = DomainLevel(
            first_chunk=first,
            num_chunks=(end - first).astype(np.int32),
            num_members=sizes[of_run],
            members_at=(np.cumsum(sizes, dtype=np.int32) - sizes)[of_run],
            leader=leader,
            place=self._within[depth][1, leader],
            owner_place=owner_places[of_run, first],
            rank_of=ranks,
            domain_of=np.where(ranks < 0, np.cumsum(ranks < 0) - 1, 0).astype(np.int32),
            heads=heads,
        )
        return level, of_run

    def _owner_places(self, depth: int, shape: tuple[int, ...], owners: Sequence[int] | None) -> _Ints:
        """Return the member with the owner, (domains, chunks); -1 where the owner is outside of the domain."""
        places = np.full(shape, -1, np.int32)
        if owners is not None:
            domain, place = self._within[depth][:, np.asarray(owners, np.intp)]
            inside = np.flatnonzero(domain >= 0)
            places[domain[inside], inside] = place[inside]
        return places

    def _checked_leaders(self, depth: int, at: int) -> _Ints:
        given = np.asarray(self._domains[depth][at].leaders)
        outside = given if given.dtype.kind not in "iu" else given[(given < 0) | (given >= self.num_ranks)]
        if len(outside):
            raise _wrong_leader_error(outside.tolist()[0], f"a rank from 0 to {self.num_ranks - 1}", depth, at)
        return given.astype(np.int32)

    def _check_leaders(self, depth: int, level: DomainLevel, of_run: _Ints, kept: NDArray[np.intp]) -> None:
        wrong = (self._within[depth][0, level.leader] != of_run) | (level.leader_at_distance(0) != level.leader)
        if wrong.any():
            at = int(np.argmax(wrong))
            expected = f"the leader of one of its members for chunk {kept[level.first_chunk[at]]}"
            raise _wrong_leader_error(int(level.leader[at]), expected, depth, int(of_run[at]))

    def _check_domains(self, num_chunks: int) -> None:
        for domains in self._domains:
            for domain in domains:
                if not domain.members:
                    raise ScheduleError("domain: no members, expected at least one. Leave empty domains out.")
                if len(domain.leaders) != num_chunks:
                    got, expected = len(domain.leaders), f"{num_chunks}, one per share"
                    raise ScheduleError("leaders of a domain", got=got, expected=expected, do="Name one each")

    def _count_ranks(self) -> int:
        members = (m for domains in self._domains for domain in domains for m in domain.members)
        ranks = sorted(member for member in members if not isinstance(member, Domain))
        if ranks != list(range(len(ranks))):
            expected = f"every rank from 0 to {len(ranks) - 1} once"
            raise ScheduleError("ranks of the domains", got=ranks, expected=expected, do="List each once")
        return len(ranks)

    def _domain_of_ranks(self) -> list[_Ints]:
        """Return, at each depth and for each rank, its domain (or -1) and the index of its member in it."""
        # The domain of a rank that is not at that depth is -1, its place any.
        within = [np.full((2, self.num_ranks), -1, np.int32) for _ in self._domains]
        for depth, domains in enumerate(self._domains):
            for at, domain in enumerate(domains):
                ranks = [(p, member) for p, member in enumerate(domain.members) if not isinstance(member, Domain)]
                for place, rank in ranks:
                    index = at, place
                    for above in range(depth, -1, -1):
                        within[above][:, rank] = index
                        index = self._parents[above][index[0]]
        return within


def _wrong_leader_error(got: object, expected: str, depth: int, at: int) -> ScheduleError:
    where = f"depth {depth}, domain {at}"
    return ScheduleError("leader of a domain", got=got, expected=expected, do="Choose one of these", where=where)


def multi_level(domain: Domain, shares: Sequence[int]) -> Schedule:
    """Allreduce over a tree of domains, with its own path for each chunk.

    From the deepest level up, the leaders of a domain's members send a chunk to the domain's leader of that chunk: in
    round t it is the leader of the member t places (cyclically) after the leader's own. Then the complete chunks come
    down on the same path. All domains of a level and all chunks work at the same time; neighbouring chunks
    between the same two ranks are one operation; a rank that leads on several levels sends itself nothing.

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
    """Run `multi_level` with a separate tree for each of several parts of the message, all at the same time.

    So a domain can send one partial sum for some bytes and several for others. Where a rack is a domain of one tree and
    its nodes are members of the domain above in another, both its uplink and its nodes can have the best load.

    Args:
        stripes: The parts, in the order of the message, over the same ranks.

    Raises:
        ScheduleError: As `multi_level`; or the trees have different ranks.
    """
    up = [multi_level_reduce_scatter(domain, shares) for domain, shares in stripes]
    down = [multi_level_allgather(domain, shares) for domain, shares in stripes]
    return compose_allreduce("multi-level", compose_side_by_side(*up), compose_side_by_side(*down))


def multi_level_reduce_scatter(domain: Domain, shares: Sequence[int]) -> Schedule:
    """The upward half of `multi_level`: the leaders of the whole tree own the chunks."""

    def up(level: DomainLevel, distance: int) -> Round:
        return _level_round(level, distance, level.leader_at_distance(distance), level.leader, ReceiveOp.REDUCE)

    return _multi_level_half("reduce-scatter", domain, shares, up)


def multi_level_allgather(domain: Domain, shares: Sequence[int], owners: Sequence[int] | None = None) -> Schedule:
    """Allgather over a tree of domains; without `owners`, the downward half of `multi_level`.

    A chunk climbs from its owner: on each level, from the deepest up, the leader of the owner's member sends it to the
    leader of the domain, if that is another rank. Then it comes down from the leader of the whole tree: each domain's
    leader sends it to the leaders of the other members, except the member of the owner, which has it already. So every
    rank receives each chunk once, and each domain lets it in once. `mirror` makes the reduce-scatter of the same
    owners.

    Args:
        domain: The tree; its depth may vary.
        shares: Relative size of each chunk; a chunk of share 0 is left out.
        owners: Rank that owns each chunk; None is the chunk's leader of the whole tree.

    Raises:
        ScheduleError: As `multi_level`; or an owner is no rank of the tree.

    Cost:
        Of a chunk, the leader of a domain of m members sends m-1 times its size on that level, or m-2 times if another
        member has the owner.
    """

    def down(level: DomainLevel, distance: int) -> Round:
        lacks = (level.place + np.int32(distance)) % level.num_members != level.owner_place
        src, dst = level.leader, level.leader_at_distance(distance)
        return _level_round(level, distance, src, dst, ReceiveOp.COPY, lacks)

    if owners is None:
        return _multi_level_half("allgather", domain, shares, down)
    kept, tree = _chunks_with_share(shares), DomainTree(domain, len(shares))
    outside = [owner for owner in owners if not 0 <= owner < tree.num_ranks]
    if outside:
        expected = f"ranks 0..{tree.num_ranks - 1}"
        raise ScheduleError("owner", got=outside[0], expected=expected, do="Name ranks of the tree")
    owner_of_kept, kept_shares = tuple(owners[chunk] for chunk in kept), tuple(shares[chunk] for chunk in kept)
    levels = tree.levels(kept, owners=owner_of_kept)
    climbs = [(f"allgather to leaders at depth {d}", _climb_rounds(level)) for d, level in enumerate(levels)]
    falls = [(f"allgather at depth {d}", _used_rounds(_level_rounds(level, down))) for d, level in enumerate(levels)]
    rounds, phases = concatenate_rounds(*climbs[::-1], *falls)
    collective = Collective("allgather", owner_of_kept)
    return Schedule("multi-level allgather", collective, tree.num_ranks, kept_shares, rounds, phases)


def block_owners(shares: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the rank that owns each chunk, if the chunks are cuts of equal blocks in the order of the ranks.

    Raises:
        ScheduleError: A chunk reaches over the border of two blocks.
    """
    per_block, rest = divmod(sum(shares), num_ranks)
    ends = list(accumulate(shares))
    firsts = [min(end - share, sum(shares) - 1) for end, share in zip(ends, shares, strict=True)]
    owners = tuple(first // per_block if per_block else 0 for first in firsts)
    if rest or any(end > per_block * (owner + 1) for end, owner in zip(ends, owners, strict=True)):
        expected = f"{num_ranks} blocks of equal size, each cut into whole chunks"
        raise ScheduleError("shares", got=tuple(shares)[:8], expected=expected, do="Cut block by block")
    return owners


def _climb_rounds(level: DomainLevel) -> Sequence[Round]:
    """Return the round in which chunks go from the leaders of their owners' members to the leaders of the domains."""
    climbs = (level.owner_place >= 0) & (level.owner_place != level.place)
    src = level.leader_at_distance(level.owner_place - level.place)
    ops = _join_neighbours(_run_operations(level, src, level.leader, ReceiveOp.COPY).select(climbs))
    return _used_rounds([ops])


def _used_rounds(rounds: Sequence[Round]) -> Sequence[Round]:
    """Return the rounds without those that have no operation."""
    used = [index for index, round_ in enumerate(rounds) if len(round_)]
    return LazyRounds(len(used), lambda index: rounds[used[index]])


def multi_level_broadcast(domain: Domain, shares: Sequence[int], root: int) -> Schedule:
    """Broadcast over a tree of domains, along a chain of the members' leaders in each domain.

    In each domain of the root the chain starts at its member and goes on with the leader of the domain, who also passes
    the chunk on in the domain above: the root sends each chunk once. Different chunks enter and leave a domain by
    different ranks. A chain, because the link of each domain carries the message once, and segments follow each other.

    Args:
        domain: The tree. Where the root should lead next to other ranks, these lead in turn instead.
        shares: Relative size of each chunk; a chunk of share 0 is left out.
        root: The rank that has the message.

    Returns:
        A schedule of m-1 rounds for each level whose largest domain has m members, and one more where chunks climb.

    Raises:
        ScheduleError: As `multi_level`; or the root is no rank of the tree.
    """
    tree = DomainTree(domain, len(shares))
    if not 0 <= root < tree.num_ranks:
        raise ScheduleError("root", got=root, expected=f"ranks 0..{tree.num_ranks - 1}", do="Name a rank of the tree")
    kept = _chunks_with_share(shares)
    levels = tree.levels(kept, root)

    def along(level: DomainLevel, distance: int) -> Round:
        src, dst = level.leader_in_chain(distance - 1), level.leader_in_chain(distance)
        climbed = (level.owner_place >= 0) & (level.owner_place != level.place) & (level is not levels[0])
        return _level_round(level, distance, src, dst, ReceiveOp.COPY, ~climbed | (distance > 1))

    climbs = [(f"broadcast to leaders at depth {d}", _climb_rounds(level)) for d, level in enumerate(levels) if d]
    falls = [(f"broadcast at depth {d}", _used_rounds(_level_rounds(level, along))) for d, level in enumerate(levels)]
    rounds, phases = concatenate_rounds(*climbs[::-1], *falls)
    collective = Collective("broadcast", root=root)
    kept_shares = tuple(shares[chunk] for chunk in kept)
    return Schedule("multi-level broadcast", collective, tree.num_ranks, kept_shares, rounds, phases)


def _multi_level_half(
    kind: CollectiveKind, domain: Domain, shares: Sequence[int], move: Callable[[DomainLevel, int], Round]
) -> Schedule:
    kept = _chunks_with_share(shares)
    tree = DomainTree(domain, len(shares))
    parts = [(f"{kind} at depth {d}", _level_rounds(level, move)) for d, level in enumerate(tree.levels(kept))]
    rounds, phases = concatenate_rounds(*(parts if kind == "allgather" else parts[::-1]))
    collective = Collective(kind, tuple(domain.leaders[chunk] for chunk in kept))
    kept_shares = tuple(shares[chunk] for chunk in kept)
    return Schedule(f"multi-level {kind}", collective, tree.num_ranks, kept_shares, rounds, phases)


def _chunks_with_share(shares: Sequence[int]) -> list[int]:
    """Return the chunks with a share above 0; all, for Schedule to refuse, where there are none."""
    return [chunk for chunk, share in enumerate(shares) if share] or list(range(len(shares)))


def _level_rounds(level: DomainLevel, move: Callable[[DomainLevel, int], Round]) -> LazyRounds:
    return LazyRounds(int(level.num_members.max(initial=1)) - 1, lambda index: move(level, index + 1))


def _level_round(
    level: DomainLevel, distance: int, src: _Ints, dst: _Ints, how: ReceiveOp, is_due: NDArray[np.bool_] | None = None
) -> Round:
    """Return one operation per run of each domain with enough members, merged with its neighbour where possible.

    Runs that are not due have none; None is that all are.
    """
    ops, takes_part = _run_operations(level, src, dst, how), level.num_members > distance
    if is_due is not None:
        takes_part &= is_due
    return _join_neighbours(ops if takes_part.all() else ops.select(takes_part))


def _run_operations(level: DomainLevel, src: _Ints, dst: _Ints, how: ReceiveOp) -> Round:
    return Round(src, dst, level.first_chunk, level.num_chunks, np.full(len(src), how, np.uint8))


def _join_neighbours(ops: Round) -> Round:
    first, end = ops.first_chunk, ops.first_chunk + ops.num_chunks
    goes_on = np.zeros(len(ops), np.bool_)
    goes_on[1:] = (ops.src[1:] == ops.src[:-1]) & (ops.dst[1:] == ops.dst[:-1]) & (first[1:] == end[:-1])
    if not goes_on.any():
        return ops
    begins = np.flatnonzero(~goes_on)
    lasts = np.append(begins[1:] - 1, len(ops) - 1)
    return Round(ops.src[begins], ops.dst[begins], first[begins], end[lasts] - first[begins], ops.how[begins])
