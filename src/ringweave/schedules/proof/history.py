"""One chunk's life, replayed exactly for any number of ranks: who held whose contribution, when, and by which way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ringweave.schedules.schedule import How, Schedule


@dataclass(frozen=True, slots=True)
class Hop:
    """The chunk's way from rank to rank in one round."""

    index: int
    src: int
    dst: int
    how: How


@dataclass(frozen=True, slots=True)
class Version:
    """What a rank held, as bits of contributors, until its next version."""

    since: int
    """Round that brought it; -1 is before the first."""
    content: int
    hop: Hop | None
    """Which operation of that round."""


class Versions:
    """Every rank's contents of the chunk, oldest first."""

    def __init__(self, starts: Sequence[int], wanted: int, wanting: Sequence[int]) -> None:
        self.wanted = wanted
        self._wanting = wanting
        self._of = [[Version(-1, content, None)] for content in starts]

    def apply(self, hop: Hop, arriving: int) -> None:
        """A hop has brought `arriving`."""
        mine = self._of[hop.dst][-1].content if hop.how == How.REDUCE else 0
        self._of[hop.dst].append(Version(hop.index, mine | arriving, hop))

    def before(self, rank: int, index: int) -> Version:
        """What `rank` held when round `index` began."""
        return next(version for version in reversed(self._of[rank]) if version.since < index)

    def missing(self, rank: int) -> int:
        """What `rank` lacks at the end of what it should hold."""
        return self.wanted & ~self._of[rank][-1].content if rank in self._wanting else 0

    def route(self, contributor: int, rank: int, index: int) -> list[Hop]:
        """By which hops the contribution came to `rank`, which held it when round `index` began."""
        hops: list[Hop] = []
        while True:
            hop = self.before(rank, index).hop
            if hop is None:
                return hops[::-1]
            index = hop.index
            if hop.how == How.COPY or self.before(hop.src, index).content >> contributor & 1:
                hops.append(hop)
                rank = hop.src

    def extinct(self) -> int:
        """The contributions that nobody holds at the end."""
        left = 0
        for versions in self._of:
            left |= versions[-1].content
        return self.wanted & ~left

    def last_arrival(self, contributors: int) -> tuple[int, int, Version]:
        """Of all arrivals of these contributions anywhere the last: contributor, the rank it came to, its version."""
        latest: tuple[int, int, Version] | None = None
        for rank, versions in enumerate(self._of):
            held = 0
            for version in versions:
                new = version.content & ~held & contributors
                if new and (latest is None or version.since > latest[2].since):
                    latest = (new & -new).bit_length() - 1, rank, version
                held = version.content
        assert latest is not None, "every contribution is held somewhere at first"
        return latest

    def kept(self, contributor: int, rank: int, version: Version) -> tuple[Version, Hop | None]:
        """After the contribution came to `rank` with `version`: the last version that has it, the hop that ends it."""
        for later in self._of[rank]:
            if later.since > version.since:
                if not later.content >> contributor & 1:
                    return version, later.hop
                version = later
        return version, None

    def copies(self, rank: int) -> list[Hop]:
        """The copies, oldest first, that brought what `rank` ends with from the rank where it arose."""
        hops: list[Hop] = []
        version = self._of[rank][-1]
        while version.hop is not None and version.hop.how == How.COPY:
            hops.append(version.hop)
            version = self.before(version.hop.src, version.since)
        return hops[::-1]


def replay(schedule: Schedule, chunk: int) -> tuple[Versions, Hop | None]:
    """Run the chunk's operations until the first that is wrong in itself.

    Returns:
        What was held until then, and that hop; None if there is none.

    Cost:
        One pass over the rounds, and a set of contributors per operation on this chunk.
    """
    versions = _at_start(schedule, chunk)
    for index, hops in groupby(_hops(schedule, chunk), key=lambda hop: hop.index):
        arriving = []
        for hop in hops:
            mine, theirs = versions.before(hop.dst, index).content, versions.before(hop.src, index).content
            bad = mine & theirs if hop.how == How.REDUCE else mine == theirs
            if bad or not theirs:
                return versions, hop
            arriving.append((hop, theirs))
        for hop, content in arriving:
            versions.apply(hop, content)
    return versions, None


def members(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2, 4`, or the first eight and how many more."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _at_start(schedule: Schedule, chunk: int) -> Versions:
    collective, everybody = schedule.collective, range(schedule.num_ranks)
    one = collective.root if collective.owners is None else collective.owners[chunk]
    starts = [1 << r if collective.reduces or r == one else 0 for r in everybody]
    if not collective.reduces:
        assert one is not None
        return Versions(starts, 1 << one, everybody)
    return Versions(starts, (1 << schedule.num_ranks) - 1, everybody if one is None else (one,))


def _hops(schedule: Schedule, chunk: int) -> list[Hop]:
    hops = []
    for index, round_ in enumerate(schedule.rounds):
        mask = (round_.first_chunk <= chunk) & (round_.first_chunk + round_.num_chunks > chunk)
        if mask.any():
            hops += [Hop(index, src, dst, how) for src, dst, _, _, how in round_.where(mask).rows()]
    return hops
