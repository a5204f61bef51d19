"""Load of a schedule on a network: bytes on each link, waves of dependent rounds, messages of each rank.

Rounds are read one after the other and never kept. Operations between ranks become operations between nodes; one sum
over the tree for a whole wave turns these into loads of links.

A *wave* is a run of rounds in which no rank sends on what it received in the same run, so all its messages can be in
flight together. A ring of N has 2(N-1) waves of one round; a direct allreduce has two waves of N-1 rounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.cost.network import Floats, GroupNetwork, Ints, group_network
from ringweave.errors import PlacementError
from ringweave.schedules import Round, Schedule, WireEncoding, wire_formats
from ringweave.topology import Cluster

_MAX_WATCHED_CELLS = 200_000
_SAMPLED_CHUNKS = 64


@dataclass(frozen=True, slots=True, eq=False)
class WaveLoad:
    """Load of some rounds, in units; the message has `ScheduleLoads.num_units` of them."""

    up: Floats
    """For each vertex, the traffic that leaves its subtree."""
    down: Floats
    """For each vertex, the traffic that enters its subtree."""
    inside: Floats
    """For each rank, the traffic from ranks of its own node."""
    coded: Floats
    """For each rank, the units that it encodes or decodes; they count as what they are when decoded."""


def bytes_on_links(
    schedule: Schedule,
    cluster: Cluster,
    node_of_rank: Sequence[str],
    num_bytes: int,
) -> dict[str, float]:
    """Return the bytes on each link between the nodes of a group in one run of a schedule.

    It is the theoretical number: chunks are not rounded to whole elements, and headers are not counted.

    `schedule`: schedule to run, in segments or as a whole; that makes no difference.

    Raises:
        PlacementError: Not one node per rank.
        ClusterError: A node is not in the cluster.

    Cost:
        One pass over the rounds.
    """
    net = group_network(cluster, node_of_rank)
    loads = ScheduleLoads(schedule, net, vertices_of_ranks(net, node_of_rank))
    total = np.zeros((2, len(net)))
    for load in loads.wave_loads():
        total += load.up, load.down
    total *= num_bytes / loads.num_units
    named = ((net.up_name, total[0]), (net.down_name, total[1]))
    return {name(vertex): float(column[vertex]) for vertex in range(1, len(net)) for name, column in named}


def vertices_of_ranks(net: GroupNetwork, node_of_rank: Sequence[str]) -> Ints:
    """Return the vertex of each rank's node."""
    place = {name: vertex for vertex, name in enumerate(net.names)}
    return np.array([place[name] for name in node_of_rank], np.int64)


