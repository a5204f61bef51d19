"""What a schedule asks of a network: bytes on every link, waves of rounds that wait for each other, messages.

Rounds are read one after the other and never kept. Operations between ranks become operations between nodes, and these
become loads of links by one sum over the tree for a whole wave.

A *wave* is a run of rounds in which nobody sends on what arrived in the same run: its messages can all be under way
together. A ring of N has 2(N-1) waves of one round, a direct allreduce has two of N-1 rounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.cost.network import Floats, Ints, Network, network
from ringweave.errors import PlacementError, explain
from ringweave.schedules import Round, Schedule
from ringweave.topology import Cluster

_MAX_STAMPS = 200_000
_SAMPLED_CHUNKS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What some rounds carry, in units of which `Loads.num_units` are the message."""

    up: Floats
    """For each vertex what leaves it and what is below it."""
    down: Floats
    """For each vertex what enters it."""
    inside: Floats
    """For each rank what it receives from ranks of its own node."""


def bytes_on_links(
    schedule: Schedule,
    cluster: Cluster,
    node_of_rank: Sequence[str],
    num_bytes: int,
) -> dict[str, float]:
    """What each link between the nodes of a group carries in one run of a schedule.

    It is the theory's number: chunks are not rounded to whole elements, and headers are not counted.

    Args:
        schedule: What is run, on segments or on the whole; that makes no difference.
        cluster: Where it is run.
        node_of_rank: Name of the node of each rank.
        num_bytes: Size of the message.

    Raises:
        PlacementError: Not one node per rank.
        ClusterError: A node is not in the cluster.

    Cost:
        One pass over the rounds.
    """
    net = network(cluster, node_of_rank)
    loads = Loads(schedule, net, vertices(net, node_of_rank))
    total = np.zeros((2, len(net)))
    for load in loads.waves():
        total += load.up, load.down
    total *= num_bytes / loads.num_units
    named = ((net.up_name, total[0]), (net.down_name, total[1]))
    return {name(vertex): float(column[vertex]) for vertex in range(1, len(net)) for name, column in named}


def vertices(net: Network, node_of_rank: Sequence[str]) -> Ints:
    """The vertex of each rank's node."""
    place = {name: vertex for vertex, name in enumerate(net.names)}
    return np.array([place[name] for name in node_of_rank], np.int64)


