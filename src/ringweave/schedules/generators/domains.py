"""Domains of ranks inside domains, each with a leader per chunk, and the flat tables by which a whole level works.

Racks of nodes of ranks, for instance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError, explain

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Domain:
    """Ranks, or domains of ranks, that are near each other. A bare rank leads itself for every chunk."""

    members: tuple["Domain | int", ...]
    """Ranks or domains below."""
    leaders: tuple[int, ...]
    """For each chunk the rank that leads this domain: the leader of one of its members."""

    def walk(self) -> Iterator["Domain"]:
        """This one and all domains below it, each before those below it."""
        yield self
        for member in self.members:
            if isinstance(member, Domain):
                yield from member.walk()


class Stripe(NamedTuple):
    """A part of a message that goes through a tree of its own."""

    domain: Domain
    """The tree."""
    shares: tuple[int, ...]
    """Relative size of each chunk, in units that are the same for all parts of the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """All domains of one depth. A run is a stretch of chunks over which no leader in its domain changes."""

    first_chunk: _Ints
    """For each run, like the next five."""
    num_chunks: _Ints
    num_members: _Ints
    """Members of its domain."""
    members_at: _Ints
    """Where its domain's members begin in `rank_of` and `domain_of`."""
    leader: _Ints
    """The domain's leader."""
    place: _Ints
    """Which of these members leads the domain."""
    rank_of: _Ints
    """For each member: the rank, or -1 for a domain."""
    domain_of: _Ints
    """For each member: which of the domains of the level below; 0 for a rank."""
    heads: _Ints
    """Leaders of the domains of the level below, (domains, chunks)."""

    def leader_after(self, distance: int) -> _Ints:
        """For each run the leader of the member that is `distance` places after the one that leads the domain."""
        member = self.members_at + (self.place + np.int32(distance)) % self.num_members
        ranks = self.rank_of[member]
        if self.heads.size:
            ranks = np.where(ranks >= 0, ranks, self.heads[self.domain_of[member], self.first_chunk])
        return ranks


class Tree:
    """A tree of domains, checked and counted.

    Raises:
        ScheduleError: A domain has no member, or leaders for another number of chunks, or the tree does not name every
            rank from 0 once.
    """

    def __init__(self, top: Domain, num_chunks: int) -> None:
        self._domains: list[list[Domain]] = []
        self._parents: list[list[tuple[int, int]]] = []  # for each domain its parent and its place in it
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
        self._within = self._find_ranks()

    def levels(self, chunks: Sequence[int], root: int | None = None) -> list[Level]:
        """From the top down, for the chunks that are named; these get numbers from 0.

        Args:
            chunks: Which entries of `Domain.leaders` count.
            root: A rank that leads every domain it is in, whatever the leaders say; None leaves them as they are.

        Raises:
            ScheduleError: A domain's leader leads none of its members.

        Cost:
            Four bytes for each domain and chunk.
        """
        kept, heads, built = np.asarray(chunks, np.intp), np.zeros((0, 0), np.int32), []
        for depth in reversed(range(len(self._domains))):
            leaders = np.stack([self._leaders(depth, at)[kept] for at in range(len(self._domains[depth]))])
            if root is not None and self._within[depth][0, root] >= 0:
                leaders[self._within[depth][0, root]] = root
            level, of_run = self._level(depth, leaders, heads)
            self._check_leaders(depth, level, of_run, kept)
            built.append(level)
            heads = leaders
        return built[::-1]

    def _level(self, depth: int, leaders: _Ints, heads: _Ints) -> tuple[Level, _Ints]:
        """The level, and for each of its runs the domain."""
        domains = self._domains[depth]
        begins = np.ones(leaders.shape, np.bool_)
        begins[:, 1:] = leaders[:, 1:] != leaders[:, :-1]
        for (parent, _), head in zip(self._parents[depth + 1], heads, strict=True):
            begins[parent, 1:] |= head[1:] != head[:-1]
        of_run, first = (column.astype(np.int32) for column in np.nonzero(begins))
        end = np.where(np.append(of_run[1:] == of_run[:-1], False), np.roll(first, -1), leaders.shape[1])
        members = [member for domain in domains for member in domain.members]
        ranks = np.array([-1 if isinstance(member, Domain) else member for member in members], np.int32)
        sizes = np.array([len(domain.members) for domain in domains], np.int32)
        leader = leaders[of_run, first]
        level = Level(
            first_chunk=first,
            num_chunks=(end - first).astype(np.int32),
            num_members=sizes[of_run],
            members_at=(np.cumsum(sizes, dtype=np.int32) - sizes)[of_run],
            leader=leader,
            place=self._within[depth][1, leader],
            rank_of=ranks,
            domain_of=np.where(ranks < 0, np.cumsum(ranks < 0) - 1, 0).astype(np.int32),
            heads=heads,
        )
        return level, of_run

    def _leaders(self, depth: int, at: int) -> _Ints:
        given = np.asarray(self._domains[depth][at].leaders)
        outside = given if given.dtype.kind not in "iu" else given[(given < 0) | (given >= self.num_ranks)]
        if len(outside):
            raise _wrong_leader(outside.tolist()[0], f"a rank from 0 to {self.num_ranks - 1}", depth, at)
        return given.astype(np.int32)

    def _check_leaders(self, depth: int, level: Level, of_run: _Ints, kept: NDArray[np.intp]) -> None:
        wrong = (self._within[depth][0, level.leader] != of_run) | (level.leader_after(0) != level.leader)
        if wrong.any():
            at = int(np.argmax(wrong))
            expected = f"the leader of one of its members for chunk {kept[level.first_chunk[at]]}"
            raise _wrong_leader(int(level.leader[at]), expected, depth, int(of_run[at]))

    def _check_domains(self, num_chunks: int) -> None:
        for domains in self._domains:
            for domain in domains:
                if not domain.members:
                    raise ScheduleError("domain: no members, expected at least one. Leave empty domains out.")
                if len(domain.leaders) != num_chunks:
                    got, expected = len(domain.leaders), f"{num_chunks}, one per share"
                    raise ScheduleError(explain("leaders of a domain", got=got, expected=expected, do="Name one each"))

    def _count_ranks(self) -> int:
        members = (m for domains in self._domains for domain in domains for m in domain.members)
        ranks = sorted(member for member in members if not isinstance(member, Domain))
        if ranks != list(range(len(ranks))):
            expected = f"every rank from 0 to {len(ranks) - 1} once"
            raise ScheduleError(explain("ranks of the domains", got=ranks, expected=expected, do="List each once"))
        return len(ranks)

    def _find_ranks(self) -> list[_Ints]:
        """At each depth, for each rank: the domain that it is in, or -1, and in which member of it."""
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


def _wrong_leader(got: object, expected: str, depth: int, at: int) -> ScheduleError:
    where = f"depth {depth}, domain {at}"
    return ScheduleError(
        explain("leader of a domain", got=got, expected=expected, do="Choose one of these", where=where)
    )