class ScheduleLoads:
    """One pass over a schedule's rounds.

    Raises:
        PlacementError: Not one vertex per rank.
    """

    def __init__(self, schedule: Schedule, net: GroupNetwork, vertex_of_rank: Ints) -> None:
        if len(vertex_of_rank) != schedule.num_ranks:
            got, expected = len(vertex_of_rank), f"{schedule.num_ranks}, one per rank of {schedule.name}"
            raise PlacementError("nodes of ranks", got=got, expected=expected, do="Name each rank's node")
        self._schedule = schedule
        self._net = net
        self._vertex_of_rank = vertex_of_rank
        self._borders = np.concatenate([[0.0], np.cumsum(np.array(schedule.shares, np.float64))])
        self._waves = _WaveDetector(schedule)
        self._ratio = wire_formats.format_named(schedule.encoding.format).ratio if schedule.encoding else 1.0
        self._splits_transfers = schedule.collective.owners is not None
        self.num_units = float(self._borders[-1])
        """Size of the message in units."""
        self.num_sends = np.zeros(schedule.num_ranks, np.int64)
        """Messages that each rank has sent so far, in one segment."""
        self.num_receives = np.zeros(schedule.num_ranks, np.int64)
        """Messages that each rank has received so far, in one segment."""
        self.num_chunk_sends = np.zeros(schedule.num_ranks, np.int64)
        """The same for each of several segments: where chunks have owners, a transfer of several chunks is one message
        for each of them."""
        self.num_chunk_receives = np.zeros(schedule.num_ranks, np.int64)
        self.streams_meet = False
        """Some rank has received from more than one other rank so far."""
        self._source = np.full(schedule.num_ranks, -1, np.int64)
        self.largest_units = 0.0
        """The largest operation so far."""
        self.largest_chunk_units = 0.0
        """The largest operation so far, or, where chunks have owners, the largest chunk."""

    def wave_loads(self) -> Iterator[WaveLoad]:
        """Yield the load of each wave in order; nothing for a schedule without rounds.

        A one-round wave that equals the one before it, as in a ring, is the same object again.
        """
        sums = _LoadSums(self._net, self._vertex_of_rank, self._schedule.encoding)
        load, last, rounds_in_wave = None, None, 0
        is_even = len(set(self._schedule.shares)) == 1
        repeated: _SizedRound | None = None  # equal to the round before, as long as it is alone in its wave
        for round_ in self._schedule.rounds:
            begins = self._waves.starts_new_wave(round_)
            moved = _SizedRound.from_round(round_, self._borders, last, is_even=is_even)
            self._count(moved)
            if begins:
                if last:
                    load = load if repeated and load else sums.take_load()
                    yield load
                repeated = moved if moved.is_repeated and rounds_in_wave == 1 else None
                rounds_in_wave = 0
            elif repeated:
                sums.add(repeated)
                repeated = None
            rounds_in_wave += 1
            if not repeated:
                sums.add(moved)
            last = moved
        if last:
            yield load if repeated and load else sums.take_load()

    def _count(self, moved: "_SizedRound") -> None:
        round_ = moved.round
        if not moved.is_repeated:
            ranks, is_sent = self._schedule.num_ranks, moved.units > 0
            self._receives = np.bincount(round_.dst[is_sent], minlength=ranks)
            self._sends = np.bincount(round_.src[is_sent], minlength=ranks)
            self._note_sources(round_.src[is_sent], round_.dst[is_sent])
            self.largest_units = max(self.largest_units, float(moved.units.max(initial=0)))
            self._count_chunks(round_)
        self.num_receives += self._receives
        self.num_sends += self._sends
        self.num_chunk_receives += self._chunk_receives
        self.num_chunk_sends += self._chunk_sends

    def _count_chunks(self, round_: Round) -> None:
        if not self._splits_transfers:
            self._chunk_receives, self._chunk_sends = self._receives, self._sends
            self.largest_chunk_units = self.largest_units * self._ratio
            return
        ranks = self._schedule.num_ranks
        self._chunk_receives = np.bincount(round_.dst, round_.num_chunks, ranks).astype(np.int64)
        self._chunk_sends = np.bincount(round_.src, round_.num_chunks, ranks).astype(np.int64)
        self.largest_chunk_units = float(max(self._schedule.shares)) if self.largest_units else 0.0

    def _note_sources(self, src: NDArray[np.integer], dst: NDArray[np.integer]) -> None:
        known = self._source[dst]
        self._source[dst] = src
        others = ((known >= 0) & (known != src)).any() or (self._source[dst] != src).any()
        self.streams_meet = self.streams_meet or bool(others)


@dataclass(frozen=True, slots=True, eq=False)
class _SizedRound:
    """A round with the size of each operation."""

    round: Round
    units: Floats
    is_repeated: bool
    """Ranks and sizes are those of the round before."""

    @classmethod
    def from_round(cls, round_: Round, borders: Floats, last: "_SizedRound | None", *, is_even: bool) -> "_SizedRound":
        same_ranks = last is not None and round_.src is last.round.src and round_.dst is last.round.dst
        if last and same_ranks and is_even and round_.num_chunks is last.round.num_chunks:
            return cls(round_, last.units, is_repeated=True)
        units = borders[round_.first_chunk + round_.num_chunks] - borders[round_.first_chunk]
        return cls(round_, units, same_ranks and last is not None and np.array_equal(units, last.units))