class Loads:
    """One pass over a schedule's rounds.

    Raises:
        PlacementError: Not one vertex per rank.
    """

    def __init__(self, schedule: Schedule, net: Network, vertex_of_rank: Ints) -> None:
        if len(vertex_of_rank) != schedule.num_ranks:
            got, expected = len(vertex_of_rank), f"{schedule.num_ranks}, one per rank of {schedule.name}"
            raise PlacementError(explain("nodes of ranks", got=got, expected=expected, do="Name each rank's node"))
        self._schedule = schedule
        self._net = net
        self._vertex_of_rank = vertex_of_rank
        self._borders = np.concatenate([[0.0], np.cumsum(np.array(schedule.shares, np.float64))])
        self._waves = _Waves(schedule)
        self.num_units = float(self._borders[-1])
        """Units of the message."""
        self.num_sends = np.zeros(schedule.num_ranks, np.int64)
        """Messages that each rank has sent so far."""
        self.num_receives = np.zeros(schedule.num_ranks, np.int64)
        """Messages that each rank has received so far."""
        self.streams_meet = False
        """Whether some rank has received from more than one other rank so far."""
        self._source = np.full(schedule.num_ranks, -1, np.int64)
        self.largest_units = 0.0
        """The largest operation so far."""

    def waves(self) -> Iterator[Load]:
        """The load of each wave in order; nothing for a schedule without rounds.

        A wave of one round like the one before it, as in a ring, is the same object again.
        """
        sums, load, last, rounds_in_wave = _Sums(self._net, self._vertex_of_rank), None, None, 0
        is_even = len(set(self._schedule.shares)) == 1
        held: _Moved | None = None  # a round like the one before, as long as it is alone in its wave
        for round_ in self._schedule.rounds:
            begins = self._waves.begins(round_)
            moved = _Moved.of(round_, self._borders, last, is_even=is_even)
            self._count(moved)
            if begins:
                if last:
                    load = load if held and load else sums.take()
                    yield load
                held = moved if moved.is_repeated and rounds_in_wave == 1 else None
                rounds_in_wave = 0
            elif held:
                sums.add(held)
                held = None
            rounds_in_wave += 1
            if not held:
                sums.add(moved)
            last = moved
        if last:
            yield load if held and load else sums.take()

    def _count(self, moved: "_Moved") -> None:
        round_ = moved.round
        if not moved.is_repeated:
            ranks, is_sent = self._schedule.num_ranks, moved.units > 0
            self._receives = np.bincount(round_.dst[is_sent], minlength=ranks)
            self._sends = np.bincount(round_.src[is_sent], minlength=ranks)
            self._note_sources(round_.src[is_sent], round_.dst[is_sent])
            self.largest_units = max(self.largest_units, float(moved.units.max(initial=0)))
        self.num_receives += self._receives
        self.num_sends += self._sends

    def _note_sources(self, src: NDArray[np.integer], dst: NDArray[np.integer]) -> None:
        known = self._source[dst]
        self._source[dst] = src
        others = ((known >= 0) & (known != src)).any() or (self._source[dst] != src).any()
        self.streams_meet = self.streams_meet or bool(others)


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A round with the size of each operation."""

    round: Round
    units: Floats
    is_repeated: bool
    """Ranks and sizes are those of the round before."""

    @classmethod
    def of(cls, round_: Round, borders: Floats, last: "_Moved | None", *, is_even: bool) -> "_Moved":
        same_ranks = last is not None and round_.src is last.round.src and round_.dst is last.round.dst
        if last and same_ranks and is_even and round_.num_chunks is last.round.num_chunks:
            return cls(round_, last.units, is_repeated=True)
        units = borders[round_.first_chunk + round_.num_chunks] - borders[round_.first_chunk]
        return cls(round_, units, same_ranks and last is not None and np.array_equal(units, last.units))


class _Sums:
    """Units by the vertices they leave, enter and turn round at."""

    def __init__(self, net: Network, vertex_of_rank: Ints) -> None:
        self._net = net
        self._vertex_of_rank = vertex_of_rank
        self._last: Round | None = None
        self._ends: tuple[Ints, Ints, Ints] = (vertex_of_rank[:0],) * 3
        self._clear()

    def add(self, moved: _Moved) -> None:
        """Add what a round carries."""
        round_ = moved.round
        if self._last is None or self._last.src is not round_.src or self._last.dst is not round_.dst:
            src, dst = self._vertex_of_rank[round_.src], self._vertex_of_rank[round_.dst]
            self._ends = src, dst, self._net.lowest_common(src, dst)
            self._last = round_
        for at, vertex in enumerate(self._ends):
            self._totals[at] += np.bincount(vertex, moved.units, len(self._net))
        if (inside := self._ends[0] == self._ends[1]).any():
            self._inside += np.bincount(round_.dst[inside], moved.units[inside], len(self._vertex_of_rank))

    def take(self) -> Load:
        """The load of what was added since the last time."""
        out, into, turning = self._totals
        load = Load(self._net.sums_below(out - turning), self._net.sums_below(into - turning), self._inside)
        self._clear()
        return load

    def _clear(self) -> None:
        self._totals = np.zeros((3, len(self._net)))
        self._inside = np.zeros(len(self._vertex_of_rank))


class _Waves:
    """Notices the rounds that have to wait for what came before.

    Large groups are watched on a sample of their chunks: the generators treat all chunks of a round alike.
    """

    def __init__(self, schedule: Schedule) -> None:
        count = schedule.num_chunks
        if schedule.num_ranks * count > _MAX_STAMPS:
            count = max(1, min(_SAMPLED_CHUNKS, _MAX_STAMPS // schedule.num_ranks))
        watched = np.unique(np.linspace(0, schedule.num_chunks - 1, count).astype(np.int64))
        self._watched_before = np.searchsorted(watched, np.arange(schedule.num_chunks + 1))
        self._is_sample = count < schedule.num_chunks
        self._written_in = np.zeros((schedule.num_ranks, len(watched)), np.int32)
        self._wave = 0

    def begins(self, round_: Round) -> bool:
        """Whether the round sends on what arrived in this wave, and so begins the next one."""
        op, chunk = self._expanded(round_)
        begins = self._wave == 0 or bool((self._written_in[round_.src[op], chunk] == self._wave).any())
        self._wave += begins
        self._written_in[round_.dst[op], chunk] = self._wave
        return begins

    def _expanded(self, round_: Round) -> tuple[NDArray[np.intp] | slice, NDArray[np.integer]]:
        """Operations and watched chunks, one pair for each chunk of each operation."""
        first, end = round_.first_chunk, round_.first_chunk + round_.num_chunks
        if self._is_sample:
            first, end = self._watched_before[first], self._watched_before[end]
        counts = end - first
        if (counts == 1).all():
            return slice(None), first
        op = np.repeat(np.arange(len(counts)), counts)
        return op, first[op] + np.arange(len(op)) - np.repeat(np.cumsum(counts) - counts, counts)
