"""Proof that a schedule computes its collective, before a byte moves; errors name the round, rank and chunk.

Small groups are proved on exact contributor sets (one bit per rank). In large groups every rank contributes a random
number below 2^61 - 1 and sums are taken modulo that prime: a contribution that is missing from the result, or counted
twice in it, leaves the sum right with a chance of one in 2^61. Chunks are independent, so large schedules are verified
in blocks of chunks.

The proof also refuses what cannot be intended even where the result comes out right: operations of one round that race,
sending what the rank does not hold, counting a contribution twice (only exact sets see it where the double count is
overwritten unused), and copying to a rank what it holds already.

In an encoded schedule it also follows which sum each rank ends up with: all must hold copies of one and the same, which
its holder rounds before it is first sent, so that results are bitwise equal. And it counts the roundings that a
contribution passes, from which a bound of the error follows (`RoundingBound`).

The proof often notices a mistake far from its cause: a contribution that took a wrong turn in round 1 is counted twice
in round 7. So the error texts list how the contributions reached their place, operation by operation.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules.roundings import RoundingBound, RoundingCounts
from ringweave.schedules.schedule import Collective, ReceiveOp, Round, Schedule, grid_lines, op_text

MAX_EXACT_RANKS = 64
"""Groups up to this size fit one bit per rank into a 64-bit word."""

_PRIME = np.uint64(2**61 - 1)


class ContentAlgebra(Protocol):
    """Represents contents as one 64-bit word per (rank, chunk)."""

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Return the contents before the first round, (num_ranks, len(chunks))."""
        ...

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Return the contents that the postcondition requires, (len(chunks),)."""
        ...

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the contents after a reduce; the caller checks `invalid_transfers` first."""
        ...

    def invalid_transfers(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Return the transfers that are invalid in themselves, as far as this representation can tell."""
        ...


class ExactSets:
    """Contributor sets as bits: detects every error, up to 64 ranks."""

    _NOTHING = np.uint64(0)

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Return each contributor's own bit."""
        return _initial_contents(collective, self._own(num_ranks), self._NOTHING, chunks)

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Return all bits, or the owner's."""
        own = self._own(num_ranks)
        return _expected_contents(collective, own, np.bitwise_or.reduce(own), chunks)

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return mine | arriving

    def invalid_transfers(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Return transfers without content, double counts, and copies of content that is already there."""
        wrong = np.where(how == ReceiveOp.REDUCE, (mine & arriving) != 0, mine == arriving)
        return wrong | (arriving == self._NOTHING)

    def _own(self, num_ranks: int) -> NDArray[np.uint64]:
        return np.uint64(1) << np.arange(num_ranks, dtype=np.uint64)


class RandomSums:
    """Random numbers modulo 2^61 - 1, one per rank: sums are equal only if they count the same ranks as often.

    A contribution that is counted twice shows in the result, not in the transfer; if the double count is overwritten
    before it is used, only exact sets detect it.
    """

    _NOTHING = np.uint64(2**64 - 1)  # no sum is as large

    def __init__(self, rng: np.random.Generator, num_ranks: int) -> None:
        self._own = rng.integers(1, int(_PRIME), num_ranks, dtype=np.uint64)

    def initial(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Return each contributor's own number."""
        return _initial_contents(collective, self._own, self._NOTHING, chunks)

    def expected(self, collective: Collective, num_ranks: int, chunks: range) -> NDArray[np.uint64]:
        """Return the sum of all numbers, or the owner's."""
        total = np.uint64(sum(int(value) for value in self._own) % int(_PRIME))
        return _expected_contents(collective, self._own, total, chunks)

    def combine(self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the sum modulo the prime."""
        total = mine + arriving  # both below 2^61, so 64 bits hold the sum
        return np.minimum(total, total - _PRIME)  # a difference below zero wraps round to a huge number

    def invalid_transfers(
        self, mine: NDArray[np.uint64], arriving: NDArray[np.uint64], how: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Return transfers without content, and copies of content that is already there."""
        return ((how == ReceiveOp.COPY) & (mine == arriving)) | (arriving == self._NOTHING)


def _initial_contents(
    collective: Collective, own: NDArray[np.uint64], nothing: np.uint64, chunks: range
) -> NDArray[np.uint64]:
    if collective.reduces:
        return np.repeat(own[:, None], len(chunks), axis=1)
    held = np.full((len(own), len(chunks)), nothing)
    if collective.kind == "broadcast":
        held[collective.root] = own[collective.root]
    else:
        owners = np.asarray(collective.owners)[chunks.start : chunks.stop]
        held[owners, np.arange(len(chunks))] = own[owners]
    return held


def _expected_contents(
    collective: Collective, own: NDArray[np.uint64], total: np.uint64, chunks: range
) -> NDArray[np.uint64]:
    if collective.reduces:
        return np.full(len(chunks), total)
    if collective.kind == "broadcast":
        return np.full(len(chunks), own[collective.root])
    return own[np.asarray(collective.owners)[chunks.start : chunks.stop]]


@dataclass(frozen=True, slots=True)
class ChunkHop:
    """Transfer of the chunk from rank to rank in one round."""

    index: int
    src: int
    dst: int
    how: ReceiveOp


@dataclass(frozen=True, slots=True)
class ContentVersion:
    """Content of a rank, as bits of contributors, until its next version."""

    since: int
    """Round that brought it; -1 is before the first round."""
    content: int
    hop: ChunkHop | None
    """Operation of that round."""


class ContentHistory:
    """Contents of the chunk on every rank, oldest first."""

    def __init__(self, starts: Sequence[int], wanted: int, wanting: Sequence[int]) -> None:
        self.wanted = wanted
        self._wanting = wanting
        self._of = [[ContentVersion(-1, content, None)] for content in starts]

    def apply(self, hop: ChunkHop, arriving: int) -> None:
        """Record that a hop has brought `arriving`."""
        mine = self._of[hop.dst][-1].content if hop.how == ReceiveOp.REDUCE else 0
        self._of[hop.dst].append(ContentVersion(hop.index, mine | arriving, hop))

    def before(self, rank: int, index: int) -> ContentVersion:
        """Return the content of `rank` at the start of round `index`."""
        return next(version for version in reversed(self._of[rank]) if version.since < index)

    def missing(self, rank: int) -> int:
        """Return the contributions that `rank` should hold at the end and does not."""
        return self.wanted & ~self._of[rank][-1].content if rank in self._wanting else 0

    def route(self, contributor: int, rank: int, index: int) -> list[ChunkHop]:
        """Return the hops that brought the contribution to `rank`, which held it at the start of round `index`."""
        hops: list[ChunkHop] = []
        while True:
            hop = self.before(rank, index).hop
            if hop is None:
                return hops[::-1]
            index = hop.index
            if hop.how == ReceiveOp.COPY or self.before(hop.src, index).content >> contributor & 1:
                hops.append(hop)
                rank = hop.src

    def lost_contributions(self) -> int:
        """Return the contributions that no rank holds at the end."""
        left = 0
        for versions in self._of:
            left |= versions[-1].content
        return self.wanted & ~left

    def last_arrival(self, contributors: int) -> tuple[int, int, ContentVersion]:
        """Return the last arrival of any of these contributions: contributor, receiving rank, version."""
        latest: tuple[int, int, ContentVersion] | None = None
        for rank, versions in enumerate(self._of):
            held = 0
            for version in versions:
                new = version.content & ~held & contributors
                if new and (latest is None or version.since > latest[2].since):
                    latest = (new & -new).bit_length() - 1, rank, version
                held = version.content
        assert latest is not None, "every contribution is held somewhere at first"
        return latest

    def last_version_with(
        self, contributor: int, rank: int, version: ContentVersion
    ) -> tuple[ContentVersion, ChunkHop | None]:
        """Return the last version with the contribution after its arrival at `rank`, and the hop that removes it."""
        for later in self._of[rank]:
            if later.since > version.since:
                if not later.content >> contributor & 1:
                    return version, later.hop
                version = later
        return version, None

    def copies(self, rank: int) -> list[ChunkHop]:
        """Return the copies, oldest first, that brought the final content of `rank` from the rank that computed it."""
        hops: list[ChunkHop] = []
        version = self._of[rank][-1]
        while version.hop is not None and version.hop.how == ReceiveOp.COPY:
            hops.append(version.hop)
            version = self.before(version.hop.src, version.since)
        return hops[::-1]


def replay_chunk(schedule: Schedule, chunk: int) -> tuple[ContentHistory, ChunkHop | None]:
    """Run the chunk's operations until the first invalid one.

    Returns:
        The contents until then, and that hop; None if there is none.

    Cost:
        One pass over the rounds, and a set of contributors per operation on this chunk.
    """
    versions = _initial_history(schedule, chunk)
    for index, hops in groupby(_hops_of_chunk(schedule, chunk), key=lambda hop: hop.index):
        arriving = []
        for hop in hops:
            mine, theirs = versions.before(hop.dst, index).content, versions.before(hop.src, index).content
            bad = mine & theirs if hop.how == ReceiveOp.REDUCE else mine == theirs
            if bad or not theirs:
                return versions, hop
            arriving.append((hop, theirs))
        for hop, content in arriving:
            versions.apply(hop, content)
    return versions, None


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1, 2, 4`, or the first eight and the number of the others."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _initial_history(schedule: Schedule, chunk: int) -> ContentHistory:
    collective, everybody = schedule.collective, range(schedule.num_ranks)
    one = collective.root if collective.owners is None else collective.owners[chunk]
    starts = [1 << r if collective.reduces or r == one else 0 for r in everybody]
    if not collective.reduces:
        assert one is not None
        return ContentHistory(starts, 1 << one, everybody)
    return ContentHistory(starts, (1 << schedule.num_ranks) - 1, everybody if one is None else (one,))


def _hops_of_chunk(schedule: Schedule, chunk: int) -> list[ChunkHop]:
    hops = []
    for index, round_ in enumerate(schedule.rounds):
        mask = (round_.first_chunk <= chunk) & (round_.first_chunk + round_.num_chunks > chunk)
        if mask.any():
            hops += [ChunkHop(index, src, dst, how) for src, dst, _, _, how in round_.select(mask).rows()]
    return hops


_MAX_GRID_RANKS = 16
_ROUNDS_BEFORE = 2
_MAX_HOPS = 8


def invalid_numbers_text(index: int, round_: Round, at: int, expected: str) -> str:
    """Return the error text of an operation with ranks or chunks that do not exist."""
    src, dst, first, count, how = (
        int(column[at]) for column in (round_.src, round_.dst, round_.first_chunk, round_.num_chunks, round_.how)
    )
    shown = op_text(src, dst, first, count, ReceiveOp(how)) if how <= ReceiveOp.COPY else f"{src}>{dst} with how={how}"
    return f"schedule: {shown}, expected {expected}. Correct the generator. [round {index}, op {at}]"


def race_text(schedule: Schedule, index: int, rank: int, chunk: int, what: str) -> str:
    """Return the error text of two operations of one round on the same chunk of the same rank."""
    hops = [
        ChunkHop(index, *row[:2], row[4]) for row in schedule.rounds[index].rows() if _touches_chunk(row, rank, chunk)
    ]
    text = (
        f"schedule: chunk {chunk} of rank {rank} {what} in round {index}, expected operations that may run at the same "
        f"time: {_hops_text(hops, chunk)}. Move one of them to another round."
    )
    return _with_grid(schedule, (index, rank), text)


def wrong_chunk_text(schedule: Schedule, chunk: int) -> str:
    """Return the text of the chunk's first error: an invalid transfer, else a missing contribution at the end."""
    versions, hop = replay_chunk(schedule, chunk)
    return (
        _invalid_transfer_text(schedule, chunk, versions, hop) if hop else _incomplete_text(schedule, chunk, versions)
    )


def _invalid_transfer_text(schedule: Schedule, chunk: int, versions: ContentHistory, hop: ChunkHop) -> str:
    mine, arriving = versions.before(hop.dst, hop.index), versions.before(hop.src, hop.index)
    turn = hop.index, hop.dst
    if not arriving.content:
        fault = f"rank {hop.src} sends chunk {chunk} to rank {hop.dst}, but holds nothing of it yet"
        holders = [r for r in range(schedule.num_ranks) if versions.before(r, hop.index).content]
        expected, reason = (
            "somebody who holds it",
            f"So far {ranks_text(holders)} {_verb_form(holders, 'holds', 'hold')} it",
        )
        fix = "Send it after it has arrived"
    elif hop.how == ReceiveOp.COPY:
        fault = f"rank {hop.dst} receives chunk {chunk} from rank {hop.src} and holds the same already"
        expected = "a copy that brings something"
        reason, fix = f"It holds it {_since_text(mine, chunk)}", "Drop the copy"
        if missing := versions.wanted & ~mine.content:
            reason = f"Both lack the contribution of {ranks_text(_ranks_of_content(missing))}"
            fix, turn = _lost_contribution(chunk, versions, missing)
    else:
        twice = _ranks_of_content(mine.content & arriving.content)
        fault = f"rank {hop.dst} receives chunk {chunk} from rank {hop.src} and would count {ranks_text(twice)} twice"
        expected = "disjoint contributor sets"
        reason = _counted_twice_text(chunk, versions, hop, twice[-1])
        fix = "Keep one of the two ways"
    return _with_grid(schedule, turn, f"schedule: {fault} in round {hop.index}, expected {expected}. {reason}. {fix}.")


def _counted_twice_text(chunk: int, versions: ContentHistory, hop: ChunkHop, contributor: int) -> str:
    here = versions.route(contributor, hop.dst, hop.index)
    coming = [*versions.route(contributor, hop.src, hop.index), hop]
    held = f"holds rank {contributor}'s contribution by {_hops_text(here, chunk)}" if here else "contributes itself"
    return f"Rank {hop.dst} {held}; the same comes again by {_hops_text(coming, chunk)}"


def _incomplete_text(schedule: Schedule, chunk: int, versions: ContentHistory) -> str:
    rank, missing = next((r, m) for r in range(schedule.num_ranks) if (m := versions.missing(r)))
    copies = versions.copies(rank)
    source = f"What it holds came from rank {copies[0].src} by {_hops_text(copies, chunk)}. " if copies else ""
    way, turn = _lost_contribution(chunk, versions, missing)
    text = (
        f"schedule: rank {rank} ends without the contribution of {ranks_text(_ranks_of_content(missing))} "
        f"to chunk {chunk}, "
        f"expected {ranks_text(_ranks_of_content(versions.wanted))}. {source}{way}."
    )
    return _with_grid(schedule, turn, text)


def _lost_contribution(chunk: int, versions: ContentHistory, missing: int) -> tuple[str, tuple[int, int]]:
    """Return the place where one of the missing contributions stopped, in words and as (round, rank).

    It prefers a contribution that no rank holds any more, and of several the one that got furthest: there the chain
    broke.
    """
    lost, holder, arrival = versions.last_arrival(missing & versions.lost_contributions() or missing)
    last, gone = versions.last_version_with(lost, holder, arrival)
    added = f" and what was added up to {_hops_text([last.hop], chunk)}" if last.hop and last is not arrival else ""
    until = f", until {_hops_text([gone], chunk)} overwrote it" if gone else ""
    way = (
        f"The contribution of rank {lost} to chunk {chunk} gets no further than rank {holder}, which holds it "
        f"{_since_text(arrival, chunk)}{added}{until}: send it on"
    )
    return way, (last.since + 1, holder)


def _since_text(version: ContentVersion, chunk: int) -> str:
    return f"since {_hops_text([version.hop], chunk)}" if version.hop else "from the beginning"


def _hops_text(hops: Sequence[ChunkHop], chunk: int) -> str:
    texts = [f"{op_text(hop.src, hop.dst, chunk, 1, hop.how)} in round {hop.index}" for hop in hops]
    if len(texts) > _MAX_HOPS:
        half = _MAX_HOPS // 2
        texts[half:-half] = [f"... {len(texts) - 2 * half} more ..."]
    return ", ".join(texts)


def _touches_chunk(row: tuple[int, int, int, int, ReceiveOp], rank: int, chunk: int) -> bool:
    src, dst, first, count, _ = row
    return rank in (src, dst) and first <= chunk < first + count


def _ranks_of_content(content: int) -> list[int]:
    return [r for r in range(content.bit_length()) if content >> r & 1]


def _verb_form(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _with_grid(schedule: Schedule, turn: tuple[int, int], text: str) -> str:
    """Return the text with its place, and in small groups the grid around it."""
    index, rank = min(turn[0], max(0, len(schedule.rounds) - 1)), turn[1]
    text = f"{text} [round {index}, rank {rank}]"
    if schedule.num_ranks > _MAX_GRID_RANKS or not len(schedule.rounds):
        return text
    shown = range(max(0, index - _ROUNDS_BEFORE), min(index + 2, len(schedule.rounds)))
    return "\n".join([text, *grid_lines(schedule, shown, mark=(index, rank))])


_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RoundRace:
    """Two operations of one round that touch the same chunk of the same rank."""

    rank: int
    chunk: int
    what: str


class RaceDetector:
    """Finds a chunk that is written twice in a round, or read where it is written.

    It works on ranges of chunks, and caches the senders and receivers: many schedules keep them from round to round.
    """

    def __init__(self, num_ranks: int) -> None:
        self._operation_to = np.zeros(num_ranks, np.intp)  # the operation that writes to a rank; else stale
        self._src = self._dst = np.zeros(0, np.int32)
        self._is_written_once = True
        self._reads_written_rank = np.zeros(0, np.bool_)
        self._writer_of_read = np.zeros(0, np.intp)
        self._written, self._read = _ChunkIntervals(), _ChunkIntervals()

    def find_race(self, ops: Round) -> RoundRace | None:
        """Return the first race between operations on existing chunks and ranks; None if there is none."""
        if not (np.array_equal(ops.src, self._src) and np.array_equal(ops.dst, self._dst)):
            self._index_ranks(ops.src, ops.dst)
        if not self._is_written_once:
            return _find_overlapping_race(self._written, self._read, ops)
        first, count = ops.first_chunk, ops.num_chunks
        written_first, written_count = first.take(self._writer_of_read), count.take(self._writer_of_read)
        conflict = (first < written_first + written_count) & (written_first < first + count) & self._reads_written_rank
        if not conflict.any():
            return None
        at = int(np.argmax(conflict))
        return RoundRace(int(ops.src[at]), int(max(first[at], written_first[at])), "is read and written")

    def _index_ranks(self, src: _Ints, dst: _Ints) -> None:
        """Index the ranks: if no rank receives twice, a read can collide only with the one write to its rank."""
        self._src, self._dst = src.copy(), dst.copy()
        numbers = np.arange(len(dst))
        self._operation_to[dst] = numbers
        self._is_written_once = bool((self._operation_to[dst] == numbers).all())
        self._writer_of_read = np.minimum(self._operation_to[src], len(dst) - 1)
        self._reads_written_rank = dst[self._writer_of_read] == src


def _find_overlapping_race(written: "_ChunkIntervals", read: "_ChunkIntervals", ops: Round) -> RoundRace | None:
    width = int((ops.first_chunk + ops.num_chunks).max())
    begin, end = written.sorted(ops.dst, ops, width)
    double = begin[1:] < end[:-1]
    if double.any():
        rank, chunk = divmod(int(begin[1:][np.argmax(double)]), width)
        return RoundRace(rank, chunk, "is written twice")
    read_begin, read_end = read.sorted(ops.src, ops, width)
    before = np.searchsorted(begin, read_end) - 1  # the last write that begins before the read ends
    conflict = (before >= 0) & (end[before] > read_begin)
    if conflict.any():
        at = int(np.argmax(conflict))
        rank, chunk = divmod(int(max(read_begin[at], begin[before[at]])), width)
        return RoundRace(rank, chunk, "is read and written")
    return None


class _ChunkIntervals:
    """Chunks of ranks as intervals of one line, one rank after the other; neighbours show overlaps.

    It caches the last ones, because sorting takes most of the time.
    """

    def __init__(self) -> None:
        self._begin = self._sorted_begin = self._sorted_end = np.zeros(0, np.int64)
        self._count = np.zeros(0, np.int32)

    def sorted(self, ranks: _Ints, ops: Round, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (begin, end) of the operations' chunks at these ranks, by begin; ends are in order if none overlap."""
        begin, count = ranks * np.int64(width) + ops.first_chunk, ops.num_chunks
        if not (np.array_equal(begin, self._begin) and np.array_equal(count, self._count)):
            self._begin, self._count = begin, count.copy()
            order = np.argsort(begin) if (count != count[0]).any() else None
            self._sorted_begin = np.sort(begin) if order is None else begin[order]
            self._sorted_end = self._sorted_begin + (count[0] if order is None else count[order])
        return self._sorted_begin, self._sorted_end


_MAX_CELLS = 2**18
"""Chunks of ranks that are processed at a time: megabytes rather than gigabytes of intermediate columns."""


def verify(
    schedule: Schedule,
    *,
    rng: np.random.Generator | None = None,
    exact: bool | None = None,
    memory_bytes: int = 2**30,
    progress: Callable[[float], None] | None = None,
) -> RoundingBound:
    """Return the bound of the rounding errors if the schedule computes its collective, raise otherwise.

    Args:
        schedule: The schedule to prove.
        rng: Source of the random numbers for large groups; None draws a fresh one, so that no schedule can be made to
            fit a known draw.
        exact: Exact sets or random sums; None takes exact sets up to 64 ranks.
        memory_bytes: Bound on the symbolic contents held at a time; a smaller one costs more passes over the rounds.
        progress: Called with the fraction done, about a hundred times.

    Raises:
        ScheduleError: The schedule is wrong; the text names round, rank and chunk, in small groups with the grid.

    Cost:
        One pass over the rounds per block of chunks: see `bench/verify_10000.py`.
    """
    ranks = schedule.num_ranks
    if exact is None:
        exact = ranks <= MAX_EXACT_RANKS
    if exact and ranks > MAX_EXACT_RANKS:
        raise ValueError(f"exact sets hold at most {MAX_EXACT_RANKS} ranks, the schedule has {ranks}")
    algebra: ContentAlgebra = ExactSets() if exact else RandomSums(rng or np.random.default_rng(), ranks)
    width = max(1, min(schedule.num_chunks, memory_bytes // (8 * ranks)))
    starts = range(0, schedule.num_chunks, width)
    num_roundings = 0
    for number, start in enumerate(starts):
        chunks = range(start, min(start + width, schedule.num_chunks))
        steps = _VerificationProgress(progress, number, len(starts), len(schedule.rounds))
        num_roundings = max(num_roundings, _verify_block(schedule, algebra, chunks, steps))
    if progress is not None:
        progress(1.0)
    return RoundingBound(num_roundings, schedule.encoding.format if schedule.encoding else "exact")


class _VerificationProgress:
    """Reports the fraction of (block, round) pairs done."""

    def __init__(self, progress: Callable[[float], None] | None, block: int, num_blocks: int, num_rounds: int) -> None:
        self._progress = progress
        self._done = block * num_rounds
        self._total = num_blocks * num_rounds
        self._every = max(1, self._total // 100)

    def begin_round(self, index: int) -> None:
        if self._progress is not None and (self._done + index) % self._every == 0:
            self._progress((self._done + index) / self._total)


def _verify_block(schedule: Schedule, algebra: ContentAlgebra, chunks: range, steps: _VerificationProgress) -> int:
    """Verify some chunks; return the largest number of roundings that a contribution to them passes."""
    roundings = RoundingCounts(schedule, chunks) if schedule.encoding is not None else None
    held = algebra.initial(schedule.collective, schedule.num_ranks, chunks)
    races = RaceDetector(schedule.num_ranks)
    for index, round_ in enumerate(schedule.rounds):
        steps.begin_round(index)
        if chunks.start == 0 and len(round_):
            _check_indices(schedule, index, round_)
            race = races.find_race(round_)
            if race is not None:
                raise ScheduleError(race_text(schedule, index, race.rank, race.chunk, race.what))
        ops = round_ if len(chunks) == schedule.num_chunks else _clip_to_chunks(round_, chunks)
        for some in _split_by_size(ops):
            _apply_operations(schedule, algebra, held, chunks, some)
            if roundings is not None:
                roundings.apply(some, *_cell_indices(some, chunks))
    _check_result(schedule, algebra, held, chunks)
    return roundings.largest() if roundings is not None else 0


def _apply_operations(
    schedule: Schedule, algebra: ContentAlgebra, held: NDArray[np.uint64], chunks: range, ops: Round
) -> None:
    """Apply operations of a round; as none reads or writes a chunk that another writes, their order does not matter."""
    sources, places = _cell_indices(ops, chunks)
    flat = held.reshape(-1)
    arriving, mine = flat.take(sources), flat.take(places)
    how = ops.how if len(ops) == len(places) else np.repeat(ops.how, ops.num_chunks)
    faults = algebra.invalid_transfers(mine, arriving, how)
    if faults.any():
        chunk = chunks[int(places[np.argmax(faults)]) % len(chunks)]
        raise ScheduleError(wrong_chunk_text(schedule, chunk))
    reduces = how == ReceiveOp.REDUCE
    if reduces.all():
        arriving = algebra.combine(mine, arriving)
    elif reduces.any():
        arriving = np.where(reduces, algebra.combine(mine, arriving), arriving)
    flat[places] = arriving


def _check_indices(schedule: Schedule, index: int, round_: Round) -> None:
    """Refuse ranks and chunks that do not exist; a fast check first, the slow one only if it fails."""
    ranks, chunks, reduces = schedule.num_ranks, schedule.num_chunks, schedule.collective.reduces
    src, dst, first, count = round_.src, round_.dst, round_.first_chunk, round_.num_chunks
    fine = (
        min(src.min(), dst.min(), first.min()) >= 0
        and max(src.max(), dst.max()) < ranks
        and count.min() >= 1
        and int(first.max()) + int(count.max()) <= chunks
        and round_.how.max() <= ReceiveOp.COPY
        and (reduces or round_.how.min() == ReceiveOp.COPY)
        and not (src == dst).any()
    )
    if fine:
        return
    checks = (
        ((src < 0) | (src >= ranks) | (dst < 0) | (dst >= ranks), f"ranks 0..{ranks - 1}"),
        (src == dst, "two different ranks"),
        ((first < 0) | (count < 1) | (first > chunks - count.astype(np.int64)), f"chunks 0..{chunks - 1}"),
        (round_.how > ReceiveOp.COPY, "reduce (0) or copy (1)"),
        (
            (round_.how == ReceiveOp.REDUCE) & (not reduces),
            f"copies (=) only, as {schedule.collective.kind} combines nothing",
        ),
    )
    for bad, expected in checks:
        if bad.any():
            raise ScheduleError(invalid_numbers_text(index, round_, int(np.argmax(bad)), expected))


def _check_result(schedule: Schedule, algebra: ContentAlgebra, held: NDArray[np.uint64], chunks: range) -> None:
    wanted = algebra.expected(schedule.collective, schedule.num_ranks, chunks)
    kind, columns = schedule.collective.kind, np.arange(len(chunks))
    if kind == "reduce-scatter":
        owners = np.asarray(schedule.collective.owners)[chunks.start : chunks.stop]
        wrong = held[owners, columns] != wanted
    elif kind == "reduce":
        wrong = held[schedule.collective.root] != wanted
    else:
        wrong = np.zeros(len(chunks), np.bool_)
        for content in held:
            wrong |= content != wanted
    if wrong.any():
        raise ScheduleError(wrong_chunk_text(schedule, chunks[int(np.argmax(wrong))]))


def _clip_to_chunks(round_: Round, chunks: range) -> Round:
    """Return the part of a round that touches a block of chunks, clipped to the block."""
    end = round_.first_chunk + round_.num_chunks
    ops = round_.select((round_.first_chunk < chunks.stop) & (end > chunks.start))
    first = np.maximum(ops.first_chunk, chunks.start)
    stop = np.minimum(ops.first_chunk + ops.num_chunks, chunks.stop)
    return Round(ops.src, ops.dst, first, stop - first, ops.how)


def _split_by_size(ops: Round) -> Iterator[Round]:
    """Yield the operations in order, in parts with a bounded number of chunks."""
    if int(ops.num_chunks.sum(dtype=np.int64)) <= _MAX_CELLS:
        if len(ops):
            yield ops
        return
    part = np.cumsum(ops.num_chunks, dtype=np.int64) // _MAX_CELLS
    borders = np.flatnonzero(np.diff(part, prepend=-1, append=-1))
    for begin, end in itertools.pairwise(borders.tolist()):
        yield ops.select(np.s_[begin:end])


def _cell_indices(ops: Round, chunks: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the sent chunks at the senders and at the receivers, operation by operation."""
    counts, width = ops.num_chunks, np.int64(len(chunks))
    column = ops.first_chunk - np.int64(chunks.start)
    sources, places = ops.src * width + column, ops.dst * width + column
    if (counts == 1).all():
        return sources, places
    if (counts == counts[0]).all():
        within = np.arange(counts[0])
        return (sources[:, None] + within).reshape(-1), (places[:, None] + within).reshape(-1)
    begins = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(begins, counts)
    return np.repeat(sources, counts) + within, np.repeat(places, counts) + within