class _LoadSums:
    """Sums of units by the vertices that they leave, enter and turn around at."""

    def __init__(self, net: GroupNetwork, vertex_of_rank: Ints, encoding: WireEncoding | None) -> None:
        self._net = net
        self._vertex_of_rank = vertex_of_rank
        self._zones = None if encoding is None else np.asarray(encoding.zones)
        self._ratio = 1.0 if encoding is None else wire_formats.format_named(encoding.format).ratio
        self._last: Round | None = None
        self._ends: tuple[Ints, Ints, Ints] = (vertex_of_rank[:0],) * 3
        self._clear()

    def add(self, moved: _SizedRound) -> None:
        round_ = moved.round
        if self._last is None or self._last.src is not round_.src or self._last.dst is not round_.dst:
            src, dst = self._vertex_of_rank[round_.src], self._vertex_of_rank[round_.dst]
            self._ends = src, dst, self._net.lowest_common(src, dst)
            self._last = round_
        units = moved.units if self._zones is None else self._encode(moved, self._zones)
        for at, vertex in enumerate(self._ends):
            self._totals[at] += np.bincount(vertex, units, len(self._net))
        if (inside := self._ends[0] == self._ends[1]).any():
            self._inside += np.bincount(round_.dst[inside], moved.units[inside], len(self._vertex_of_rank))

    def _encode(self, moved: _SizedRound, zones: Ints) -> Floats:
        """Return the units that travel, and count the coding at both ends."""
        src, dst, count = moved.round.src, moved.round.dst, len(self._vertex_of_rank)
        encoded = zones[src] != zones[dst]
        for ends in (src, dst):
            self._coded += np.bincount(ends[encoded], moved.units[encoded], count)
        return np.where(encoded, moved.units * self._ratio, moved.units)

    def take_load(self) -> WaveLoad:
        """Return the load added since the last call."""
        out, into, turning = self._totals
        load = WaveLoad(
            self._net.sums_below(out - turning), self._net.sums_below(into - turning), self._inside, self._coded
        )
        self._clear()
        return load

    def _clear(self) -> None:
        self._totals = np.zeros((3, len(self._net)))
        self._inside, self._coded = np.zeros(len(self._vertex_of_rank)), np.zeros(len(self._vertex_of_rank))


class _WaveDetector:
    """Detects the rounds that depend on earlier rounds of the same wave.

    In large groups it watches a sample of the chunks: the generators treat all chunks of a round alike.
    """

    def __init__(self, schedule: Schedule) -> None:
        count = schedule.num_chunks
        if schedule.num_ranks * count > _MAX_WATCHED_CELLS:
            count = max(1, min(_SAMPLED_CHUNKS, _MAX_WATCHED_CELLS // schedule.num_ranks))
        watched = np.arange(count) * (schedule.num_chunks - 1) // max(1, count - 1)
        self._watched_before = np.searchsorted(watched, np.arange(schedule.num_chunks + 1))
        self._is_sample = count < schedule.num_chunks
        self._written_in = np.zeros((schedule.num_ranks, len(watched)), np.int32)
        self._wave = 0

    def starts_new_wave(self, round_: Round) -> bool:
        """Return whether the round sends content that arrived in this wave, and so starts the next one."""
        op, chunk = self._expanded(round_)
        begins = self._wave == 0 or bool((self._written_in[round_.src[op], chunk] == self._wave).any())
        self._wave += begins
        self._written_in[round_.dst[op], chunk] = self._wave
        return begins

    def _expanded(self, round_: Round) -> tuple[NDArray[np.intp] | slice, NDArray[np.integer]]:
        """Return operations and watched chunks, one pair for each chunk of each operation."""
        first, end = round_.first_chunk, round_.first_chunk + round_.num_chunks
        if self._is_sample:
            first, end = self._watched_before[first], self._watched_before[end]
        counts = end - first
        if (counts == 1).all():
            return slice(None), first
        op = np.repeat(np.arange(len(counts)), counts)
        return op, first[op] + np.arange(len(op)) - np.repeat(np.cumsum(counts) - counts, counts)
